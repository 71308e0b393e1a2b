"""What a soak shall do, what became of each room, and whether that may be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvgrpc.dataplane.base import Outcome
from kvgrpc.transfer.protocol.types import Timing
from tests.soak.node import Engine
from tests.soak.orders import LAYERS, PAGE_BYTES, ROOM_SECONDS, Ended, Fault, Resources, heads_of

KILLED = "KILLED"  # the side's process was, so nobody was left to say how the room ended
FAULT_SHARE = (0.08, 0.16)
# Of fewer rooms the share is chance.
SHARE_FROM_ROOMS = 300
# So many writes of an unknown end, of which none was written late: a rank that is killed at once writes none.
LATE_FROM_ROOMS = 6
# A room whose processes all lived, that nobody cancelled and whose writes did not fail may end so: too many pages may
# wait for the evidence of others, and too many writes to its decode may have had an unknown end.
REFUSED = {"PAGES_HELD", "TOO_MANY_REQUESTS"}
SOUND = {""} | REFUSED
LARGEST_REFUSED_SHARE = 0.1
LEAST_SUCCESS_SHARE = 0.5
FAILED_BY_A_WRITE = "TRANSFER_FAILED"
CANCELLED = "ROOM_CANCELLED"
# What a kill or a stop of one of its processes may end a room with.
DISTURBED = {KILLED, "PEER_LOST", "TRANSFER_FAILED", "ROOM_NOT_FOUND"}
# What else it may, at a rank that never met the other side. A sender whose decode died before it named the room waits
# until its deadline; so does a decode that found the successor of its prefill, to which nobody gave the room. An outage
# of the registry may do nothing else: a question about an engine that is new to the rank waits until it is back.
NEVER_MET = {"ROOM_DEADLINE"}
# Past a room's deadline: for the tick, the peer's word and a busy machine.
LATE_SECONDS = 2.0
# Past the loss of a stopped peer of a room whose ranks had met when one of them was killed or stopped.
LATE_LOSS_SECONDS = 3.0
_TIMING = Timing()
UNREACHABLE = (_TIMING.ping_interval + _TIMING.ping_timeout + _TIMING.welcome_within) * _TIMING.tick_seconds
# A process that a busy machine is slow to start puts off the next kill, but not so long.
LONGEST_PEACE = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``in_flight``: rooms at once. ``kill_every``: seconds between two kills or stops, or longer, until somebody may
    go. ``fault_rate``: of all rooms, how many name a page whose write fails; ``unknown_share``: of these, how many
    with an unknown end, for which decode holds the pages until their writer is dead.
    """

    rooms: int
    seconds: float
    in_flight: int = 24
    kill_every: float = 3.0
    fault_rate: float = 0.12
    unknown_share: float = 0.1
    data_plane: str = "shm"
    seed: int = 1


@dataclass
class Room:
    """``disturbed``: one of its processes was killed or stopped, or its decode could not know yet that a prefill's had
    been, before it began. ``unanswered``: the registry was, or warmed up, while
    the room was open. ``ended``: by the name of the rank, of both engines.
    """

    number: int
    prefill: Engine
    decode: Engine
    began: float
    pages: int
    cancelled: bool
    fault: Fault | None
    disturbed: bool = False
    unanswered: bool = False
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
        """What must not be, of a room that is over, whatever happened to it."""
        found = [
            f"{said.reason or 'Success'} at {name}"
            for name, said in self.ended.items()
            if said.reason not in self._allowed(said)
        ]
        found += [
            f"{said.reason or 'Success'} at {name} after {said.seconds:.1f} s, its deadline is {ROOM_SECONDS:.0f} s"
            for name, said in self.ended.items()
            if said.seconds > ROOM_SECONDS + LATE_SECONDS and not (self.disturbed and said.since is not None)
        ]
        if self.fault is not None:
            found += [
                f"Success at {node.name}, and a write of its pages failed"
                for tp, node in enumerate(self.decode.nodes)
                if self._is_written_by_the_fault(tp) and not self.ended[node.name].reason
            ]
        return [f"room {self.number} of {self.prefill.name} and {self.decode.name}: {one}" for one in found]

    def latest(self) -> tuple[float, str]:
        """Of the ranks that had met the other side when a process of the room was killed or stopped the one whose room
        ended last: how many seconds later, and in words."""
        ends = [
            (
                said.since,
                f"room {self.number} of {self.prefill.name} and {self.decode.name}: {said.reason or 'Success'}",
            )
            for said in self.ended.values()
            if said.since is not None
        ]
        return max(ends, default=(0.0, "")) if self.disturbed and not self.unanswered else (0.0, "")

    @property
    def is_sound(self) -> bool:
        """Nothing was done to it."""
        return not (self.disturbed or self.unanswered or self.cancelled) and self.fault is None

    def _allowed(self, said: Ended) -> set[str]:
        """The reasons that what happened to the room can bring: never INTERNAL, never none."""
        allowed = set(SOUND)
        if self.fault is not None:
            allowed.add(FAILED_BY_A_WRITE)
        if self.cancelled:
            allowed.add(CANCELLED)
        if self.disturbed:
            allowed |= DISTURBED
        if (self.disturbed or self.unanswered) and said.since is None:
            allowed |= NEVER_MET
        return allowed

    def _is_written_by_the_fault(self, decode_tp: int) -> bool:
        assert self.fault is not None
        written = heads_of(self.fault.tp, self.prefill.tp)
        return bool(set(written) & set(heads_of(decode_tp, self.decode.tp)))


