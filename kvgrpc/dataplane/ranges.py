"""Are all descriptors inside known memory? Pure numpy, because a room may have a hundred thousand of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvgrpc.dataplane.base import U64Array

ADDRESS_END = 2**64


class RangeTable:
    """Disjoint ranges of one address space. Immutable, thread-safe."""

    __slots__ = ("_bases", "_sizes", "ranges")

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """``ranges``: (address, bytes). Raises ValueError when one is empty, wraps around or meets another."""
        self.ranges = tuple(sorted(ranges))
        end = 1
        for address, nbytes in self.ranges:
            if address < end or nbytes < 1 or address + nbytes > ADDRESS_END:
                raise ValueError(f"range {address:#x}+{nbytes} is empty, overlaps another or is no memory")
            end = address + nbytes
        self._bases = np.array([address for address, _ in self.ranges], dtype=np.uint64)
        self._sizes = np.array([nbytes for _, nbytes in self.ranges], dtype=np.uint64)

    def find(self, addresses: U64Array, nbytes: U64Array) -> npt.NDArray[np.intp]:
        """For each descriptor the index of the range that holds all of it; -1 where no single range does."""
        if not len(self._bases):
            return np.full(len(addresses), -1, dtype=np.intp)
        found = np.searchsorted(self._bases, addresses, side="right").astype(np.intp) - 1
        offset = addresses - self._bases[found]  # found -1 reads the last range and is masked below
        size = self._sizes[found]
        inside = (found >= 0) & (offset <= size)
        inside &= nbytes <= np.where(inside, size - offset, np.uint64(0))
        found[~inside] = -1
        return found

    def contains(self, address: int, nbytes: int) -> bool:
        """True if one range holds these bytes as a whole."""
        return any(base <= address and address + nbytes <= base + size for base, size in self.ranges)


def first_outside(found: npt.NDArray[np.intp], addresses: U64Array, nbytes: U64Array) -> str:
    """Describes the first descriptor that RangeTable.find did not find; empty when it found all of them."""
    if not len(found) or found.min() >= 0:
        return ""
    index = int(np.argmin(found))
    return f"descriptor {index} ({int(addresses[index]):#x}+{int(nbytes[index])})"


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same memory in as few ranges as possible. Raises ValueError when two of them share bytes but differ."""
    result: list[tuple[int, int]] = []
    for address, nbytes in sorted(set(ranges)):
        end = result[-1][0] + result[-1][1] if result else -1
        if address == end:
            result[-1] = (result[-1][0], result[-1][1] + nbytes)
        elif address < end:
            raise ValueError(f"range {address:#x}+{nbytes} overlaps another")
        else:
            result.append((address, nbytes))
    return result


def arrays(*columns: npt.ArrayLike) -> tuple[U64Array, ...]:
    """The columns of a submission as contiguous uint64[n]. Raises ValueError when they do not fit together."""
    result = tuple(np.ascontiguousarray(column, dtype=np.uint64) for column in columns)
    if any(column.ndim != 1 or len(column) != len(result[0]) for column in result):
        raise ValueError(f"source, destination and nbytes have shapes {[column.shape for column in result]}")
    return result


def split(limit: int, *columns: U64Array) -> tuple[U64Array, ...]:
    """(source, destination, nbytes) without empty descriptors and with none above ``limit`` bytes."""
    source, destination, nbytes = columns
    if not len(nbytes) or (nbytes.min() > 0 and nbytes.max() <= limit):
        return columns
    counts = (nbytes + np.uint64(limit - 1)) // np.uint64(limit)
    total = int(counts.sum())
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(nbytes)), counts.astype(np.intp))
    offset = (np.arange(total, dtype=np.uint64) - first[owner]) * np.uint64(limit)
    return source[owner] + offset, destination[owner] + offset, np.minimum(nbytes[owner] - offset, np.uint64(limit))
