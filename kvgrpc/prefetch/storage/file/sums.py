"""Checksums of pages, by the names that headers have for them.

They find blocks that a crash of the machine left empty, stale or elsewhere. Against malice they are no protection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from kvgrpc.prefetch.storage.file.formats import BLOCK_SUMS, NO_SUM, XXH3, Header

_BLOCK = 4096


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
    whole = np.frombuffer(b"".join(pieces).ljust(-(-sum(map(len, pieces)) // _BLOCK) * _BLOCK, b"\0"), "<u8")
    sums = np.add.reduce(whole.reshape(-1, _BLOCK // 8), 1)
    return int(sums.dot(np.arange(1, 2 * len(sums) + 1, 2, dtype=np.uint64))) or 1


_SUMS: dict[str, Callable[[Sequence[memoryview]], int]] = {
    XXH3: xxh3,
    BLOCK_SUMS: block_sums,
    NO_SUM: lambda pieces: 0,
}