@dataclass
class Result:
    """``problems``: what must never be; empty means that the soak is OK. ``injected``: rooms whose write was to fail,
    and ``failed_by_it``: those of them that ended so, and not by a cancel or a kill that came first; ``unknown``: of
    the latter those whose write was to land later all the same. ``late_writes``: how those ended, by their Outcome.
    ``sound``: rooms to which nothing was done, and ``refused``: those of them that were not taken. ``latest_loss``: the
    longest time from a kill or a stop to the end of a room whose ranks had met, and which that was.
    """

    plan: Plan
    rooms: int = 0
    successes: int = 0
    injected: int = 0
    failed_by_it: int = 0
    unknown: int = 0
    bytes_checked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    late_writes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_room: float = 0.0
    longest_disturbed: float = 0.0
    sound: int = 0
    refused: int = 0
    latest_loss: tuple[float, str] = (0.0, "")
    problems: list[str] = field(default_factory=list)
    resources: dict[str, tuple[Resources, Resources]] = field(default_factory=dict)

    def settle(self, room: Room) -> None:
        """A room is over."""
        self.problems += room.wrong()
        longest = max(said.seconds for said in room.ended.values())
        if room.disturbed or room.unanswered:
            self.longest_disturbed = max(self.longest_disturbed, longest)
        else:
            self.longest_room = max(self.longest_room, longest)
        self.latest_loss = max(self.latest_loss, room.latest())
        self.sound += room.is_sound
        self.refused += room.is_sound and room.reason in REFUSED
        self.reasons[room.reason or "SUCCESS"] += 1
        if room.fault is not None and room.reason == FAILED_BY_A_WRITE:
            self.failed_by_it += 1
            self.unknown += room.fault.outcome is Outcome.FAILED_UNKNOWN
        if not room.reason:
            self.successes += 1
            self.pairs[f"tp {room.prefill.tp} to {room.decode.tp}"] += 1
            self.bytes_checked += room.pages * PAGE_BYTES * LAYERS

    def check_disturbances(self, seconds: float) -> None:
        """Whether processes were killed and stopped all along, while rooms were given out for so long."""
        total = self.kills.total() + self.stops.total()
        if self.plan.kill_every < LONGEST_PEACE and total < int(seconds / LONGEST_PEACE):
            meant = f"one every {self.plan.kill_every:g} s was to be"
            self.problems.append(f"{total} kills and stops in {seconds:.0f} s, {meant}")

    def check_outcomes(self) -> None:
        """Whether rooms mostly went well, and those that were cut off ended as soon as their ranks can know it.

        A machine on which rooms that nobody disturbed take longer than ``LATE_LOSS_SECONDS`` is as slow to end others.
        """
        seconds, which = self.latest_loss
        allowed = UNREACHABLE + max(LATE_LOSS_SECONDS, self.longest_room)
        if seconds > allowed:
            after = f"{seconds:.1f} s after a process of it was killed or stopped"
            self.problems.append(f"{which} {after}, {allowed:.1f} s are allowed")
        if self.rooms < SHARE_FROM_ROOMS:
            return
        if self.refused > LARGEST_REFUSED_SHARE * self.sound:
            self.problems.append(f"{self.refused} of {self.sound} rooms to which nothing was done were refused")
        if self.successes < LEAST_SUCCESS_SHARE * self.rooms:
            self.problems.append(f"{self.successes} of {self.rooms} rooms succeeded")

    def check_late_writes(self) -> None:
        """Whether what had an unknown end landed: where it never does, no page is proven to wait for it."""
        if self.unknown >= LATE_FROM_ROOMS and not self.late_writes[Outcome.DONE.name]:
            self.problems.append(
                f"of {self.unknown} rooms with an unknown write none landed late: {dict(self.late_writes)}"
            )

    def check_share(self) -> None:
        """Whether as many writes failed as were meant to."""
        share = self.injected / max(1, self.rooms)
        if self.rooms >= SHARE_FROM_ROOMS and not FAULT_SHARE[0] <= share <= FAULT_SHARE[1]:
            self.problems.append(f"writes of {share:.1%} of the rooms failed, {self.plan.fault_rate:.0%} were to")
