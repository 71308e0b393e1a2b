"""Moves a whole page between a file and memory, without a copy of our own, and sums it up."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvgrpc.prefetch.storage.base import PageBuffers, view, views
from kvgrpc.prefetch.storage.file.formats import HEADER_BYTES

_ALIGNMENT = 4096
_MOST_PIECES = 1024  # IOV_MAX
_ROW = 512  # words of a block of 4,096 bytes
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


def checksum(pieces: Sequence[memoryview]) -> int:
    """Of all bytes in order, however they are cut: sums of 4 KiB blocks, each with a weight of its own; never 0.

    Finds blocks that a crash of the machine left empty, stale or elsewhere, at the speed of memory. Against malice it
    is no protection.
    """
    if any(len(piece) % HEADER_BYTES for piece in pieces[:-1]):
        pieces = [memoryview(b"".join(pieces))]
    total, rows = 0, 0
    for piece in pieces:
        rest = len(piece) % HEADER_BYTES
        if rest:
            piece, last = piece[:-rest], bytes(piece[-rest:]).ljust(HEADER_BYTES, b"\0")
            total += _weighted(last, rows + len(piece) // HEADER_BYTES)
        if len(piece):
            total += _weighted(piece, rows)
        rows += len(piece) // HEADER_BYTES
    return total % 2**64 or 1


def checksum_of(page: PageBuffers) -> int:
    """``checksum`` of what lies in memory. Buffers of one size that lie at even distances, as those of a page's layers
    do, take one call together.
    """
    if any(nbytes % HEADER_BYTES for _, nbytes in page):
        return checksum(views(page))
    total = rows = first = 0
    while first < len(page):
        count, step = _even(page, first)
        address, nbytes = page[first]
        blocks = np.ndarray(
            (count, nbytes // HEADER_BYTES, _ROW),
            _WORD,
            view(address, step * (count - 1) + nbytes),
            strides=(step, HEADER_BYTES, _WORD.itemsize),
        )
        sums = _add(blocks, 2).reshape(-1)
        total += int(sums.dot(_weights(rows, rows + len(sums))))
        first, rows = first + count, rows + len(sums)
    return total % 2**64 or 1


def _even(page: PageBuffers, first: int) -> tuple[int, int]:
    """The number of buffers from ``first`` on that have one size and lie at even distances, and the distance."""
    address, nbytes = page[first]
    if first + 1 == len(page) or (step := page[first + 1][0] - address) < nbytes:
        return 1, nbytes
    count = 1
    while first + count < len(page) and tuple(page[first + count]) == (address + count * step, nbytes):
        count += 1
    return count, step


def _weighted(blocks: bytes | memoryview, first: int) -> int:
    """The sums of whole blocks, the first of which is that number of the page, each times its weight."""
    sums = _add(np.frombuffer(blocks, _WORD).reshape(-1, _ROW), 1)
    return int(sums.dot(_weights(first, first + len(sums))))


def _weights(first: int, last: int) -> npt.NDArray[np.uint64]:
    if last <= len(_WEIGHTS):
        return _WEIGHTS[first:last]
    return np.arange(2 * first + 1, 2 * last + 1, 2, dtype=np.uint64)


_add, _WORD = np.add.reduce, np.dtype("<u8")
# Of the blocks of most pages: 4 MiB.
_WEIGHTS = np.arange(1, 2 * 1024 + 1, 2, dtype=np.uint64)
