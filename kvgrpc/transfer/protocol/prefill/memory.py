"""Prefill's memory: ended records for a while, stream numbers, writes that it cannot vouch for, senders not named yet.

Pure and bounded. Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections import OrderedDict

from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.types import (
    WRITES_STOPPED,
    WRITES_UNKNOWN,
    RoomKey,
    Timing,
    Writes,
)

_MOST_LOST = 1024


class EndedRecords:
    """Keys of ended records, each for ``ticks`` from its last change, at most ``limit`` (11, memory of the ended)."""

    def __init__(self, ticks: int, limit: int) -> None:
        self._ticks = ticks
        self._limit = limit
        self._since: OrderedDict[RoomKey, int] = OrderedDict()

    def keep(self, key: RoomKey, now: int) -> None:
        """Keeps the record for ``ticks`` from now on, also where it was kept before."""
        self._since[key] = now
        self._since.move_to_end(key)

    def drop(self, key: RoomKey) -> None:
        self._since.pop(key, None)

    def take_over(self, now: int) -> list[tuple[RoomKey, bool]]:
        """Removes and returns the records whose time is over (True) and, past the limit, the oldest (False)."""
        over: list[tuple[RoomKey, bool]] = []
        since = self._since
        while since:
            aged = now - next(iter(since.values())) >= self._ticks
            if not aged and len(since) <= self._limit:
                break
            over.append((since.popitem(last=False)[0], aged))
        return over


class StreamNumbers:
    """The largest stream number of each decode incarnation, also of dropped pairs; oldest out (2, one stream)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._largest: OrderedDict[RankRef, int] = OrderedDict()

    def largest(self, ref: RankRef) -> int:
        return self._largest.get(ref, 0)

    def note(self, ref: RankRef, number: int) -> None:
        self._largest[ref] = max(number, self._largest.get(ref, 0))
        self._largest.move_to_end(ref)
        if len(self._largest) > self._limit:
            self._largest.popitem(last=False)


class UnknownWrites:
    """Decodes to whom a write may be on its way, though its record is gone (11, memory of the ended)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decodes: set[RankRef] = set()
        self._anybody = False

    def add(self, decode: RankRef) -> None:
        if len(self._decodes) < self._limit:
            self._decodes.add(decode)
        else:
            self._anybody = True

    def __bool__(self) -> bool:
        return self._anybody or bool(self._decodes)

    def clear(self) -> None:
        """The engine that wrote was destroyed."""
        self._decodes.clear()
        self._anybody = False

    def without_record(self, decode: RankRef) -> Writes:
        """Returns what can be said of writes to a room that has no record: an older record of it may have expired."""
        return WRITES_UNKNOWN if self._anybody or decode in self._decodes else WRITES_STOPPED


class Unnamed:
    """Senders whose room no decode has named yet, and the decodes that were lost, whose rooms some of these are.

    Where router and decode name no engine to prefill, nobody can say whose a room is that a dead decode never named.
    But a decode that is alive names each room as soon as its engine has the request, so after a loss what is still
    without a name after ``Timing.unnamed_after_loss`` is taken for the dead one's (6, ending).

    A loss counts until that rank is back, or for as long as a room may wait; meanwhile its router may send requests to
    it. The newest one counts from when it was seen.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._claimed: dict[RoomKey, int] = {}  # in this order, as time goes on
        self._lost: OrderedDict[RankId, int] = OrderedDict()

    def add(self, key: RoomKey, now: int) -> None:
        self._claimed[key] = now

    def drop(self, key: RoomKey) -> None:
        if self._claimed.pop(key, None) is not None and not self._claimed:
            self._claimed = {}  # an empty one keeps the room that it had

    def note_lost(self, decode: RankId, now: int) -> None:
        self._lost[decode] = now
        self._lost.move_to_end(decode)
        if len(self._lost) > _MOST_LOST:
            self._lost.popitem(last=False)

    def note_back(self, decode: RankId) -> None:
        self._lost.pop(decode, None)

    def take_over(self, now: int) -> list[tuple[RoomKey, RankId]]:
        """Removes and returns the senders that have waited long enough, with the decode that was lost last."""
        while self._lost and now - next(iter(self._lost.values())) > self._timing.room_deadline:
            self._lost.popitem(last=False)
        over: list[tuple[RoomKey, RankId]] = []
        if not self._lost:
            return over
        decode, lost_at = next(reversed(self._lost.items()))
        for key, claimed_at in self._claimed.items():
            if now - max(claimed_at, lost_at) < self._timing.unnamed_after_loss:
                break
            over.append((key, decode))
        for key, _ in over:
            del self._claimed[key]
        return over
