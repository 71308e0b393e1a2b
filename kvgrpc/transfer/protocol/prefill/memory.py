"""Prefill's memory of what is over: ended records for a while, stream numbers, writes that it cannot vouch for.

Pure and bounded. Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections import OrderedDict

from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import (
    WRITES_STOPPED,
    WRITES_UNKNOWN,
    RoomKey,
    Writes,
)


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
