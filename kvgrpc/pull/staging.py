"""Memory that pulled pages go through: the only memory that peers of a pull can write to."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from kvgrpc.dataplane.base import DataPlane, MemoryRange, U64Array
from kvgrpc.dataplane.shm.copying import Copier
from kvgrpc.model import Pool, PoolKind, Region
from kvgrpc.observability.staging import StagingUse
from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.pull.common import PageAxes
from kvgrpc.pull.heads import Move, place

NAME = "host-cache"


class StagedMemory:
    """``pages`` pages of one size that peers may write to. Thread-safe.

    The plane's close frees the memory, so it comes after ``close``.
    """

    def __init__(self, plane: DataPlane, pages: int, page_bytes: int, page_tokens: int, dtype: str) -> None:
        """Takes the memory from the plane, which frees it. Raises ValueError, MemoryError."""
        self.page_bytes = page_bytes
        self._address = plane.allocate(pages * page_bytes)
        plane.register([MemoryRange(self._address, pages * page_bytes)])
        region = Region(0, "kv", self._address, page_bytes, page_bytes)
        self.pool = Pool(NAME, PoolKind.KV, page_tokens, pages, dtype, (region,))
        self._copier = Copier(helped=False)
        self._copies = 0
        self._closed = False
        self._idle = threading.Condition()

    def close(self, seconds: float) -> bool:
        """Gives out and copies nothing more; False where a copy still runs after ``seconds``: its memory must stay."""
        with self._idle:
            self._closed = True
            return self._idle.wait_for(lambda: not self._copies, seconds)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[bool]:
        with self._idle:
            may = not self._closed
            self._copies += may
        try:
            yield may
        finally:
            with self._idle:
                self._copies -= may
                self._idle.notify_all()


class Staging(StagedMemory):
    """Pages as the cache's own, given out a few at a time.

    Half of them are for what is lent and half for what is taken, so that neither starves the other. Pages that a peer
    may still write to, or that a write still reads, are ``retired``: they come back once ``release_safe`` says so.
    """

    def __init__(self, plane: DataPlane, pages: int, page_bytes: int, page_tokens: int, dtype: str) -> None:
        """Raises as StagedMemory."""
        super().__init__(plane, pages, page_bytes, page_tokens, dtype)
        half = pages // 2
        self.lending = StagingPages(range(half))
        self.landing = StagingPages(range(half, pages))

    @property
    def slots(self) -> StagingPages:
        return self.landing

    def pages(self, slots: Sequence[int], share: int) -> list[int]:
        return list(slots)

    def copy_in(self, pages: Sequence[int], buffers: Iterable[PageBuffers], to_common: PageAxes | None = None) -> bool:
        """Pages of the cache into staged ones; False, and nothing is read, once it is closed. The interpreter is free
        meanwhile. ``to_common``: axes of the cache's pages, which are staged in the common order."""
        return self._copy(pages, buffers, to_common, inwards=True)

    def copy_out(
        self, pages: Sequence[int], buffers: Iterable[PageBuffers], from_common: PageAxes | None = None
    ) -> bool:
        """Staged pages into those of the cache; False, and nothing is written, once it is closed. ``from_common``: as
        of ``copy_in``."""
        return self._copy(pages, buffers, from_common, inwards=False)

    def _copy(
        self, pages: Sequence[int], buffers: Iterable[PageBuffers], axes: PageAxes | None, *, inwards: bool
    ) -> bool:
        with self._copying() as may, _between(axes) as (moved, whole):
            if may and moved is None:
                staged, cached, nbytes = self._pieces(pages, buffers)
                ways = (cached, staged) if inwards else (staged, cached)
                self._copier.copy_whole(*ways, nbytes)
            elif may and moved is not None:
                for page, parts in zip(pages, buffers, strict=True):
                    at = self._address + page * self.page_bytes
                    if inwards:
                        _gather(parts, whole)
                        moved.to_common(whole, at)
                    else:
                        moved.from_common(at, whole)
                        _scatter(whole, parts)
        return may

    def _pieces(self, pages: Sequence[int], buffers: Iterable[PageBuffers]) -> tuple[U64Array, U64Array, U64Array]:
        """Addresses here, addresses in the cache, and bytes of each part of these pages."""
        staged, cached, sizes = list[int](), list[int](), list[int]()
        for page, parts in zip(pages, buffers, strict=True):
            at = self._address + page * self.page_bytes
            for address, nbytes in parts:
                staged.append(at)
                cached.append(address)
                sizes.append(nbytes)
                at += nbytes
        return np.array(staged, np.uint64), np.array(cached, np.uint64), np.array(sizes, np.uint64)

    def use(self) -> StagingUse:
        """Of both directions, as metrics say it."""
        lending, landing = self.lending, self.landing
        return ("lent", lending.taken, lending.size), ("taken", landing.taken, landing.size)

    def close(self, seconds: float) -> bool:
        self.lending.close()
        self.landing.close()
        return super().close(seconds)


class CommonLanding:
    """The landing half of staging, for pages that come in the common order."""

    def __init__(self, staging: Staging, axes: PageAxes) -> None:
        self._staging, self._axes = staging, axes
        self.slots = staging.landing
        self.page_bytes = staging.page_bytes

    def pages(self, slots: Sequence[int], share: int) -> list[int]:
        return list(slots)

    def copy_out(self, slots: Sequence[int], buffers: Iterable[PageBuffers]) -> bool:
        return self._staging.copy_out(slots, buffers, self._axes)


