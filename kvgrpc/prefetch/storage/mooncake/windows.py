"""The memory of ours that the Store's process sees too, and as what."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
import mmap
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgrpc.dataplane.shm import segments
from kvgrpc.prefetch.storage.base import MemoryRange, PageBuffers, page_bytes

if TYPE_CHECKING:
    from kvgrpc.prefetch.storage.mooncake.link import Link

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (...)(.) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Descriptor of this process, where in its file the memory begins, and which file that is (device, inode): the
    descriptor may be another one's one day, and the address too."""

    descriptor: int
    offset: int
    file: tuple[int, int]


def shared_file(address: int, nbytes: int) -> SharedFile | None:
    """The file behind this memory (a memfd, or one of /dev/shm), if all of it lies in one shared mapping of it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            found = _LINE.match(line)
            if found is None or not int(found[1], 16) <= address < int(found[2], 16):
                continue
            if found[4] != "s" or address + nbytes > int(found[2], 16) or found[8] == "0":
                return None
            file = os.makedev(int(found[6], 16), int(found[7], 16)), int(found[8])
            descriptor = _descriptor_of(*file)
            offset = int(found[5], 16) + address - int(found[1], 16)
            return None if descriptor is None else SharedFile(descriptor, offset, file)
    return None


def _descriptor_of(device: int, inode: int) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            status = os.fstat(int(name))
            if path.startswith(("/memfd:", "/dev/shm/")) and (status.st_dev, status.st_ino) == (device, inode):
                return int(name)
    return None


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


_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class StoreLane:
    """The part of the memory that one call uses at a time."""

    offset: int
    nbytes: int


class StoreStaging:
    """``lanes`` calls at once. Thread-safe."""

    def __init__(self, nbytes: int, lanes: int) -> None:
        """Raises MemoryError."""
        size = max(_ALIGNMENT, nbytes // lanes // _ALIGNMENT * _ALIGNMENT)
        self.segment = segments.create("storage", size * lanes)
        self.lane_bytes = size
        self._lanes = lanes
        self._free: queue.SimpleQueue[StoreLane] = queue.SimpleQueue()
        for number in range(lanes):
            self._free.put(StoreLane(number * size, size))

    def acquire(self, timeout: float) -> StoreLane | None:
        try:
            return self._free.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def release(self, lane: StoreLane) -> None:
        self._free.put(lane)

    def place(self, lane: StoreLane, pages: Sequence[PageBuffers]) -> list[int]:
        """Offsets of as many of the pages as fit into the lane, from the first on."""
        offsets, offset = [], lane.offset
        for page in pages:
            if offset + page_bytes(page) > lane.offset + lane.nbytes:
                break
            offsets.append(offset)
            offset += -(-page_bytes(page) // 64) * 64
        return offsets

    def fill(self, offset: int, page: PageBuffers) -> None:
        """Copies a page in, in one piece."""
        target = self.segment.address + offset
        for address, nbytes in page:
            ctypes.memmove(target, address, nbytes)
            target += nbytes

    def empty(self, offset: int, page: PageBuffers) -> None:
        """Copies a page out into its buffers."""
        source = self.segment.address + offset
        for address, nbytes in page:
            ctypes.memmove(address, source, nbytes)
            source += nbytes

    def free(self, timeout: float) -> bool:
        """Unmaps the memory once no call is in it; False when one still is. Nobody may acquire a lane any more."""
        deadline = time.monotonic() + timeout
        while self._lanes and self.acquire(deadline - time.monotonic()) is not None:
            self._lanes -= 1
        if self._lanes:
            return False
        self.segment.free()
        return True
