"""The host pool: memory of this process that copies, storage backends and flat reads address by page number."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvgrpc.dataplane.base import MemoryRange
from kvgrpc.errors import InvalidRequest, PageStateInvalid
from kvgrpc.prefetch.pools.pages import PageTable
from kvgrpc.prefetch.pools.shape import ComponentBlock, HostLayout, PageShape, block_of

Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 4096


class HostPool:
    """``pages`` pages of one shape in one block of host memory, zeroed. Thread-safe.

    It is a memfd, so that the process of a zero-copy backend can map it too. The memory lives until ``close``, which
    nothing may outlast that reads or writes it; ``table`` says who owns what.
    ``pin`` (CUDA only) is done by ``kvgrpc.prefetch.copies``, so that this needs no torch.
    """

    def __init__(self, shape: PageShape, pages: int, layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT) -> None:
        if not 1 <= pages < 2**31:
            raise InvalidRequest.of("host_pages", pages, "1 to 2147483647")
        self.shape = shape
        self.layout = layout
        self.pages = pages
        self.table = PageTable(pages, "host pool")
        self.blocks = tuple(block_of(component, shape, layout, pages) for component in shape.components)
        starts, size = [], 0
        for block in self.blocks:
            starts.append(size)
            size += -(-block.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._starts = tuple(starts)
        # Open as long as it is mapped: who shares it looks for the descriptor.
        self._file = os.memfd_create("kvgrpc-host-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, size)
            self._map: mmap.mmap | None = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        self._memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)
        self.nbytes = size
        # Of page 0, and how far the next page is: each page of each read and write is asked for.
        self._pieces = [
            (address, block.page_stride, nbytes)
            for block, start in zip(self.blocks, starts, strict=True)
            for address, nbytes in _first_page(block, self.address + start, shape.layers)
        ]

    @property
    def ranges(self) -> tuple[MemoryRange, ...]:
        """The memory ranges that a zero-copy backend registers."""
        return (MemoryRange(self.address, self.nbytes),)

    def block_memory(self, number: int) -> Bytes:
        """The live bytes of one component, in the order of its block."""
        start = self._starts[number]
        return self._memory[start : start + self.blocks[number].nbytes]

    def page_buffers(self, page: int) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of each piece of a page, in the order in which ``flat`` puts them."""
        return tuple([(address + page * stride, nbytes) for address, stride, nbytes in self._pieces])

    def flat(self, page: int) -> Bytes:
        """A copy of a page's bytes, component after component and layer after layer as the layout has them."""
        return np.concatenate([_at(address, nbytes) for address, nbytes in self.page_buffers(page)])

    def set_flat(self, page: int, data: Bytes) -> None:
        """Writes what ``flat`` gave into a page that is RESERVED by the caller. Raises InvalidRequest for another
        size."""
        if data.nbytes != self.shape.page_bytes:
            raise InvalidRequest.of("data", f"{data.nbytes} bytes", f"{self.shape.page_bytes} bytes, one page")
        if self.table.state(page) != 1:
            raise PageStateInvalid(
                f"host pool: page {page} is {self.table.state(page).name}: only RESERVED pages are written",
                metadata={"pool": "host pool", "verb": "write", "what": f"page {page}", "rule": "RESERVED pages"},
            )
        start = 0
        flat = data.reshape(-1).view(np.uint8)
        for address, nbytes in self.page_buffers(page):
            _at(address, nbytes)[:] = flat[start : start + nbytes]
            start += nbytes

    def close(self) -> bool:
        """Unmaps the memory. False, and nothing is done, while a page is reserved or read: its bytes may still move."""
        counts = self.table.counts()
        if self._map is not None and not counts["reserved"] and not counts["read"]:
            self._memory = np.empty(0, dtype=np.uint8)
            # A tensor or an array that still shows it makes close() refuse; the last of them unmaps it.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
            os.close(self._file)
        return self._map is None


def _first_page(block: ComponentBlock, start: int, layers: int) -> list[tuple[int, int]]:
    if block.page_stride == layers * block.component.layer_bytes:
        return [(start, block.page_stride)]
    return [(start + layer * block.layer_stride, block.row_bytes) for layer in range(layers)]


def _at(address: int, nbytes: int) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), dtype=np.uint8)
