"""Memory of simulated engines that pull: real bytes, in the product's staging and in a host cache that evicts."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.pull.common import PageAxes
from kvgrpc.pull.heads import Move
from kvgrpc.pull.staging import StagedShares, Staging, StagingPages

PAGE_BYTES = 32  # a page holds its own hash
STAGING_PAGES = 16
CACHE_PAGES = 24
# Landing pages of holders that have half of each page: the first half of one, the second half of the other.
SLOTS, SHARES, HALF = 4, 2, PAGE_BYTES // 2
HALVES = tuple(Move(share, share * HALF, HALF, share * HALF, HALF, 1, HALF) for share in range(SHARES))
NOISE = b"\xee" * PAGE_BYTES


class Ram:
    """Bytes at an address, and the part of a data plane that staging asks for."""

    def __init__(self) -> None:
        self._bytes: Any = None

    def allocate(self, nbytes: int) -> int:
        self._bytes = ctypes.create_string_buffer(nbytes)
        return ctypes.addressof(self._bytes)

    def register(self, ranges: Sequence[Any]) -> None:
        pass


class HostPages:
    """A host cache: a page that was evicted holds something else at once. ``pins``: pages that are being read."""

    def __init__(self) -> None:
        self._ram = Ram()
        self._address = self._ram.allocate(CACHE_PAGES * PAGE_BYTES)
        self._free = list(range(CACHE_PAGES))
        self._known: OrderedDict[str, int] = OrderedDict()
        self.pins: Counter[int] = Counter()

    def count(self, hashes: Sequence[str]) -> int:
        return next((n for n, name in enumerate(hashes) if name not in self._known), len(hashes))

    @contextlib.contextmanager
    def reading(self, hashes: Sequence[str], first: int = 0) -> Iterator[Sequence[int]]:
        pages = [self._known[name] for name in hashes[first : first + self.count(hashes[first:])]]
        self.pins.update(pages)
        try:
            yield pages
        finally:
            self.pins -= Counter(pages)

    def buffers(self, page: int) -> PageBuffers:
        return ((self._address + page * PAGE_BYTES, PAGE_BYTES),)

    def content(self, page: int) -> bytes:
        return ctypes.string_at(self._address + page * PAGE_BYTES, PAGE_BYTES)

    def reserve(self, count: int) -> list[int]:
        """Pages to be filled, as many as can be had; what was used longest ago makes room."""
        self.evict(count - len(self._free))
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def commit(self, name: str, page: int) -> None:
        """The page is there for everybody from now on."""
        if name in self._known:
            self.give_back([page])
        else:
            self._known[name] = page

    def compute(self, name: str) -> None:
        for page in self.reserve(1):
            ctypes.memmove(self._address + page * PAGE_BYTES, bytes.fromhex(name), PAGE_BYTES)
            self.commit(name, page)

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            ctypes.memmove(self._address + page * PAGE_BYTES, NOISE, PAGE_BYTES)
        self._free.extend(pages)

    def evict(self, count: int) -> None:
        for name in [name for name, page in self._known.items() if not self.pins[page]][: max(0, count)]:
            self.give_back([self._known.pop(name)])


class WatchedStaging(Staging):
    """The product's, whose memory is ``freed`` one day."""

    def __init__(
        self, complain: Callable[[str], None], lending: type[StagingPages], landing: type[StagingPages]
    ) -> None:
        self._ram = Ram()
        super().__init__(self._ram, STAGING_PAGES, PAGE_BYTES, 16, "x")  # type: ignore[arg-type]
        half = STAGING_PAGES // 2
        self.lending, self.landing = lending(range(half)), landing(range(half, STAGING_PAGES))
        self.freed = False
        self._complain = complain

    def copy_in(self, pages: Sequence[int], buffers: Iterable[PageBuffers], to_common: PageAxes | None = None) -> bool:
        return self._checked(super().copy_in(pages, buffers, to_common))

    def copy_out(
        self, pages: Sequence[int], buffers: Iterable[PageBuffers], from_common: PageAxes | None = None
    ) -> bool:
        return self._checked(super().copy_out(pages, buffers, from_common))

    def content(self, page: int) -> bytes:
        return ctypes.string_at(self._address + page * PAGE_BYTES, PAGE_BYTES)

    def land(self, page: int, content: bytes) -> None:
        """What a peer wrote."""
        ctypes.memmove(self._address + page * PAGE_BYTES, content, PAGE_BYTES)

    def is_free(self, page: int) -> bool:
        return page in self.landing._free

    def _checked(self, copied: bool) -> bool:
        if copied and self.freed:
            self._complain("memory that was freed is copied from or to")
        return copied


class WatchedShares(StagedShares):
    """The product's, for pages that two holders have half of. Its pages are numbered behind those of the staging."""

    def __init__(self, complain: Callable[[str], None], slots: type[StagingPages]) -> None:
        self._ram = Ram()
        super().__init__(self._ram, SLOTS, SHARES, HALVES, PAGE_BYTES, PAGE_BYTES, 16, "x")  # type: ignore[arg-type]
        self.slots = slots(range(SLOTS))
        self.freed = False
        self._complain = complain

    def pages(self, slots: Sequence[int], share: int) -> list[int]:
        return [STAGING_PAGES + page for page in super().pages(slots, share)]

    def copy_out(self, slots: Sequence[int], buffers: Iterable[PageBuffers]) -> bool:
        copied = super().copy_out(slots, buffers)
        if copied and self.freed:
            self._complain("memory that was freed is copied from or to")
        return copied

    def land(self, page: int, content: bytes) -> None:
        """What a peer wrote."""
        ctypes.memmove(self._address + (page - STAGING_PAGES) * PAGE_BYTES, content, PAGE_BYTES)

    def is_free(self, page: int) -> bool:
        return (page - STAGING_PAGES) // SHARES in self.slots._free
