"""What storage backends share that read, write and drop one page at a time, on a few threads of their own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvgrpc.prefetch.storage.base import (
    MemoryRange,
    PageBuffers,
    PageResult,
    Removed,
    check_batch,
    check_keys,
    leading_pages,
)
from kvgrpc.prefetch.storage.calls import PageCalls
from kvgrpc.prefetch.storage.listeners import Listeners
from kvgrpc.prefetch.storage.tally import Tally


class PageByPage(ABC):
    """The greater part of a StorageBackend, from ``_size``, ``_read``, ``_write`` and ``_drop`` of one page.

    They run on several threads at once, may block, and may raise: that fails the page alone.
    """

    name: str

    def __init__(self, address: str, threads: int) -> None:
        """``address``: where people find the store, for errors."""
        self._calls = PageCalls(self.name, address, threads)
        self._tally = Tally()
        self._removed = Listeners()

    def register(self, memory: Sequence[MemoryRange]) -> None:  # noqa: B027
        """Nothing to prepare: a page is read into any memory."""

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return leading_pages(self.contains, keys, timeout)

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        check_keys(keys)
        return self._calls.ask(lambda number: self._size(keys[number]) is not None, len(keys), timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        moved = self._calls.move(lambda number: self._read(keys[number], pages[number]), len(keys), timeout)
        return self._tally.read(moved)

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        deadline = time.monotonic() + timeout
        moved = self._calls.move(lambda number: self._write(keys[number], pages[number], deadline), len(keys), timeout)
        return self._tally.write(moved)

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        check_keys(keys)
        return sum(self._calls.ask(lambda number: self._drop(keys[number]), len(keys), timeout))

    def count(self, prefix: str, timeout: float) -> int | None:
        return None

    def on_removed(self, removed: Removed) -> Callable[[], None]:
        return self._removed.add(removed)

    @abstractmethod
    def _size(self, key: str) -> int | None:
        """Bytes of a complete page; None if it is not there."""

    @abstractmethod
    def _read(self, key: str, page: PageBuffers) -> PageResult: ...

    @abstractmethod
    def _write(self, key: str, page: PageBuffers, deadline: float) -> PageResult:
        """``deadline``: of ``time.monotonic``, past which nobody waits for it any more."""

    @abstractmethod
    def _drop(self, key: str) -> bool:
        """Whether it was there."""
