"""Other engines' host caches as a storage backend: what they have is read from them, everything else from storage."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvgrpc.prefetch.storage.base import (
    MISSING,
    MemoryRange,
    PageBuffers,
    PageResult,
    Removed,
    StorageBackend,
    StorageDown,
    StorageStats,
    Unregisters,
    check_batch,
    check_keys,
    failed,
)
from kvgrpc.prefetch.storage.keys import Keys
from kvgrpc.prefetch.storage.paged import Tally
from kvgrpc.pull.model import Holder
from kvgrpc.pull.taker import Taker

Count = Callable[[Sequence[str], float], "tuple[Holder | None, int]"]
"""Asks who has most of a prompt: (hashes, timeout) -> the holder and its leading pages. Never raises."""

_REMEMBERED = 4096


class PeersBackend:
    """A StorageBackend of two sources: peers first, then ``storage`` (None: peers alone). Thread-safe.

    A holder finds pages by their whole prompt, so whoever knows what lies before a batch asks through ``behind``.
    """

    name = "peers"

    def __init__(self, storage: StorageBackend | None, *, owns_storage: bool = False) -> None:
        """``owns_storage``: it is closed with this."""
        self._storage = storage
        self._owns_storage = owns_storage
        self._tally = Tally()
        self._connected: tuple[Keys, Taker, Count] | None = None
        self._found: OrderedDict[str, tuple[Holder, int]] = OrderedDict()
        self._lock = threading.Lock()

    def connect(self, keys: Keys, taker: Taker, count: Count) -> None:
        """From now on peers are asked; before it there are none. ``keys``: those by which this backend is asked."""
        self._connected = keys, taker, count

    def disconnect(self) -> None:
        """Peers are asked no more."""
        self._connected = None

    def behind(self, prefix: Sequence[str]) -> PagesBehind:
        """The same backend for pages that follow those with the hashes ``prefix`` in their prompt."""
        return PagesBehind(self, tuple(prefix))

    def register(self, memory: Sequence[MemoryRange]) -> None:
        if self._storage is not None:
            self._storage.register(memory)

    def unregister(self, memory: Sequence[MemoryRange]) -> None:
        if isinstance(self._storage, Unregisters):
            self._storage.unregister(memory)

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return self.count_behind((), keys, timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        return self.read_behind((), keys, pages, timeout)

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        return [False] * len(keys) if self._storage is None else self._storage.contains(keys, timeout)

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        if self._storage is None:
            return [failed("this rank has peers, and no storage to write to")] * len(keys)
        return self._storage.write(keys, pages, timeout)

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        return 0 if self._storage is None else self._storage.delete(keys, timeout)

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        return 0 if self._storage is None else self._storage.clear(prefix, timeout)

    def count(self, prefix: str, timeout: float) -> int | None:
        return 0 if self._storage is None else self._storage.count(prefix, timeout)

    def on_removed(self, removed: Removed) -> Callable[[], None] | None:
        return None if self._storage is None else self._storage.on_removed(removed)

    def stats(self) -> StorageStats:
        """Hits and misses of peers, and what storage says of itself."""
        if self._storage is None:
            return self._tally.stats()
        own, stored = self._tally.stats(), self._storage.stats()
        return replace(stored, hits=stored.hits + own.hits, failed=stored.failed + own.failed)

    def close(self, timeout: float) -> bool:
        self.disconnect()
        return self._storage is None or not self._owns_storage or self._storage.close(timeout)

    def count_behind(self, prefix: Sequence[str], keys: Sequence[str], timeout: float) -> int:
        """Leading pages that the best holder has, and behind those the ones that storage has."""
        check_keys(keys)
        end = time.monotonic() + timeout
        connected = self._connected
        found = None if connected is None else self._ask(connected, prefix, _hashes(connected[0], keys), timeout)
        near = 0 if found is None else found[1]
        if self._storage is None or near == len(keys):
            return near
        try:
            return near + self._storage.count_leading(keys[near:], max(0.001, end - time.monotonic()))
        except StorageDown:
            if not near:
                raise
            return near

    def read_behind(
        self, prefix: Sequence[str], keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float
    ) -> list[PageResult]:
        """What the holder does not bring, storage is asked for."""
        check_batch(keys, pages)
        end = time.monotonic() + timeout
        results = self._pull(prefix, keys, pages, timeout)
        brought = next((n for n, result in enumerate(results) if not result.ok), len(results))
        self._tally.read(results[:brought])
        left = end - time.monotonic()
        if self._storage is None or brought == len(keys) or left <= 0:
            return results
        return results[:brought] + self._storage.read(keys[brought:], pages[brought:], left)

    def _pull(
        self, prefix: Sequence[str], keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float
    ) -> list[PageResult]:
        connected = self._connected
        hashes = [] if connected is None else _hashes(connected[0], keys)
        if connected is None or not hashes:
            return [MISSING] * len(pages)
        with self._lock:
            found = self._found.pop(hashes[0], None)
        found = found or self._ask(connected, prefix, hashes, timeout)
        if found is None:
            return [MISSING] * len(pages)
        holder, there = found[0], min(found[1], len(hashes))
        taken = connected[1].take(holder, [*prefix, *hashes[:there]], len(prefix), pages[:there], timeout)
        return taken + [MISSING] * (len(pages) - there)

    def _ask(
        self, connected: tuple[Keys, Taker, Count], prefix: Sequence[str], hashes: Sequence[str], timeout: float
    ) -> tuple[Holder, int] | None:
        """The holder of most of these pages, and how many; remembered for the read that follows."""
        if not hashes:
            return None
        holder, leading = connected[2]([*prefix, *hashes], timeout)
        there = leading - len(prefix)
        if holder is None or there < 1:
            return None
        with self._lock:
            self._found[hashes[0]] = holder, there
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return holder, there


class PagesBehind:
    """A PeersBackend as a StorageBackend for the pages behind one prefix; all but ``count_leading`` and ``read`` is its
    backend's."""

    def __init__(self, backend: PeersBackend, prefix: tuple[str, ...]) -> None:
        self._backend = backend
        self._prefix = prefix
        self.name = backend.name

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return self._backend.count_behind(self._prefix, keys, timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        return self._backend.read_behind(self._prefix, keys, pages, timeout)


def _hashes(own: Keys, keys: Sequence[str]) -> list[str]:
    """Page hashes of the leading keys that are this rank's own."""
    hashes: list[str] = []
    for key in keys:
        page_hash = own.hash_of(key)
        if page_hash is None:
            break
        hashes.append(page_hash)
    return hashes
