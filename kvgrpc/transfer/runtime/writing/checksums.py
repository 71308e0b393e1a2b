"""A checksum of each page of a room, of all of its bytes that travel, for ranks that verify (14, aux and checksums).

zlib's CRC-32 of the page's bytes, region after region, in the order in which both sides pair their regions. It reads
memory by address: pools in the memory of the CPU only. One core does some 1 GB/s, without the interpreter's lock where
a region has more than 5 KiB a page.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from kvgrpc.errors import ChecksumMismatch, Failure, InvalidRequest
from kvgrpc.model import Pool, RankRef
from kvgrpc.transfer.layout.heads import runs, shared
from kvgrpc.transfer.layout.plan import Geometry, Side, geometry
from kvgrpc.transfer.protocol.destination import Destination, U32Array


class PageReader:
    """Checksums of pages of one side of a pair; thread-safe."""

    def __init__(self, side: Side) -> None:
        self._regions = [
            (address, stride, ctypes.c_char * nbytes)
            for address, stride, nbytes in zip(*(column.ravel().tolist() for column in side), strict=True)
            if nbytes
        ]
        self.page_bytes = sum([ctypes.sizeof(memory) for _, _, memory in self._regions])

    @property
    def empty(self) -> bool:
        """Nothing travels: another rank sends the same bytes."""
        return not self._regions

    def sums(self, pages: U32Array, stop: Callable[[], bool] = lambda: False) -> U32Array:
        """uint32[n], of each page; ``stop`` is asked before each, and ends it with what there is."""
        found: list[int] = []
        for page in pages.tolist():
            if stop():
                break
            crc = 0
            for address, stride, memory in self._regions:
                crc = zlib.crc32(memory.from_address(address + page * stride), crc)
            found.append(crc)
        return np.array(found, np.uint32)


class PeerPages:
    """The pages that decode compares with: its own pages as one prefill rank writes them."""

    def __init__(self, prefill: Sequence[Pool], decode: Sequence[Pool]) -> None:
        """``prefill``: the pools of the rank that writes; none where it owes nothing. Raises InvalidRequest for pools
        that do not match."""
        self._names = [pool.name for pool in decode]
        if prefill and len(prefill) != len(decode):
            raise InvalidRequest.of("welcome.pools", len(prefill), f"{len(decode)}, as many as ours")
        self._of_all = PageReader(_paired(prefill, decode).destination)
        pairs = zip(prefill, decode, strict=bool(prefill))
        self._of_pool = [PageReader(_paired([theirs], [ours]).destination) for theirs, ours in pairs]

    def compare(
        self, destination: Destination, told: bytes, peer: RankRef, me: RankRef, stop: Callable[[], bool]
    ) -> Failure | None:
        """The failure that names the first page which differs from what was sent; None: none does, or ``stop`` was
        true."""
        if self._of_all.empty:
            return None
        expected = np.frombuffer(told[: len(told) // 4 * 4], "<u4")
        if len(expected) != destination.held or len(told) % 4:
            wrong = InvalidRequest.of("page_checksums", f"{len(told)} bytes", f"{4 * destination.held}, 4 a page")
            return Failure.of(wrong, str(peer))
        readers = [self._of_all] if destination.others is None else self._of_pool
        start = 0
        for name, reader, pages in zip(self._names, readers, _sets(destination), strict=False):
            found = reader.sums(pages, stop)
            differs = np.flatnonzero(found != expected[start : start + len(found)])
            if len(differs):
                position = int(differs[0])
                sums = int(expected[start + position]), int(found[position])
                error = mismatch(peer, name, int(pages[position]), position, len(differs), *sums)
                return Failure.of(error, str(me))
            start += len(pages)
        return None


def mismatch(
    peer: RankRef, pool: str, page: int, position: int, pages: int, expected: int, actual: int
) -> ChecksumMismatch:
    """``page``: the first of ``pages`` that differ; ``position``: in the room."""
    return ChecksumMismatch(
        f"{pages} pages differ from what {peer} sent, the first is page {page} of pool {pool!r} at position {position}",
        metadata={
            "peer": peer,
            "pool": pool,
            "page": page,
            "position": position,
            "expected": f"{expected:08x}",
            "actual": f"{actual:08x}",
        },
    )


def _paired(prefill: Sequence[Pool], decode: Sequence[Pool]) -> Geometry:
    """The bytes of both sides that one prefill rank writes. Raises InvalidRequest: a peer says what its pools are, and
    that decides which of our bytes are read."""
    if not prefill:
        return Geometry([], [])
    try:
        for theirs, ours in zip(prefill, decode, strict=True):
            found = runs(*shared(theirs, ours))
            sizes = [[each.page_bytes for each in side] for side in (found.source, found.destination)]
            if sizes[0] != sizes[1] or found.parts > 1:
                raise ValueError(f"pool {theirs.name!r} has pages of another size")
        return geometry(prefill, decode)
    except ValueError as error:
        raise InvalidRequest.of("welcome.pools", str(error), "pools that fit ours") from error


def _sets(destination: Destination) -> list[U32Array]:
    return [destination.pages, *(other.pages for other in destination.others or ())]
