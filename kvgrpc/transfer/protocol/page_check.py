"""The pages that rooms have, for ranks that check what their engine gives them (rule 16, page check). Pure.

Off unless the rank is told so: a healthy engine never gives a page twice, and whether it is healthy shows in tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvgrpc.errors import KvGrpcError
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.destination import Destination
from kvgrpc.transfer.protocol.types import RoomKey, U32Array


class PoolSize(Struct, frozen=True):
    """``name`` of a pool and how many ``pages`` it has."""

    name: str
    pages: int


class WrittenPages:
    """At decode: a page belongs to one room, from its ``init`` until nobody writes to it any more, held pages too."""

    def __init__(self, pools: Sequence[PoolSize]) -> None:
        self._names = [pool.name for pool in pools]
        self._taken = [np.zeros(pool.pages, np.bool_) for pool in pools]
        self._rooms: dict[RoomKey, list[U32Array]] = {}

    def take(self, key: RoomKey, destination: Destination) -> KvGrpcError | None:
        """The room has these pages from now on; returns what is wrong where another has one of them, and takes none."""
        # One list for all pools has the same numbers in each: the first pool's show it.
        given = [destination.pages, *(other.pages for other in destination.others or ())]
        for pool, (taken, pages) in enumerate(zip(self._taken, given, strict=False)):
            again = taken[pages]
            if again.any():
                position = int(again.argmax())
                page = int(pages[position])
                return failures.pages_written_twice(key, self._names[pool], page, position, self._owner(pool, page))
        for taken, pages in zip(self._taken, given, strict=False):
            taken[pages] = True
        self._rooms[key] = given
        return None

    def give_back(self, key: RoomKey) -> None:
        """The engine may give the pages of this room to another. A room that has none changes nothing."""
        for taken, pages in zip(self._taken, self._rooms.pop(key, ()), strict=False):
            taken[pages] = False

    def _owner(self, pool: int, page: int) -> RoomKey:
        return next(key for key, theirs in self._rooms.items() if pool < len(theirs) and page in theirs[pool])


class ReadPages:
    """At prefill: rooms may read one page together where it is the same place of their prompts, which is a shared
    prefix. At another place it holds another prompt by now, although a room still reads it.

    Of the first pool alone, whose positions are the prompt's.
    """

    def __init__(self, pool: PoolSize) -> None:
        self._name = pool.name
        self._readers = np.zeros(pool.pages, np.uint32)
        self._positions = np.zeros(pool.pages, np.uint32)
        self._rooms: dict[RoomKey, list[tuple[U32Array, int]]] = {}

    def take(self, key: RoomKey, pages: U32Array, start: int) -> KvGrpcError | None:
        """The room reads ``pages[i]`` as page ``start + i`` of its prompt, until ``give_back``. Returns what is wrong
        where that cannot be, and then it reads none of them."""
        places = np.arange(start, start + len(pages), dtype=np.uint32)
        wrong = (self._readers[pages] > 0) & (self._positions[pages] != places)
        if not wrong.any():
            self._positions[pages] = places
            wrong = self._positions[pages] != places  # given twice in this list: the last place is the one that is left
        if wrong.any():
            return self._explain(key, pages, places, int(wrong.argmax()))
        self._readers[pages] += 1
        self._rooms.setdefault(key, []).append((pages, start))
        return None

    def give_back(self, key: RoomKey) -> None:
        """Nothing reads the pages of this room for it any more. A room that reads none changes nothing."""
        for pages, _ in self._rooms.pop(key, ()):
            self._readers[pages] -= 1

    def _explain(self, key: RoomKey, pages: U32Array, places: U32Array, index: int) -> KvGrpcError:
        page, there = int(pages[index]), int(self._positions[pages[index]])
        reading = (other for other, parts in self._rooms.items() if any(page in part for part, _ in parts))
        return failures.page_read_elsewhere(key, self._name, page, int(places[index]), next(reading, key), there)
