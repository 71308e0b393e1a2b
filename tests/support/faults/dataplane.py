"""Data planes that misbehave on purpose, and one that does nothing. For tests and benchmarks only."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgrpc.dataplane.base import DataPlane, EndedTransfer, MemoryRange, Outcome, Peer, Result, Transfer, U64Array


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one submission.

    ``delay``: seconds during which nothing is done. ``hang``: nothing is done until ``release()`` or a stop, which ends
    it as ``outcome`` or FAILED_UNKNOWN. ``outcome``: reported instead of writing anything. ``late``: the bytes are
    written all the same, after the report, when the test calls ``write_late()``. ``corrupt``: all is written, but one
    bit of the first descriptor flips on its way; the source is as before in the end.
    """

    outcome: Outcome | None = None
    delay: float = 0.0
    hang: bool = False
    late: bool = False
    corrupt: bool = False
    detail: str = "injected"


@dataclass(slots=True, eq=False)
class Submission:
    """One call of submit(), for assertions; the arrays are copies. ``began``: monotonic seconds."""

    peer: Peer
    source: U64Array
    destination: U64Array
    nbytes: U64Array
    began: float = field(default_factory=time.monotonic)


class FaultyDataPlane:
    """Wraps a plane; ``fault`` decides for each submission, counted from 0, what happens to it (None: nothing).

    For example ``FaultyDataPlane(plane, lambda n, _: Fault(Outcome.FAILED_UNKNOWN, late=True) if n == 2 else None)``.
    Read ``submissions`` for what was asked for (unless ``remember`` is False: they are copies). ``release``,
    ``write_late`` and the attributes may be used from any thread. A peer that is detached while a fault of its own may
    still be written is so only afterwards: a rank that gave its peer up does not stop what is on its way.
    """

    def __init__(
        self,
        inner: DataPlane,
        fault: Callable[[int, Submission], Fault | None] = lambda n, s: None,
        remember: bool = True,
    ) -> None:
        self.inner = inner
        self.fault = fault
        self.name = inner.name
        self.poll_interval = inner.poll_interval
        self.quick_bytes = 0  # faults hang where a quick plane would not
        self.gathers_slices = inner.gathers_slices
        self.submissions: list[Submission] = []
        self._remember = remember
        self._submitted = 0
        self._released = threading.Event()
        self._late: list[Submission] = []
        self._unfinished: set[Submission] = set()
        self._leaving: list[Peer] = []
        self._lock = threading.Lock()

    def release(self) -> None:
        """Lets everything that hangs, now or later, go on."""
        self._released.set()

    def write_late(self, deadline: float = 5.0) -> int:
        """Writes what was reported as failed, as a stopped peer's kernel would; the number of submissions."""
        started = self.start_late()
        for transfer in started:
            result = wait(transfer, deadline)
            assert result.outcome is Outcome.DONE, result
        return len(started)

    def start_late(self) -> list[Transfer]:
        """As ``write_late``, but only begins; whoever polls the transfers moves them. A peer may be gone by now."""
        with self._lock:
            late, self._late = self._late, []
            self._unfinished.update(late)
        return [_LateTransfer(self, one) for one in late]

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        submission = Submission(peer, source.copy(), destination.copy(), nbytes.copy())
        if self._remember:
            self.submissions.append(submission)
        fault = self.fault(self._submitted, submission)
        self._submitted += 1
        if fault is None:
            return self.inner.submit(peer, source, destination, nbytes)
        with self._lock:
            (self._late.append if fault.late else self._unfinished.add)(submission)
        return _FaultyTransfer(self, submission, fault)

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        return self.inner.allocate(nbytes, location)

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self.inner.register(ranges)

    def address(self) -> bytes:
        return self.inner.address()

    def attach(self, address: bytes) -> Peer:
        return self.inner.attach(address)

    def detach(self, peer: Peer) -> None:
        """At once, or when nothing of a fault is left that names the peer."""
        with self._lock:
            self._leaving.append(peer)
        self._let_go()

    def connections_from(self, address: bytes) -> frozenset[str]:
        return self.inner.connections_from(address)

    def close(self, deadline: float) -> bool:
        self.release()
        return self.inner.close(deadline)

    def _finish(self, submission: Submission) -> None:
        """Nothing more of it will be written."""
        with self._lock:
            self._unfinished.discard(submission)
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            named = {id(submission.peer) for submission in (*self._late, *self._unfinished)}
            idle = [peer for peer in self._leaving if id(peer) not in named]
            self._leaving = [peer for peer in self._leaving if id(peer) in named]
        for peer in idle:
            self.inner.detach(peer)


