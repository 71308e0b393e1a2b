"""A storage backend from five plain functions: for stores that take and give whole pages as bytes.

Copies every page once. A third-party store needs no more than ``FlatStore``; docs/storage/write-a-backend.md builds
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvgrpc.prefetch.storage.base import (
    MISSING,
    OK,
    PageBuffers,
    PageResult,
    StorageStats,
    failed,
    gather,
    page_bytes,
    scatter,
)
from kvgrpc.prefetch.storage.paged import PageByPage


class FlatStore(Protocol):
    """Called from several threads at once. May block and raise as it likes: that fails the page alone."""

    def size(self, key: str) -> int | None:
        """Bytes of a complete page; None if it is not there."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, data: bytes) -> None:
        """Afterwards a reader sees all of ``data``, or never sees the key."""

    def delete(self, key: str) -> bool:
        """True if it was there."""

    def clear(self, prefix: str) -> Sequence[str]:
        """Drops the keys that begin with ``prefix``; which."""


class FlatBackend(PageByPage):
    """A StorageBackend over a FlatStore. A call of the store that hangs costs one of ``threads`` until it returns."""

    def __init__(self, name: str, store: FlatStore, *, threads: int = 4) -> None:
        self.name = name
        self._store = store
        super().__init__(name, threads)

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        if self._calls.closed:
            raise self._calls.down("it is closed")
        (gone,) = self._calls.ask(lambda number: self._clear(prefix), 1, timeout)
        return gone

    def stats(self) -> StorageStats:
        trouble = self._calls.trouble
        return self._tally.stats(healthy=not trouble, detail=trouble)

    def close(self, timeout: float) -> bool:
        return self._calls.close(timeout)

    def _clear(self, prefix: str) -> int:
        gone = self._store.clear(prefix)
        # Here, and not by the caller, whose time may be over by now.
        self._removed.tell(gone)
        return len(gone)

    def _size(self, key: str) -> int | None:
        return self._store.size(key)

    def _read(self, key: str, page: PageBuffers) -> PageResult:
        data = self._store.get(key)
        if data is None or len(data) != page_bytes(page):
            return MISSING
        scatter(data, page)
        return OK

    def _write(self, key: str, page: PageBuffers, deadline: float) -> PageResult:
        size, wanted = self._store.size(key), page_bytes(page)
        if size is None:
            self._store.put(key, gather(page))
            self._tally.add("written")
        elif size != wanted:
            return failed(other_size(key, size, wanted))
        return OK

    def _drop(self, key: str) -> bool:
        return self._store.delete(key)


def other_size(key: str, there: int, wanted: int) -> str:
    """Words for a page that is stored already, but not as it would be written now."""
    return f"{key[:80]} is stored with {there} bytes, not {wanted}: do two layouts share keys?"
