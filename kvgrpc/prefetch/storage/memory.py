"""Memory of this process as Python sees it. Addresses come from the caller, who vouches that they are mapped."""

from __future__ import annotations

import ctypes

from kvgrpc.prefetch.storage.base import PageBuffers


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, without a copy; valid as long as the memory is mapped."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def views(page: PageBuffers) -> list[memoryview]:
    return [view(address, nbytes) for address, nbytes in page]


def gather(page: PageBuffers) -> bytes:
    """A page's bytes in one piece."""
    return b"".join(views(page))


def scatter(data: bytes, page: PageBuffers) -> None:
    """Puts one piece, which has the size of the page, into its buffers."""
    offset = 0
    for address, nbytes in page:
        view(address, nbytes)[:] = memoryview(data)[offset : offset + nbytes]
        offset += nbytes
