"""Moves a whole page between a file and memory, without a copy of our own, and sums it up.

Checksums, which have the names that headers have for them, find blocks that a crash of the machine left empty, stale or
elsewhere. Against malice they are no protection.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import xxhash

from kvgrpc.prefetch.storage.file.formats import BLOCK_SUMS, HEADER_BYTES, NO_SUM, XXH3, Header

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
    try:
        block: memoryview = _local.block
    except AttributeError:
        block = _local.block = memoryview(mmap.mmap(-1, HEADER_BYTES))
    return block


def aligned(pieces: Sequence[tuple[int, int]]) -> bool:
    """True if O_DIRECT takes these (address, bytes)."""
    return all(address % _ALIGNMENT == 0 and nbytes % _ALIGNMENT == 0 for address, nbytes in pieces)


def move_all(call: _Call, descriptor: int, pieces: Sequence[memoryview], start: int = 0) -> int:
    """``os.preadv`` or ``os.pwritev`` until all of the pieces are moved, or the file ends; bytes moved."""
    left, offset = pieces, start
    while left:
        some = left[:_MOST_PIECES]
        done = call(descriptor, some, offset)
        offset += done
        if done == sum(map(len, some)):
            left = left[_MOST_PIECES:]
        elif done:
            left = _behind(left, done)
        else:
            break
    return offset - start


def _behind(pieces: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    left = list(pieces)
    while nbytes >= len(left[0]):
        nbytes -= len(left.pop(0))
    left[0] = left[0][nbytes:]
    return left


def header(key: str, pieces: Sequence[memoryview], *, checked: bool = True) -> Header:
    """The header of a page with these bytes."""
    nbytes = sum(map(len, pieces))
    return Header(key, nbytes, XXH3, xxh3(pieces)) if checked else Header(key, nbytes, NO_SUM, 0)


def is_right(found: Header, pieces: Sequence[memoryview]) -> bool:
    """True if these bytes have the checksum of their header, or it has none."""
    return _SUMS[found.algorithm](pieces) == found.checksum


def xxh3(pieces: Sequence[memoryview]) -> int:
    """XXH3 (64 bits, no seed) of all bytes in order, however they are cut."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def block_sums(pieces: Sequence[memoryview]) -> int:
    """What pages had before XXH3: the sum of the words of each 4 KiB block, times an odd number of its own; never 0."""
    data = b"".join(pieces)
    blocks = np.frombuffer(data + bytes(-len(data) % HEADER_BYTES), "<u8").reshape(-1, HEADER_BYTES // 8)
    sums = np.add.reduce(blocks, 1)
    return int(sums.dot(np.arange(1, 2 * len(sums) + 1, 2, dtype=np.uint64))) or 1


_SUMS: dict[str, Callable[[Sequence[memoryview]], int]] = {
    XXH3: xxh3,
    BLOCK_SUMS: block_sums,
    NO_SUM: lambda pieces: 0,
}
