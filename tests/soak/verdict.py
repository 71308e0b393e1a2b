"""What a soak shall do, what became of each room, and whether that may be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.soak.node import Engine
from tests.soak.orders import LAYERS, PAGE_BYTES, Ended, Fault, Resources, heads_of

KILLED = "KILLED"  # the side's process was, so nobody was left to say how the room ended
FAULT_SHARE = (0.08, 0.16)
# Of fewer rooms the share is chance.
SHARE_FROM_ROOMS = 300
# A room whose processes all lived, that nobody cancelled and whose writes did not fail may end so: too many pages may
# wait for the evidence of others, and too many writes to its decode may have had an unknown end.
SOUND = {"", "PAGES_HELD", "TOO_MANY_REQUESTS"}
FAILED_BY_A_WRITE = "TRANSFER_FAILED"


@dataclass(frozen=True, slots=True)
class Plan:
    """``in_flight``: rooms at once. ``kill_every``: seconds between two kills or stops, from when all ranks are open
    again. ``fault_rate``: of all rooms, how many name a page whose write fails.
    """

    rooms: int
    seconds: float
    in_flight: int = 24
    kill_every: float = 3.0
    fault_rate: float = 0.12
    data_plane: str = "shm"
    seed: int = 1


@dataclass
class Room:
    """``ended``: by the name of the rank, of both engines."""

    number: int
    prefill: Engine
    decode: Engine
    began: float
    pages: int
    cancelled: bool
    fault: Fault | None
    disturbed: bool = False
    ended: dict[str, Ended] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.prefill.tp + self.decode.tp

    @property
    def at_decode(self) -> list[Ended]:
        return [self.ended[node.name] for node in self.decode.nodes]

    @property
    def reason(self) -> str:
        """How it ended for decode as a whole: "" where every rank has Success."""
        return next((said.reason for said in self.at_decode if said.reason), "")

    def wrong(self) -> list[str]:
        """What must not be, of a room that is over and to which nothing else happened than its fault."""
        if self.cancelled or self.disturbed:
            return []
        allowed = SOUND if self.fault is None else {*SOUND, FAILED_BY_A_WRITE}
        found = [f"{said.reason} at {name}" for name, said in self.ended.items() if said.reason not in allowed]
        if self.fault is not None:
            found += [
                f"Success at {node.name}, and a write of its pages failed"
                for tp, node in enumerate(self.decode.nodes)
                if self._is_written_by_the_fault(tp) and not self.ended[node.name].reason
            ]
        return [f"room {self.number} of {self.prefill.name} and {self.decode.name}: {one}" for one in found]

    def _is_written_by_the_fault(self, decode_tp: int) -> bool:
        assert self.fault is not None
        written = heads_of(self.fault.tp, self.prefill.tp)
        return bool(set(written) & set(heads_of(decode_tp, self.decode.tp)))


@dataclass
class Result:
    """``problems``: what must never be; empty means that the soak is OK. ``injected``: rooms whose write was to fail,
    and ``failed_by_it``: those of them that ended so, and not by a cancel or a kill that came first.
    """

    plan: Plan
    rooms: int = 0
    successes: int = 0
    injected: int = 0
    failed_by_it: int = 0
    bytes_checked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_room: float = 0.0
    problems: list[str] = field(default_factory=list)
    resources: dict[str, tuple[Resources, Resources]] = field(default_factory=dict)

    def settle(self, room: Room) -> None:
        """A room is over."""
        self.problems += room.wrong()
        self.longest_room = max(self.longest_room, *(said.seconds for said in room.at_decode))
        self.reasons[room.reason or "SUCCESS"] += 1
        self.failed_by_it += room.fault is not None and room.reason == FAILED_BY_A_WRITE
        if not room.reason:
            self.successes += 1
            self.pairs[f"tp {room.prefill.tp} to {room.decode.tp}"] += 1
            self.bytes_checked += room.pages * PAGE_BYTES * LAYERS

    def check_share(self) -> None:
        """Whether as many writes failed as were meant to."""
        share = self.injected / self.rooms
        if self.rooms >= SHARE_FROM_ROOMS and not FAULT_SHARE[0] <= share <= FAULT_SHARE[1]:
            self.problems.append(f"writes of {share:.1%} of the rooms failed, {self.plan.fault_rate:.0%} were to")
