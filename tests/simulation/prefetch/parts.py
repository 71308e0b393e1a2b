"""What the ranks of the simulated replica stand on: a pool of pages, a tree of them, and storage that fails.

Each says what was done to it that must never be: those are the violations of a run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvgrpc.prefetch.model import NotEnoughPages, PageResult, Pages, PageStatus
from kvgrpc.prefetch.storage.base import MISSING, OK, failed, timed_out

Broken = Callable[[str], None]
"""Hears of a violation."""
GARBAGE = "garbage"


def is_shared(name: str) -> bool:
    """Whether every rank holds the page alike (MLA), as those of even prompts."""
    return int(name.partition(":")[0][1:]) % 2 == 0


class Held:
    """A page that storage has not let go of; stands for the event of a real backend."""

    def __init__(self) -> None:
        self.over = False

    def is_set(self) -> bool:
        return self.over

    def wait(self, timeout: float | None = None) -> bool:
        return self.over


class Pool:
    """Host pages: their state, what is in them, and who still moves their bytes."""

    def __init__(self, pages: int, broken: Broken) -> None:
        self.free = list(range(pages))
        self.reserved: set[int] = set()
        self.present: set[int] = set()
        self.readers: Counter[int] = Counter()
        self.moving: Counter[int] = Counter()
        self.content: dict[int, str] = {}
        self._broken = broken

    def take(self, count: int) -> Pages | NotEnoughPages:
        if count > len(self.free):
            return NotEnoughPages(count - len(self.free))
        taken = [self.free.pop() for _ in range(count)]
        self.reserved.update(taken)
        return np.array(taken, dtype=np.int64)

    def release(self, pages: Sequence[int] | Pages) -> None:
        for page in map(int, pages):
            if page not in self.reserved and page not in self.present:
                self._broken(f"page {page} is freed twice")
            if self.moving[page] or self.readers[page]:
                self._broken(f"page {page} is freed while its bytes move")
            self.reserved.discard(page)
            self.present.discard(page)
            self.free.append(page)

    def commit(self, pages: Sequence[int] | Pages) -> None:
        for page in map(int, pages):
            if page not in self.reserved or self.moving[page]:
                self._broken(f"page {page} is somebody's before its bytes are there")
            self.reserved.discard(page)
            self.present.add(page)

    def read(self, pages: Sequence[int] | Pages) -> None:
        self.readers.update(map(int, pages))

    def end_read(self, pages: Sequence[int] | Pages) -> None:
        for page in map(int, pages):
            self.readers[page] -= 1
            if self.moving[page] and not self.readers[page]:
                self._broken(f"page {page} may be evicted while storage reads it")
            if self.readers[page] < 0:
                self._broken(f"page {page} is read by less than nobody")


class Tree:
    """A keeper: page hashes ("prompt:3" stands behind "prompt:2") and their host pages, evicted from their ends."""

    def __init__(self, pool: Pool, broken: Broken) -> None:
        self.pool = pool
        self.pages: dict[str, int] = {}
        self.evicted = 0
        self._broken = broken

    def leading(self, hashes: Sequence[str]) -> int:
        return next((number for number, each in enumerate(hashes) if each not in self.pages), len(hashes))

    def reserve(self, count: int, behind: Sequence[str]) -> Pages | NotEnoughPages:
        room = self.pool.take(count)
        if isinstance(room, NotEnoughPages):
            kept = frozenset(behind)
            while isinstance(room, NotEnoughPages) and self._evict_one(kept):
                room = self.pool.take(count)
        return room

    def keep(self, hashes: Sequence[str], covered: int, pages: Pages) -> int:
        names = hashes[covered:]
        for page, name in zip(pages.tolist(), names, strict=True):
            if self.pool.content.get(page) != name:
                self._broken(f"{name} is kept with the bytes of {self.pool.content.get(page)}")
        stands = self.leading(hashes[:covered]) == covered
        for page, name in zip(pages.tolist(), names, strict=True):
            if stands and name not in self.pages:
                self.pages[name] = page
            else:
                self.pool.release([page])
        return self.leading(hashes)

    def pages_of(self, hashes: Sequence[str]) -> Pages:
        found = np.array([self.pages[each] for each in hashes[: self.leading(hashes)]], dtype=np.int64)
        self.pool.read(found)
        return found

    def evict(self, count: int) -> None:
        """As a request that needs room; whatever stood behind is found no more."""
        for _ in range(count):
            self.evicted += self._evict_one(frozenset())

    def _evict_one(self, kept: frozenset[str]) -> bool:
        for name, page in self.pages.items():
            prompt, _, number = name.partition(":")
            if name not in kept and not self.pool.readers[page] and f"{prompt}:{int(number) + 1}" not in self.pages:
                del self.pages[name]
                self.pool.release([page])
                return True
        return False


class Store:
    """Storage of one rank: what it has, and how its calls go. ``shared``: pages that all ranks hold alike."""

    def __init__(self, world: random.Random, quiet: bool, shared: set[str]) -> None:
        self._own: set[str] = set()
        self._shared = shared
        self._random = world
        self._quiet = quiet

    def has(self, name: str) -> bool:
        return name in (self._shared if is_shared(name) else self._own)

    def add(self, name: str) -> None:
        (self._shared if is_shared(name) else self._own).add(name)

    def seconds(self) -> float:
        """Of one call: short, slow, or longer than it was given."""
        if self._quiet or self._random.random() < 0.8:
            return self._random.uniform(0.001, 0.05)
        return self._random.choice([0.5, 2.0, 12.0])

    def is_down(self) -> bool:
        return not self._quiet and self._random.random() < 0.05

    def result(self, there: bool) -> PageResult:
        """Of one page."""
        luck = 1.0 if self._quiet else self._random.random()
        if luck < 0.01:
            return failed("injected")
        if luck < 0.03:
            return failed("injected", retryable=True)
        if luck < 0.045:
            return timed_out("injected", Held())  # type: ignore[arg-type]  # its event
        return OK if there else MISSING

    def fails_whole(self) -> bool:
        """A call that raises, or answers for another number of pages."""
        return not self._quiet and self._random.random() < 0.02

    @staticmethod
    def holds(result: PageResult) -> Held | None:
        return result.released if result.status is PageStatus.TIMEOUT and isinstance(result.released, Held) else None
