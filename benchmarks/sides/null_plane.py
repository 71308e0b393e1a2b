"""A data plane that moves nothing and says that it did: what remains is the cost of control."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from benchmarks.baselines.engines import allocate
from kvgrpc.dataplane.base import EndedTransfer, MemoryRange, Outcome, Peer, Result, Transfer, U64Array


class NullPeer:
    """Nobody's memory."""


class NullDataPlane:
    """A kvgrpc.dataplane.base.DataPlane."""

    name = "null"
    poll_interval = 0.0
    # Mooncake's, in whose place it stands: its writes are the transfer thread's.
    quick_bytes = 0
    gathers_slices = False

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        return allocate(nbytes, self._maps)

    def register(self, ranges: Sequence[MemoryRange]) -> None: ...

    def address(self) -> bytes:
        return b"null"

    def attach(self, address: bytes) -> Peer:
        return NullPeer()

    def detach(self, peer: Peer) -> None: ...

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        return _TRANSFER

    def connections_from(self, address: bytes) -> frozenset[str]:
        return frozenset()

    def close(self, deadline: float) -> bool:
        return True


_TRANSFER = EndedTransfer(Result(Outcome.DONE))
