"""A storage backend from five plain functions: for stores that take and give whole pages as bytes.

Copies every page once. A third-party store needs no more than ``FlatStore``; docs/storage.md builds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvgrpc.prefetch.storage.base import (
    MISSING,
    OK,
    MemoryRange,
    PageBuffers,
    PageResult,
    Removed,
    StorageStats,
    check_batch,
    check_keys,
    failed,
    leading_pages,
    page_bytes,
)
from kvgrpc.prefetch.storage.calls import PageCalls
from kvgrpc.prefetch.storage.listeners import Listeners
from kvgrpc.prefetch.storage.memory import gather, scatter
from kvgrpc.prefetch.storage.tally import Tally


class FlatStore(Protocol):
    """Called from several threads at once. May block and raise as it likes: that fails the page alone."""

    def size(self, key: str) -> int | None:
        """Bytes of a complete page; None if it is not there."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, data: bytes) -> None:
        """Afterwards a reader sees all of ``data``, or never sees the key."""

    def delete(self, key: str) -> bool:
        """Whether it was there."""

    def clear(self, prefix: str) -> Sequence[str]:
        """Drops the keys that begin with ``prefix``; which."""


class FlatBackend:
    """A StorageBackend over a FlatStore. A call of the store that hangs costs one of ``threads`` until it returns."""

    def __init__(self, name: str, store: FlatStore, *, threads: int = 4) -> None:
        self.name = name
        self._store = store
        self._calls = PageCalls(name, name, threads)
        self._tally = Tally()
        self._removed = Listeners()

    def register(self, memory: Sequence[MemoryRange]) -> None:
        """Pages are copied: nothing to prepare."""

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return leading_pages(self.contains, keys, timeout)

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        check_keys(keys)
        return self._calls.ask(lambda number: self._store.size(keys[number]) is not None, len(keys), timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)

        def one(number: int) -> PageResult:
            data = self._store.get(keys[number])
            if data is None or len(data) != page_bytes(pages[number]):
                return MISSING
            scatter(data, pages[number])
            return OK

        return self._tally.read(self._calls.move(one, len(keys), timeout))

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)

        def one(number: int) -> PageResult:
            size, wanted = self._store.size(keys[number]), page_bytes(pages[number])
            if size is None:
                self._store.put(keys[number], gather(pages[number]))
                self._tally.add("written")
            elif size != wanted:
                return failed(other_size(keys[number], size, wanted))
            return OK

        return self._tally.write(self._calls.move(one, len(keys), timeout))

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        check_keys(keys)
        return sum(self._calls.ask(lambda number: self._store.delete(keys[number]), len(keys), timeout))

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        if self._calls.closed:
            raise self._calls.down("it is closed")
        (gone,) = self._calls.ask(lambda number: self._store.clear(prefix), 1, timeout)
        self._removed.tell(gone)
        return len(gone)

    def on_removed(self, removed: Removed) -> Callable[[], None]:
        return self._removed.add(removed)

    def stats(self) -> StorageStats:
        return self._tally.stats(healthy=not self._calls.closed, detail="closed" if self._calls.closed else "")

    def close(self, timeout: float) -> bool:
        return self._calls.close(timeout)


def other_size(key: str, there: int, wanted: int) -> str:
    """Words for a page that is stored already, but not as it would be written now."""
    return f"{key[:80]} is stored with {there} bytes, not {wanted}: do two layouts share keys?"
