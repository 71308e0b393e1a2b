"""Moves a whole page between a file and memory, without a copy of our own."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvgrpc.prefetch.storage.file.formats import HEADER_BYTES

_ALIGNMENT = 4096
_MOST_PIECES = 1024  # IOV_MAX
_local = threading.local()

_Call = Callable[[int, Sequence[memoryview], int], int]


class Mover(Protocol):
    """Called by several threads at once, each with a file and memory of its own. Raises OSError, and is then done."""

    def read(self, descriptor: int, pieces: Sequence[memoryview]) -> int:
        """Fills the pieces from the start of a file; bytes read, fewer at its end."""

    def write(self, descriptor: int, pieces: Sequence[memoryview]) -> None:
        """All of the pieces, to the start of a file."""

    def close(self) -> None:
        """Releases what it holds when no call is on its way."""


class Vectored:
    """By the kernel's own calls; past the page cache if the file was opened so."""

    def read(self, descriptor: int, pieces: Sequence[memoryview]) -> int:
        return move_all(os.preadv, descriptor, pieces)

    def write(self, descriptor: int, pieces: Sequence[memoryview]) -> None:
        move_all(os.pwritev, descriptor, pieces)

    def close(self) -> None:
        """Nothing is held."""


def header_block() -> memoryview:
    """This thread's own block for a header, aligned for O_DIRECT."""
    if not hasattr(_local, "block"):
        _local.block = memoryview(mmap.mmap(-1, HEADER_BYTES))
    block: memoryview = _local.block
    return block


def aligned(pieces: Sequence[tuple[int, int]]) -> bool:
    """True if O_DIRECT takes these (address, bytes)."""
    return all(address % _ALIGNMENT == 0 and nbytes % _ALIGNMENT == 0 for address, nbytes in pieces)


def move_all(call: _Call, descriptor: int, pieces: Sequence[memoryview], start: int = 0) -> int:
    """``os.preadv`` or ``os.pwritev`` until all of the pieces are moved, or the file ends; bytes moved."""
    left, offset = list(pieces), start
    while left:
        some = left[:_MOST_PIECES]
        done = call(descriptor, some, offset)
        if done == 0:
            break
        offset += done
        if done == sum(map(len, some)):
            del left[: len(some)]
            continue
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    return offset - start
