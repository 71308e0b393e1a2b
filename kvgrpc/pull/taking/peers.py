"""Other engines' host caches as a storage backend: what they have is read from them, everything else from storage."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import contains
from typing import Protocol, TypeAlias

from kvgrpc.prefetch.storage.base import (
    MISSING,
    OK,
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
from kvgrpc.pull.model import Found
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.pull.waits import ForAnswer, Waiting, blocking


class Count(Protocol):
    """Asks who has most of a prompt; None: nobody has any of it. Never raises.

    ``without``: addresses not to ask; ``only``: names or addresses of the engines to ask, None for all that there are.
    """

    def __call__(
        self, hashes: Sequence[str], timeout: float, without: Collection[str], only: Collection[str] | None = None
    ) -> Found | None: ...


_REMEMBERED = 4096
# The batches of one prompt follow each other; who asks for it later asks anew.
_FRESH_SECONDS = 2.0
# One that was lost and one in its place; more of them would be waited for in vain.
_HOLDERS_OF_A_BATCH = 2


class PeersBackend:
    """A StorageBackend of two sources: peers first, then ``storage`` (None: peers alone). Thread-safe.

    A holder finds pages by their whole prompt, so whoever knows what lies before a batch asks through ``behind``.
    """

    name = "peers"
    batch_bytes = 16 << 20

    def __init__(
        self,
        storage: StorageBackend | None,
        *,
        owns_storage: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``owns_storage``: it is closed with this."""
        self._now = now
        self._storage = storage
        self._owns_storage = owns_storage
        self._tally = Tally(of_a_store=False)
        self._connected: tuple[Keys, Taker, Count] | None = None
        self._asked: OrderedDict[_Question, _Asked] = OrderedDict()
        self._lock = threading.Lock()

    def connect(self, keys: Keys, taker: Taker, count: Count) -> None:
        """From now on peers are asked; before it there are none. ``keys``: those by which this backend is asked."""
        self._connected = keys, taker, count

    def disconnect(self) -> None:
        """Peers are asked no more."""
        self._connected = None

    def behind(self, hashes: Sequence[str], first: int, only: Collection[str] | None = None) -> PagesBehind:
        """The same backend for pages of the prompt ``hashes`` behind its ``first`` leading ones: holders are asked for
        the prompt once, whatever its batches are. ``only``: names or addresses of the engines to ask; None: all."""
        return PagesBehind(self, hashes, first, only)

    def register(self, memory: Sequence[MemoryRange]) -> None:
        if self._storage is not None:
            self._storage.register(memory)

    def unregister(self, memory: Sequence[MemoryRange]) -> None:
        if isinstance(self._storage, Unregisters):
            self._storage.unregister(memory)

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return self._count_leading(self._prompt(keys), 0, keys, timeout)

    def count_peers(self, keys: Sequence[str], timeout: float) -> int:
        """``count_leading`` of the best holder alone."""
        found = blocking(self._ask(self._prompt(keys), 0, timeout))
        return 0 if found is None else min(found.pages, len(keys))

    def count_stored(self, keys: Sequence[str], timeout: float) -> int:
        """``count_leading`` of storage alone: for who cannot wait for peers."""
        return 0 if self._storage is None else self._storage.count_leading(keys, timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        return self._read(self._prompt(keys), 0, keys, pages, timeout)

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

    def _count_leading(
        self,
        prompt: Sequence[str],
        first: int,
        keys: Sequence[str],
        timeout: float,
        only: Collection[str] | None = None,
    ) -> int:
        """Leading pages that the best holder has, and behind those the ones that storage has."""
        check_keys(keys)
        end = self._now() + timeout
        found = blocking(self._ask(prompt, first, timeout, only=only))
        near = 0 if found is None else min(found.pages - first, len(keys))
        if self._storage is None or near == len(keys):
            return near
        try:
            return near + self._storage.count_leading(keys[near:], max(0.001, end - self._now()))
        except StorageDown:
            if not near:
                raise
            return near

    def _read(
        self,
        prompt: Sequence[str],
        first: int,
        keys: Sequence[str],
        pages: Sequence[PageBuffers],
        timeout: float,
        only: Collection[str] | None = None,
    ) -> list[PageResult]:
        """Asks storage for the pages behind those that the holder brought."""
        check_batch(keys, pages)
        end = self._now() + timeout
        results = blocking(self.pulling(prompt, first, pages, timeout, only))
        brought = next((n for n, result in enumerate(results) if not result.ok), len(results))
        self._tally.read(results[:brought])
        left = end - self._now()
        if self._storage is None or brought == len(keys) or left <= 0:
            return results
        return results[:brought] + self._storage.read(keys[brought:], pages[brought:], left)

    def pulling(
        self,
        prompt: Sequence[str],
        first: int,
        pages: Sequence[PageBuffers],
        timeout: float,
        only: Collection[str] | None,
    ) -> Waiting[list[PageResult]]:
        """From one holder, and from another one what that does not bring."""
        connected, end = self._connected, self._now() + timeout
        brought, failed_with, without = 0, MISSING, set[str]()
        while connected is not None and brought < len(pages) and len(without) < _HOLDERS_OF_A_BATCH:
            at = first + brought
            found = yield from self._ask(prompt, at, end - self._now(), without, only)
            if found is None:
                break
            there = min(found.pages - at, len(pages) - brought)
            buffers, left = pages[brought : brought + there], end - self._now()
            taken = yield from connected[1].taking(found, prompt, at, buffers, left)
            good = sum(result.ok for result in taken)
            brought += good
            if good == len(taken):
                continue
            # It has them no more, or cannot bring them: it is believed no longer.
            failed_with = taken[good]
            without.add(found.holder.address)
            with self._lock:
                self._asked.pop(_question(prompt, only), None)
        return [OK] * brought + [failed_with] * (len(pages) - brought)

    def _ask(
        self,
        prompt: Sequence[str],
        first: int,
        timeout: float,
        without: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Waiting[Found | None]:
        """The holder of most of a prompt, where that is more than ``first`` pages. Remembered for the batches that
        follow."""
        connected = self._connected
        if connected is None or len(prompt) <= first or timeout <= 0:
            return None
        found = self._remembered(prompt, only, without)
        if found is None:
            found = yield ForAnswer(connected[2], (prompt, timeout, without, only))
            if found is not None and found.pages > first:
                self._remember(prompt, only, found)
        return found if found is not None and found.pages > first else None

    def _remembered(
        self, prompt: Sequence[str], only: Collection[str] | None, without: Collection[str]
    ) -> Found | None:
        """Two questions may end with one page and begin with different ones: what was said to one is no answer to the
        other."""
        with self._lock:
            known = self._asked.get(_question(prompt, only))
        if known is None or self._now() - known.at >= _FRESH_SECONDS:
            return None
        asked = tuple(prompt)  # the same one, for the batches of an operation
        if known.prompt is not asked and known.prompt != asked:
            return None
        return None if known.found.holder.address in without else known.found

    def _remember(self, prompt: Sequence[str], only: Collection[str] | None, found: Found) -> None:
        now, question = self._now(), _question(prompt, only)
        with self._lock:
            self._asked.pop(question, None)
            self._asked[question] = _Asked(tuple(prompt), found, now)
            while len(self._asked) > _REMEMBERED or now - next(iter(self._asked.values())).at >= _FRESH_SECONDS:
                self._asked.popitem(last=False)

    def _prompt(self, keys: Sequence[str]) -> list[str]:
        """Page hashes of the leading keys that are this rank's own."""
        connected, hashes = self._connected, list[str]()
        if connected is None:
            return hashes
        for key in keys:
            page_hash = connected[0].hash_of(key)
            if page_hash is None:
                break
            hashes.append(page_hash)
        return hashes


class PagesBehind:
    """A PeersBackend as a PageSource for the pages of one prompt behind its ``first`` leading ones."""

    def __init__(
        self, backend: PeersBackend, prompt: Sequence[str], first: int, only: Collection[str] | None = None
    ) -> None:
        self._backend = backend
        self._only = only
        self._prompt = prompt
        self._first = first
        self.name = backend.name

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return self._backend._count_leading(self._prompt, self._first, keys, timeout, self._only)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        prompt, first = self._prompt, self._first
        asked = prompt[first : first + len(keys)]
        if len(asked) < len(keys) or not all(map(contains, keys, asked)):  # a key has the hash of its page in it
            own = self._backend._prompt(keys)
            if own != list(prompt[first : first + len(own)]):
                # A second try of single pages.
                prompt = [*prompt[:first], *own]
        return self._backend._read(prompt, first, keys, pages, timeout, self._only)


# What is asked: pages of the prompt, its last hash, and who may answer.
_Question: TypeAlias = "tuple[int, str, frozenset[str] | None]"


def _question(prompt: Sequence[str], only: Collection[str] | None) -> _Question:
    return len(prompt), prompt[-1], None if only is None else frozenset(only)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The answer to a question, and when it came."""

    prompt: tuple[str, ...]
    found: Found
    at: float
