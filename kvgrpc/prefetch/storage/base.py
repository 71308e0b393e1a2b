"""The protocol of a storage backend: pages of host memory go in under a key and come back whole, or not at all.

A *page* is the unit of commit: all its buffers (K and V, a latent, an indexer) are stored together or none is. Keys are
content hashes with an identity (``keys``), so the bytes under a key never change and a second write of one is harmless.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias, runtime_checkable

import msgspec

from kvgrpc.dataplane.base import MemoryRange as MemoryRange
from kvgrpc.errors import InvalidRequest, PeerUnreachable
from kvgrpc.prefetch.model import PageResult as PageResult
from kvgrpc.prefetch.model import PageStatus as PageStatus

PageBuffers: TypeAlias = tuple[tuple[int, int], ...]
"""One page: (address, bytes) of each of its buffers, in memory of this process; always in the same order."""

Removed: TypeAlias = Callable[[Sequence[str]], None]
"""Hears the keys of pages that a backend dropped."""

MAX_KEY_BYTES = 1024
MAX_BATCH_PAGES = 65_536


OK = PageResult(PageStatus.OK)
MISSING = PageResult(PageStatus.MISSING)


def failed(detail: str, *, retryable: bool = False) -> PageResult:
    return PageResult(PageStatus.FAILED, detail, retryable)


def timed_out(detail: str, released: threading.Event | None = None) -> PageResult:
    return PageResult(PageStatus.TIMEOUT, detail, True, released)


@dataclass(frozen=True, slots=True)
class StorageStats:
    """The figures of a backend since it was opened: what it holds and did.

    Attributes:
        healthy: whether calls are answered now; ``detail`` says why not.
        pages, nbytes: stored now, as far as this process knows; None where only the store itself does.
        capacity: bytes that may be stored; None: unbounded, or known to the store only.
        hits, misses: pages that reads found, and did not.
        written: pages that writes stored (not those that were there before).
        failed, timeouts: pages of reads and writes that ended so.
        evicted: pages that this process dropped to stay within ``capacity``.
        in_use: pages that ended TIMEOUT and whose buffers are not released yet.
    """

    healthy: bool = True
    detail: str = ""
    pages: int | None = None
    nbytes: int | None = None
    capacity: int | None = None
    hits: int = 0
    misses: int = 0
    written: int = 0
    failed: int = 0
    timeouts: int = 0
    evicted: int = 0
    in_use: int = 0


class StorageDown(PeerUnreachable):
    """The backend as a whole cannot answer; pages may well be there. Metadata: address (what did not answer)."""

    def __init__(self, message: str, address: str, retry_after: float | None = None) -> None:
        super().__init__(message, metadata={"address": address}, retry_after=retry_after)


class StorageBackend(Protocol):
    """Thread-safe. Every call ends within ``timeout`` seconds, and a little for its own bookkeeping.

    All calls raise InvalidRequest for arguments that make no sense (lengths that differ, empty pages or keys); only
    ``count_leading``, ``contains``, ``delete``, ``clear``, ``count`` raise StorageDown. ``read`` and ``write`` answer
    with one result a key, in the order of the keys, and begin nothing after ``timeout``.
    """

    name: str

    def register(self, memory: Sequence[MemoryRange]) -> None:
        """Host memory in which buffers will lie: what a zero-copy backend prepares once. Repeats are harmless.

        A backend that copies ignores it; buffers outside it work too, with a copy. Registered memory stays mapped until
        ``close`` returned True, or until nothing moves in it any more and it is unregistered (``Unregisters``), or what
        comes in its place is registered.
        """

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        """The number of leading pages that are there, each complete. Raises StorageDown rather than answer too few."""

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """True for each page that is there, complete, wherever it stands. Raises StorageDown as ``count_leading``."""

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        """Fills the buffers. A page whose stored size is not the sum of its buffers is MISSING."""

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        """Stores pages; OK also for one that is there already. One that is there with another size is FAILED, kept."""

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        """Drops pages; how many were there and are gone."""

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        """Drops the pages of this backend's own namespace whose keys begin with ``prefix``, and nothing of anybody
        else's; how many. Raises StorageDown when it did not come to all of them in time: repeats come on, and end."""

    def count(self, prefix: str, timeout: float) -> int | None:
        """The number of pages that ``clear(prefix)`` would drop; None: this store does not say. Raises StorageDown."""

    def on_removed(self, removed: Removed) -> Callable[[], None] | None:
        """Calls it with the keys of pages that this process drops to make room or by ``clear``, on whatever thread;
        returns what ends that. None: this backend cannot tell. It must not block."""

    def stats(self) -> StorageStats:
        """Never blocks on the store."""

    def close(self, timeout: float) -> bool:
        """Ends it; later calls answer FAILED or raise StorageDown. Repeats are harmless.

        True when every buffer is released and no thread or process is left; False when something still hangs.
        """


