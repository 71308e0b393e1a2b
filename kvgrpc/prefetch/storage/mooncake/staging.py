"""Shared memory through which pages go whose own memory the Store's process cannot map."""

from __future__ import annotations

import ctypes
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.dataplane.shm import segments
from kvgrpc.prefetch.storage.base import PageBuffers, page_bytes

_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Lane:
    """The part of the memory that one call uses at a time."""

    offset: int
    nbytes: int


class Staging:
    """``lanes`` calls at once. Thread-safe."""

    def __init__(self, nbytes: int, lanes: int) -> None:
        """Raises MemoryError."""
        size = max(_ALIGNMENT, nbytes // lanes // _ALIGNMENT * _ALIGNMENT)
        self.segment = segments.create("storage", size * lanes)
        self.lane_bytes = size
        self._lanes = lanes
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for number in range(lanes):
            self._free.put(Lane(number * size, size))

    def acquire(self, timeout: float) -> Lane | None:
        try:
            return self._free.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def release(self, lane: Lane) -> None:
        self._free.put(lane)

    def place(self, lane: Lane, pages: Sequence[PageBuffers]) -> list[int]:
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
