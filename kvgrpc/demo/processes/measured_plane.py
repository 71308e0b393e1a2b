"""A data plane that also says how fast it was."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvgrpc.dataplane.base import DataPlane, MemoryRange, Peer, Result, Transfer, U64Array


class MeasuredPlane:
    """Passes everything on to ``inner``. ``written_bytes`` were in place after ``writing_seconds``, which count only
    while at least one write was running. Both may be read from any thread.
    """

    def __init__(self, inner: DataPlane) -> None:
        self.name = inner.name
        self.poll_interval = inner.poll_interval
        self.quick_bytes = inner.quick_bytes
        self.gathers_slices = inner.gathers_slices
        self.written_bytes = 0
        self.writing_seconds = 0.0
        self._inner = inner
        self._running = 0
        self._since = 0.0

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        if self._running == 0:
            self._since = time.monotonic()
        self._running += 1
        return _MeasuredTransfer(self, self._inner.submit(peer, source, destination, nbytes))

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        return self._inner.allocate(nbytes, location)

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self._inner.register(ranges)

    def address(self) -> bytes:
        return self._inner.address()

    def attach(self, address: bytes) -> Peer:
        return self._inner.attach(address)

    def detach(self, peer: Peer) -> None:
        self._inner.detach(peer)

    def connections_from(self, address: bytes) -> frozenset[str]:
        return self._inner.connections_from(address)

    def close(self, deadline: float) -> bool:
        return self._inner.close(deadline)

    def ended(self, result: Result) -> None:
        """A write ended. Called on the one thread that submits and polls."""
        self.written_bytes += result.nbytes
        self._running -= 1
        if self._running == 0:
            self.writing_seconds += time.monotonic() - self._since


class _MeasuredTransfer:
    def __init__(self, plane: MeasuredPlane, inner: Transfer) -> None:
        self._plane = plane
        self._inner = inner
        self._counted = False

    def poll(self) -> Result | None:
        result = self._inner.poll()
        if result is not None and not self._counted:
            self._counted = True
            self._plane.ended(result)
        return result

    def stop(self) -> None:
        self._inner.stop()
