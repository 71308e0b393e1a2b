"""Prefill's view of one decode incarnation: its stream, the rooms that it named, what it is to be told. Pure."""

from __future__ import annotations

from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import Destination, RoomKey, SessionState, Timing, Writes


class PrefillPair:
    """``stream``: the shell's token of the stream that counts (2, one stream). ``peer``: its memory, as Hello said;
    opaque. ``places``: how many ranks of its engine name each room to us, ``place``: which of them it is.
    ``sends_aux``: we are the rank that sends it the first token and its metadata. ``verify``: it compares checksums.
    ``parts``: how many of our pages fill one of its own; ``pools``: how many it has.

    ``rooms`` it owns; ``answers``: what it keeps hearing of rooms that it cannot have (rule 10, ownership);
    ``unclaimed``: how many of its rooms wait for a local sender; ``forgotten``: how many are kept only for a late one
    (rule 11, memory of the ended); ``pending_rooms``: what it is to be told. ``unknown_writes``: to it, of which nobody
    knows whether they ended; ``probe``: the room that is to show whether writes end again, ``next_probe_at``: when
    another one may (rule 8, pages by evidence).
    """

    __slots__ = (
        "answers",
        "broken_at",
        "forgotten",
        "heard_at",
        "lost",
        "next_probe_at",
        "number",
        "parts",
        "peer",
        "pending_rooms",
        "place",
        "places",
        "pools",
        "probe",
        "ref",
        "rooms",
        "sends_aux",
        "silent",
        "stream",
        "unclaimed",
        "unknown_writes",
        "verify",
    )

    def __init__(self, ref: RankRef, peer: object, now: int) -> None:
        self.ref = ref
        self.peer = peer
        self.sends_aux = True
        self.verify = False
        self.parts = self.pools = 1
        self.place, self.places = 0, 1
        self.number = 0
        self.stream: object | None = None
        self.heard_at = now
        self.broken_at: int | None = None
        self.lost = self.silent = False
        self.pending_rooms: dict[RoomKey, None] = {}
        self.answers: dict[RoomKey, tuple[Failure, Writes]] = {}
        self.rooms: dict[RoomKey, None] = {}
        self.unclaimed = 0
        self.forgotten = 0
        self.unknown_writes = self.next_probe_at = 0
        self.probe: RoomKey | None = None

    def misfit(self, destination: Destination) -> KvGrpcError | None:
        """Returns what is wrong with the pages that it names: parts of pages are of the first pool alone."""
        if self.parts == 1 or self.pools == 1 or destination.others is not None:
            return None
        rule = f"a set for each of {self.pools} pools: {self.parts} of prefill's pages fill one of the first pool"
        return InvalidRequest.of("pages", "one set", rule)

    def serves_with(self, other: PrefillPair) -> bool:
        """True if both pairs are ranks of one decode replica, which receives the same prompts."""
        mine, theirs = self.ref.rank, other.ref.rank
        same_replica = (mine.engine, mine.dp, mine.cp) == (theirs.engine, theirs.dp, theirs.cp)
        return same_replica and self.places == other.places

    @property
    def up(self) -> bool:
        """A stream stands that counts."""
        return self.stream is not None

    @property
    def open_rooms(self) -> int:
        """Rooms that decode did not forget."""
        return len(self.rooms) - self.forgotten

    @property
    def state(self) -> SessionState:
        """The state that tables show."""
        if self.lost:
            return SessionState.LOST
        if self.stream is None:
            return SessionState.BROKEN
        return SessionState.SILENT if self.silent else SessionState.OPEN

    def welcome(self, stream: object, number: int, now: int) -> object | None:
        """Takes a newer stream. Returns the stream that it replaces, to be closed (rule 2, one stream)."""
        before, self.stream = self.stream, stream
        self.number = number
        self.heard_at, self.broken_at, self.lost = now, None, False
        return before

    def end_stream(self, now: int, timing: Timing) -> object | None:
        """Nothing of the stream counts any more; the stream that is to be closed, if there is one."""
        stream, self.stream = self.stream, None
        self.broken_at = timing.break_counts_from(now, self.heard_at)
        return stream

    def given_up(self, now: int, timing: Timing) -> str:
        """Returns how the pair was lost by now; empty: it was not (rule 3, break and loss)."""
        if self.lost:
            return ""
        if self.stream is not None:
            limit = timing.milliseconds(timing.silence)
            silent = now - self.heard_at > timing.silence
            return f"not a word for {limit} ms, though its connection stood" if silent else ""
        late = self.broken_at is not None and now - self.broken_at > timing.welcome_within
        return f"not back within {timing.milliseconds(timing.welcome_within)} ms of a break" if late else ""
