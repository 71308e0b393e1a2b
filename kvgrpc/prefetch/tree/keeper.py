"""Keepers give a controller host pages and have them afterwards: an engine's radix cache, ours, or nobody's
yet."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.pages import Pages, PageTable


class Keeper(Protocol):
    """Thread-safe; called on the controller's threads, and ``pages_of`` on the rank's event loop, so that each call is
    short. It may evict, the pools never do."""

    def leading(self, hashes: Sequence[str]) -> int:
        """The number of pages from the first on that need not come, because host or device has them."""

    def reserve(self, count: int, behind: Sequence[str]) -> Pages | NotEnoughPages:
        """So many RESERVED host pages, for what comes behind the pages of ``behind``: room is not made by evicting any
        of those, without which nobody would find what comes."""

    def keep(self, hashes: Sequence[str], covered: int, pages: Pages, extra_key: str) -> int:
        """PRESENT pages of ``hashes[covered:]`` are the keeper's from now on, whatever it answers: how many leading
        pages of ``hashes`` are found now. Fewer than all: what the others stood behind was evicted meanwhile."""

    def pages_of(self, hashes: Sequence[str]) -> Pages:
        """The PRESENT host pages of the leading hashes, each read-locked in the pool's table: whoever asks ends
        that."""


@runtime_checkable
class KnowsTiers(Protocol):
    """A keeper that can say more than ``leading``."""

    def leading_by_tier(self, hashes: Sequence[str]) -> tuple[int, int]:
        """(pages on the device, pages on device or host) from the front."""


@runtime_checkable
class ReadsBehind(Protocol):
    """A keeper that need not touch the beginning of a prompt for what comes behind it."""

    def pages_behind(self, hashes: Sequence[str], first: int) -> Pages:
        """``pages_of`` without the ``first`` leading ones, which are not read-locked."""


def leading_by_tier(keeper: Keeper, hashes: Sequence[str]) -> tuple[int, int]:
    """(pages on the device, pages on device or host) of any keeper; one that does not tell tiers apart is believed to
    have nothing on the device."""
    return keeper.leading_by_tier(hashes) if isinstance(keeper, KnowsTiers) else (0, keeper.leading(hashes))


@dataclass(frozen=True, slots=True)
class Landed:
    """A prefetch that left pages: those of ``hashes[covered:]``, in order, now the taker's."""

    hashes: tuple[str, ...]
    covered: int
    pages: Pages
    extra_key: str


class CompletionQueue:
    """The keeper of a controller whose engine has its own radix cache: what landed waits until the engine takes it.

    Until then the pages are ordinary evictable ones: the oldest are given up when a later prefetch needs room.
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, Landed] = OrderedDict()
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> list[Landed]:
        """Prefetches that landed since the call before, oldest first. The pages are the caller's, who frees them."""
        with self._lock:
            taken, self._waiting = list(self._waiting.values()), OrderedDict()
        return taken

    def leading(self, hashes: Sequence[str]) -> int:
        """All of them, or none: what comes behind a part would stand on pages that may be given up by then."""
        return len(hashes) if self.leading_by_tier(hashes)[1] == len(hashes) else 0

    def leading_by_tier(self, hashes: Sequence[str]) -> tuple[int, int]:
        """Counts what waits, on the host; what was taken is the engine's to know."""
        with self._lock:
            return 0, max((_common(landed, hashes) for landed in self._waiting.values()), default=0)

    def reserve(self, count: int, behind: Sequence[str]) -> Pages | NotEnoughPages:
        pages = self._table.take(count)
        while isinstance(pages, NotEnoughPages) and self._give_up_oldest():
            pages = self._table.take(count)
        return pages

    def keep(self, hashes: Sequence[str], covered: int, pages: Pages, extra_key: str) -> int:
        with self._lock:
            self._number += 1
            self._waiting[self._number] = Landed(tuple(hashes), covered, pages, extra_key)
        return len(hashes)

    def pages_of(self, hashes: Sequence[str]) -> Pages:
        """Finds what waits by the hashes of the request that it came for, and by no others."""
        wanted = tuple(hashes)
        with self._lock:
            for landed in self._waiting.values():
                if landed.covered == 0 and landed.hashes[: len(wanted)] == wanted[: len(landed.pages)]:
                    pages = landed.pages[: len(wanted)]
                    self._table.read(pages)
                    return pages
        return np.empty(0, dtype=np.int64)

    def _give_up_oldest(self) -> bool:
        """Of those that no backup reads."""
        with self._lock:
            for number, landed in self._waiting.items():
                if len(self._table.unread(landed.pages)) == len(landed.pages):
                    del self._waiting[number]
                    self._table.release(landed.pages)
                    return True
        return False


def _common(landed: Landed, hashes: Sequence[str]) -> int:
    """Leading pages of a prompt that came with another one, or with the same. A hash covers everything before it."""
    low, high = 0, 0 if landed.covered else min(len(landed.pages), len(hashes))
    while low < high:
        middle = (low + high + 1) // 2
        if landed.hashes[middle - 1] == hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
