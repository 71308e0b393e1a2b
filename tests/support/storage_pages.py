"""Pages of host memory for the storage tests: what is in them follows from a number."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from kvgrpc.prefetch.storage.base import MemoryRange, PageBuffers

Noise = bytes
_mapped: list[mmap.mmap] = []  # what was registered stays mapped


class Arena:
    """Page-aligned memory, cut into pages of ``buffers`` pieces that lie apart, as K and V of a pool do."""

    def __init__(self, count: int, nbytes: int = 16384, buffers: int = 2, *, shared: bool = False) -> None:
        self.count, self.nbytes, self.buffers = count, nbytes, buffers
        self.mapping = _shared(count * nbytes * buffers) if shared else _private(count * nbytes * buffers)
        _mapped.append(self.mapping)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self.mapping, dtype=np.uint8)
        self.address = int(self.data.ctypes.data)

    @property
    def range(self) -> MemoryRange:
        return MemoryRange(self.address, self.count * self.nbytes * self.buffers)

    def page(self, number: int) -> PageBuffers:
        """Buffer b of all pages lie together."""
        return tuple(
            (self.address + (buffer * self.count + number) * self.nbytes, self.nbytes) for buffer in range(self.buffers)
        )

    def pages(self, *numbers: int) -> list[PageBuffers]:
        return [self.page(number) for number in numbers or range(self.count)]

    def bytes(self, number: int) -> bytes:
        starts = [address - self.address for address, _ in self.page(number)]
        return b"".join(self.data[start : start + self.nbytes].tobytes() for start in starts)

    def fill(self, number: int, seed: int) -> Noise:
        """Noise that follows from ``seed``; returns it."""
        noise = content(seed, self.nbytes * self.buffers)
        for buffer, (address, nbytes) in enumerate(self.page(number)):
            start = address - self.address
            piece = noise[buffer * nbytes : (buffer + 1) * nbytes]
            self.data[start : start + nbytes] = np.frombuffer(piece, dtype=np.uint8)
        return noise

    def fill_all(self, seed: int = 0) -> list[Noise]:
        return [self.fill(number, seed + number) for number in range(self.count)]

    def clear(self) -> None:
        self.data[:] = 0


def _private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _shared(nbytes: int) -> mmap.mmap:
    descriptor = os.memfd_create("pages")
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def content(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
