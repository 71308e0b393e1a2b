"""Which memory of ours the Store's process sees too, and as what."""

from __future__ import annotations

import bisect
import logging
import mmap
import threading
from collections.abc import Sequence

from kvgrpc.prefetch.storage.base import MemoryRange, PageBuffers
from kvgrpc.prefetch.storage.mooncake.link import Link
from kvgrpc.prefetch.storage.mooncake.shared import SharedFile, shared_file

logger = logging.getLogger(__name__)


class Windows:
    """Registered ranges by address. Thread-safe; a range is forgotten when it is removed, or when other memory in its
    place is registered."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        # (address, end, area, offset in the area), sorted; replaced as a whole, so that readers need no lock
        self._ranges: tuple[tuple[int, int, int, int], ...] = ()
        # area -> the file, and where in it address 0 would lie
        self._files: dict[int, tuple[tuple[int, int], int]] = {}

    def add(self, memory: Sequence[MemoryRange]) -> None:
        """Ranges that only this process can see are left out: their pages are copied."""
        with self._lock:
            for each in memory:
                if self._share(each.address, each.nbytes) is None:
                    logger.debug("storage 'mooncake': %d bytes are no shared memory and will be copied", each.nbytes)

    def remove(self, memory: Sequence[MemoryRange]) -> None:
        """Ranges that share bytes with these are found no more, and unmapped there when no call uses them."""
        with self._lock:
            for each in memory:
                end = each.address + each.nbytes
                self._replace([known for known in self._ranges if known[1] <= each.address or end <= known[0]])

    def share(self, address: int, nbytes: int) -> int:
        """The area of memory that is known to be shared. Raises MemoryError."""
        with self._lock:
            area = self._share(address, nbytes)
        if area is None:
            raise MemoryError("staging memory cannot be shared with another process")
        return area

    def find(self, page: PageBuffers) -> list[tuple[int, int, int]] | None:
        """The (area, offset, bytes) of a page's buffers; None when one of them lies outside."""
        ranges = self._ranges
        pieces = []
        for address, nbytes in page:
            place = bisect.bisect_right(ranges, (address, 1 << 64)) - 1
            if place < 0 or address + nbytes > ranges[place][1]:
                return None
            start, _, area, offset = ranges[place]
            pieces.append((area, offset + address - start, nbytes))
        return pieces

    def _share(self, address: int, nbytes: int) -> int | None:
        found, end = shared_file(address, nbytes), address + nbytes
        # Memory that was unmapped leaves its address to other memory, which the old area does not show.
        file = None if found is None else (found.file, found.offset - address)
        ranges = [each for each in self._ranges if each[1] <= address or end <= each[0] or self._files[each[2]] == file]
        self._replace(ranges)
        if found is None or file is None:
            return None
        for first, last, area, _ in ranges:
            if first <= address and end <= last:
                return area
        inside = found.offset % mmap.ALLOCATIONGRANULARITY
        area = self._link.share(SharedFile(found.descriptor, found.offset - inside, found.file), nbytes + inside)
        self._files[area] = file
        self._ranges = tuple(sorted((*ranges, (address, end, area, inside))))
        return area

    def _replace(self, ranges: Sequence[tuple[int, int, int, int]]) -> None:
        """Some of the ranges are left; the areas of the others are given up."""
        gone = {each[2] for each in self._ranges} - {each[2] for each in ranges}
        self._ranges = tuple(ranges)
        for area in gone:
            del self._files[area]
            self._link.unshare(area)
