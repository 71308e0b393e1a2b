"""Whole pages between files and memory, without a copy of our own: vectored, and past the page cache if asked."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence

from kvgrpc.prefetch.storage.file.formats import HEADER_BYTES

_ALIGNMENT = 4096
_MOST_PIECES = 1024  # IOV_MAX
_local = threading.local()

Vectored = Callable[[int, Sequence[memoryview], int], int]


def header_block() -> memoryview:
    """This thread's own block for a header, aligned for O_DIRECT."""
    if not hasattr(_local, "block"):
        _local.block = memoryview(mmap.mmap(-1, HEADER_BYTES))
    block: memoryview = _local.block
    return block


def aligned(pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether O_DIRECT takes these (address, bytes)."""
    return all(address % _ALIGNMENT == 0 and nbytes % _ALIGNMENT == 0 for address, nbytes in pieces)


def read_all(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Fills the pieces from the start of a file; bytes read, fewer at its end."""
    return _all(os.preadv, descriptor, pieces)


def write_all(descriptor: int, pieces: Sequence[memoryview]) -> int:
    return _all(os.pwritev, descriptor, pieces)


def _all(call: Vectored, descriptor: int, pieces: Sequence[memoryview]) -> int:
    left, offset = list(pieces), 0
    while left:
        done = call(descriptor, left[:_MOST_PIECES], offset)
        if done == 0:
            break
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    return offset