class PageSource(Protocol):
    """The part of a StorageBackend that a prefetch reads from."""

    @property
    def name(self) -> str: ...

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        """See ``StorageBackend``."""

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        """See ``StorageBackend``."""


@runtime_checkable
class FindsByPrompt(Protocol):
    """A StorageBackend that finds a page by all that lies before it in its prompt, as another engine's cache does."""

    def behind(self, hashes: Sequence[str], first: int, only: Collection[str] | None = None) -> PageSource:
        """Returns the source of the prompt's pages behind its ``first`` leading ones, by these page hashes.
        ``only``: names or addresses of the engines to ask; None: all."""


@runtime_checkable
class HasDearBatches(Protocol):
    """A StorageBackend to which each batch costs a good deal, however small its pages are."""

    batch_bytes: int
    """Batches of a prefetch have at least so many, where there are as many."""


def source_behind(
    storage: StorageBackend, hashes: Sequence[str], first: int, only: Collection[str] | None = None
) -> PageSource:
    """The source of pages of a prompt that come behind its ``first`` leading ones."""
    return storage.behind(hashes, first, only) if isinstance(storage, FindsByPrompt) else storage


@runtime_checkable
class Unregisters(Protocol):
    """A StorageBackend that has more of registered memory than its address: a mapping in another process, say."""

    def unregister(self, memory: Sequence[MemoryRange]) -> None:
        """Gives up what it has of registered ranges that share bytes with these, once no call that was begun uses it.
        Buffers there work on, with a copy. Repeats are harmless; never waits for a call."""


def leading_pages(contains: Callable[[Sequence[str], float], list[bool]], keys: Sequence[str], timeout: float) -> int:
    """``count_leading`` by ``contains``, which is asked for more and more keys until one is missing."""
    check_keys(keys)
    deadline, first, step = time.monotonic() + timeout, 0, 64
    while first < len(keys):
        there = contains(keys[first : first + step], deadline - time.monotonic())
        if False in there:
            return first + there.index(False)
        first, step = first + step, 2 * step
    return len(keys)


def check_keys(keys: Sequence[str]) -> None:
    """Raises InvalidRequest."""
    if len(keys) > MAX_BATCH_PAGES:
        raise InvalidRequest.of("keys", f"{len(keys)} keys", f"at most {MAX_BATCH_PAGES} at once")
    for key in keys:
        if not isinstance(key, str) or not 0 < _key_bytes(key) <= MAX_KEY_BYTES:
            raise InvalidRequest.of("keys", key, f"text of 1 to {MAX_KEY_BYTES} bytes")


def check_batch(keys: Sequence[str], pages: Sequence[PageBuffers]) -> None:
    """Raises InvalidRequest."""
    check_keys(keys)
    if len(keys) != len(pages):
        raise InvalidRequest.of("pages", f"{len(pages)} pages for {len(keys)} keys", "as many as keys")
    for page in pages:
        if not page or min(map(min, page)) < 1:
            raise InvalidRequest.of("pages", page, "(address, bytes) of at least one buffer, none of them empty")


def _key_bytes(key: str) -> int:
    """0 for what is no text: half a surrogate pair has no bytes."""
    try:
        return len(key.encode())
    except UnicodeEncodeError:
        return 0


def page_bytes(page: PageBuffers) -> int:
    """Bytes of one page, all of its buffers together."""
    return sum([nbytes for _, nbytes in page])


# All addresses of this process. Nothing is touched but the slices that are used; one takes a fifth of the time of an
# object of ctypes for its bytes.
_ADDRESSES = memoryview((ctypes.c_ubyte * 2**62).from_address(0)).cast("B")


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, without a copy; valid as long as the memory is mapped."""
    return _ADDRESSES[address : address + nbytes]


def views(page: PageBuffers) -> list[memoryview]:
    """``view`` of each of its buffers."""
    return [_ADDRESSES[address : address + nbytes] for address, nbytes in page]


def gather(page: PageBuffers) -> bytes:
    """A page's bytes in one piece."""
    return b"".join(views(page))


def scatter(data: bytes, page: PageBuffers) -> None:
    """Puts one piece, which has the size of the page, into its buffers."""
    offset = 0
    for address, nbytes in page:
        view(address, nbytes)[:] = memoryview(data)[offset : offset + nbytes]
        offset += nbytes


Nbytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]