class _FaultyTransfer:
    def __init__(self, plane: FaultyDataPlane, submission: Submission, fault: Fault) -> None:
        self._plane = plane
        self._submission = submission
        self._fault = fault
        self._stopped = False
        self._inner: Transfer | None = None
        self._result: Result | None = None

    def poll(self) -> Result | None:
        if self._result is None:
            self._result = self._move()
            if self._result is not None and not self._fault.late:
                self._plane._finish(self._submission)
        return self._result

    def stop(self) -> None:
        self._stopped = True
        if self._inner is not None:
            self._inner.stop()

    def _move(self) -> Result | None:
        fault, submission = self._fault, self._submission
        if self._inner is not None:
            return self._inner.poll()
        if time.monotonic() - submission.began < fault.delay and not self._stopped:
            return None
        if fault.hang and not self._plane._released.is_set():
            if not self._stopped:
                return None
            return Result(Outcome.FAILED_UNKNOWN if fault.outcome is None else fault.outcome, fault.detail)
        if fault.outcome is not None:
            return Result(fault.outcome, fault.detail)
        if self._stopped:
            return Result(Outcome.REJECTED, "stopped")
        inner, s = self._plane.inner, submission
        if fault.corrupt:
            byte = ctypes.c_uint8.from_address(int(s.source[0]))
            byte.value ^= 1
            result = wait(inner.submit(s.peer, s.source, s.destination, s.nbytes))
            byte.value ^= 1
            return result
        self._inner = inner.submit(s.peer, s.source, s.destination, s.nbytes)
        return self._inner.poll()


class _LateTransfer:
    """A write that was reported as failed."""

    def __init__(self, plane: FaultyDataPlane, submission: Submission) -> None:
        self._plane, self._submission = plane, submission
        s = submission
        self._inner = plane.inner.submit(s.peer, s.source, s.destination, s.nbytes)

    def poll(self) -> Result | None:
        result = self._inner.poll()
        if result is not None:
            self._plane._finish(self._submission)
        return result

    def stop(self) -> None:
        self._inner.stop()


class NullDataPlane:
    """Completes every submission at once without moving a byte: what the control plane alone costs."""

    name = "null"
    poll_interval = 0.0
    quick_bytes = 2**63
    gathers_slices = False

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        block = mmap.mmap(-1, nbytes)
        self._blocks.append(block)
        return int(np.frombuffer(block, dtype=np.uint8).ctypes.data)

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        pass

    def address(self) -> bytes:
        return b"null"

    def attach(self, address: bytes) -> Peer:
        if address != b"null":
            raise ValueError("not the address of a NullDataPlane")
        return self

    def detach(self, peer: Peer) -> None:
        pass

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        return EndedTransfer(Result(Outcome.DONE, "", int(nbytes.sum())))

    def connections_from(self, address: bytes) -> frozenset[str]:
        return frozenset()

    def close(self, deadline: float) -> bool:
        self._blocks.clear()
        return True


def wait(transfer: Transfer, deadline: float = 10.0) -> Result:
    """Polls until the end, at most ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while (result := transfer.poll()) is None:
        assert time.monotonic() < end, f"no outcome within {deadline} s"
        time.sleep(0.0001)
    return result
