"""The parts of a pair that both cores share: news for its peer, and the peer's silence, which people are shown. Pure.

News are the rooms that changed, by pair. No message is kept: a pair's ``pending_rooms`` says which rooms changed, their
latest state is read when it is told. So it is bounded by the rooms.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import RoomKey, Timing

# Of one frame. More at once are no faster, and what lives for a frame's time is what the garbage collector looks at.
ROOMS_AT_ONCE = 1024
_LATER_AT_MOST = 1024


class PeerToTell(Protocol):
    """One pair of incarnations. ``up``: a stream stands that counts."""

    pending_rooms: dict[RoomKey, None]

    @property
    def up(self) -> bool: ...


P = TypeVar("P", bound=PeerToTell)


class PendingRooms(Generic[P]):
    """The pairs that have something to say, in the order in which they got it."""

    def __init__(self) -> None:
        self._now: dict[P, None] = {}
        self._later_since_this_tick: dict[P, None] = {}
        self._later_since_last_tick: dict[P, None] = {}

    def add(self, pair: P, key: RoomKey) -> None:
        """The peer is to be told of this room now."""
        pair.pending_rooms[key] = None
        self._now[pair] = None

    def add_later(self, pair: P, key: RoomKey) -> None:
        """The peer is to be told of this room with whatever is said next, at the latest with the second tick from
        now. Where there is news in every tick, that is never a frame of its own."""
        pair.pending_rooms[key] = None
        if len(pair.pending_rooms) < _LATER_AT_MOST:
            self._later_since_this_tick[pair] = None
        else:
            self._now[pair] = None

    def add_all(self, pair: P, keys: Iterable[RoomKey]) -> None:
        """The peer is to be told of all these rooms now: its stream was welcomed. That is all that a resumed session
        needs (rule 3, break and loss)."""
        pair.pending_rooms.update(dict.fromkeys(keys))
        self._now[pair] = None

    def tick(self) -> None:
        self._now.update(self._later_since_last_tick)
        self._later_since_last_tick, self._later_since_this_tick = self._later_since_this_tick, {}

    def take_pairs(self) -> list[P]:
        """The pairs that have something to say and a stream that is up; other pairs say all of it once welcomed."""
        if not self._now:
            return []
        pairs, self._now = self._now, {}
        for pair in pairs:
            self._later_since_this_tick.pop(pair, None)
            self._later_since_last_tick.pop(pair, None)
        return [pair for pair in pairs if pair.up]


def take_keys(pair: PeerToTell, most: int = ROOMS_AT_ONCE) -> list[RoomKey]:
    """The oldest ``most`` of its pending rooms, which are pending no more: in pieces, so that one peer's thousands hold
    up nobody's ten."""
    pending = pair.pending_rooms
    if len(pending) <= most:
        taken = list(pending)
        pending.clear()
    else:
        taken = list(islice(pending, most))
        for key in taken:
            del pending[key]
    return taken


class SilentPair(NamedTuple):
    """A pair whose peer said nothing for ``seconds`` though its connection stands, or that is no longer ``silent``.
    ``rooms``: how many depend on it. People are shown it, and it is nobody's failure (rule 3, break and loss)."""

    ref: RankRef
    silent: bool
    seconds: float
    rooms: int


class _Pair(Protocol):
    @property
    def ref(self) -> RankRef: ...

    silent: bool


def note_silence(pair: _Pair, since: int | None, rooms: int, now: int, timing: Timing) -> SilentPair | None:
    """Returns what is to be told of a pair in this tick. ``since``: when its peer was heard, or reached, last; None: no
    connection stands."""
    before, pair.silent = pair.silent, since is not None and now - since > timing.silent_after
    if since is None or pair.silent == before:
        return None
    return SilentPair(pair.ref, pair.silent, (now - since) * timing.tick_seconds, rooms)