def _gather(parts: PageBuffers, whole: int) -> None:
    for address, nbytes in parts:
        ctypes.memmove(whole, address, nbytes)
        whole += nbytes


def _scatter(whole: int, parts: PageBuffers) -> None:
    for address, nbytes in parts:
        ctypes.memmove(address, whole, nbytes)
        whole += nbytes


@contextlib.contextmanager
def _between(axes: PageAxes | None) -> Iterator[tuple[PageAxes | None, int]]:
    """Memory for one page between its own order and the common one, at an address; (None, 0) where nothing has to be
    moved. The cache's page may lie in pieces of any size."""
    if axes is None or axes.is_common:
        yield None, 0
    else:
        page = ctypes.create_string_buffer(axes.nbytes)
        yield axes, ctypes.addressof(page)


class StagedShares(StagedMemory):
    """Landing pages of engines with another tensor-parallel size, in ``slots``: one page of each share of a page of
    ours, which is put together when it is copied out."""

    def __init__(
        self,
        plane: DataPlane,
        slots: int,
        shares: int,
        moves: Sequence[Move],
        own_bytes: int,
        page_bytes: int,
        page_tokens: int,
        dtype: str,
        from_common: PageAxes | None = None,
    ) -> None:
        """``page_bytes``: of a page of theirs, ``own_bytes``: of ours. ``from_common``: axes of the cache's pages,
        where what is put together is in the common order. Otherwise as StagedMemory."""
        super().__init__(plane, slots * shares, page_bytes, page_tokens, dtype)
        self._from_common = from_common
        self.slots = StagingPages(range(slots))
        self._shares = shares
        self._moves = moves
        self._own_bytes = own_bytes

    def pages(self, slots: Sequence[int], share: int) -> list[int]:
        """The landing pages of a share, one for each slot."""
        return [slot * self._shares + share for slot in slots]

    def copy_out(self, slots: Sequence[int], buffers: Iterable[PageBuffers]) -> bool:
        """Pages put together into those of the cache; False, and nothing is written, once it is closed."""
        page = ctypes.create_string_buffer(self._own_bytes)  # the cache's page may lie in pieces of any size
        whole = ctypes.addressof(page)
        with self._copying() as may, _between(self._from_common) as (axes, ordered):
            for slot, parts in zip(slots, buffers, strict=True) if may else ():
                first = self._address + slot * self._shares * self.page_bytes
                place(self._moves, range(first, first + self._shares * self.page_bytes, self.page_bytes), whole)
                if axes is not None:
                    axes.from_common(whole, ordered)
                _scatter(ordered or whole, parts)
        return may

    def use(self) -> StagingUse:
        return (("taken", self.slots.taken * self._shares, self.slots.size * self._shares),)

    def close(self, seconds: float) -> bool:
        self.slots.close()
        return super().close(seconds)


class StagingPages:
    """Free pages of one direction, given out from the lowest on: those that follow each other at both ends of a room
    are one write, and one copy. Thread-safe."""

    def __init__(self, pages: range) -> None:
        self.size = self._count = len(pages)
        # Runs of free pages, (first, end), the lowest first: of a million pages a few come and go. Two that follow each
        # other become one where both are taken and come back together.
        self._free = [(pages.start, pages.stop)] if pages else []
        self._retired: list[tuple[Callable[[], bool], list[int]]] = []
        self._changed = threading.Condition()
        self._closed = False

    @property
    def taken(self) -> int:
        """Pages that are out, those included that wait for evidence."""
        with self._changed:
            self._sweep()
            return self.size - self._count

    def take(self, most: int, timeout: float = 0.0, *, leaving_half: bool = False) -> list[int]:
        """Up to ``most`` pages, at least one unless none comes back within ``timeout`` seconds. ``leaving_half``: at
        most half of those that are free, so that whoever comes next finds some too."""
        end = time.monotonic() + timeout
        with self._changed:
            while self._closed or (not self._free and not self._sweep()):
                left = end - time.monotonic()
                if left <= 0 or self._closed:
                    return []
                self._changed.wait(min(left, _LOOK_SECONDS))
            count = min(most, (self._count + 1) // 2 if leaving_half else self._count)
            taken = list[int]()
            while len(taken) < count:
                first, end = heapq.heappop(self._free)
                stop = min(end, first + count - len(taken))
                taken.extend(range(first, stop))
                if stop < end:
                    heapq.heappush(self._free, (stop, end))
            self._count -= len(taken)
            return taken

    def close(self) -> None:
        """Nobody gets a page any more, or waits for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def give_back(self, pages: Sequence[int]) -> None:
        with self._changed:
            self._put(pages)
            self._changed.notify()

    def retire(self, pages: Sequence[int], release_safe: Callable[[], bool]) -> None:
        """Gives pages back once ``release_safe`` says that nobody reads or writes them any more."""
        with self._changed:
            self._retired.append((release_safe, list(pages)))
            self._sweep()

    def _sweep(self) -> bool:
        """True if pages are free now. Under the lock."""
        waiting = []
        for release_safe, pages in self._retired:
            if release_safe():
                self._put(pages)
            else:
                waiting.append((release_safe, pages))
        self._retired = waiting
        return bool(self._free)

    def _put(self, pages: Sequence[int]) -> None:
        """Under the lock."""
        self._count += len(pages)
        for _, run in groupby(enumerate(sorted(pages)), lambda each: each[1] - each[0]):
            numbers = [page for _, page in run]
            heapq.heappush(self._free, (numbers[0], numbers[-1] + 1))


# Evidence comes from the loop, which tells nobody here.
_LOOK_SECONDS = 0.01
