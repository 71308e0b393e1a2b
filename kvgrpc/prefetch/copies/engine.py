"""Copies between device and host on threads and streams of their own; whoever asks only appends and is told by acks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvgrpc.errors import CopyFailed, Failure, InvalidRequest, KvGrpcError, TooManyRequests
from kvgrpc.prefetch.copies.copy_operation import CopyAck, CopyOperation, CopyPiece, Direction, copy_failed, merge
from kvgrpc.prefetch.copies.layers import LayerSignal
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.copies.streams import open_lane, pin, unpin
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.threads.queue_threads import QueueThreads

_log = logging.getLogger(__name__)

MERGED_COPIES = 256
MAX_WAITING = 65_536
_Load = tuple[list[CopyOperation], LayerSignal]


class CopyEngine:
    """Copies of one device pool and one host pool of the same shape. Thread-safe; only ``close`` waits.

    ``piece_pages``: how many pages of writes go at once; after each such piece the most urgent that waits is next. The
    caller evicts: a full pool answers ``NotEnoughPages`` and stays as it is. An engine with its own page allocator
    gives ``load`` device pages; it must not use the device pool's table then.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        backend: IoBackend = IoBackend.KERNEL,
        piece_pages: int = 1024,
        on_ack: Callable[[CopyAck], None] | None = None,
    ) -> None:
        self.device = device
        self.host = host
        self._piece_pages = piece_pages
        self._on_ack = on_ack
        self._lane = {direction: open_lane(device.device) for direction in Direction}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._queued: list[CopyOperation] = []
        self._loads: set[CopyOperation] = set()
        self._acks: deque[CopyAck] = deque()
        self._in_flight = 0
        self._closed = False
        self._idle = threading.Condition(self._lock)
        self._pinned = pin(host, device.device)
        with contextlib.ExitStack() as opened:
            opened.callback(self._unpin)
            self._path = {direction: CopyPath(device, host, backend) for direction in Direction}
            self._writer: QueueThreads[CopyOperation] = QueueThreads(
                "cache-write", self._write_all, self._writes_failed, most=MERGED_COPIES, limit=MAX_WAITING
            )
            opened.callback(self._writer.stop, 1.0)
            self._loader: QueueThreads[_Load] = QueueThreads(
                "cache-load", self._load_all, self._loads_failed, limit=MAX_WAITING
            )
            opened.pop_all()

    @property
    def healthy(self) -> bool:
        return self._writer.healthy and self._loader.healthy

    @property
    def in_flight(self) -> int:
        """Copies that are not acknowledged yet, queued loads included."""
        return self._in_flight

    def write(
        self,
        device_pages: Sequence[int] | Pages,
        *,
        node: object = None,
        priority: int = 0,
        host_pages: Pages | None = None,
    ) -> Pages | NotEnoughPages:
        """Copies device pages to the host: their host pages at once, PRESENT after the ack. Raises InvalidRequest, and
        TooManyRequests when ``MAX_WAITING`` copies were begun and their acks not taken.

        ``host_pages``: RESERVED ones of the caller; None: taken from the host pool, which may be ``NotEnoughPages``.
        The device pages must stay as they are until the ack.
        """
        device = self._checked(device_pages)
        self._check_room()
        fence = self._lane[Direction.DOWN].fence()
        host = self.host.table.take(len(device)) if host_pages is None else host_pages
        if isinstance(host, NotEnoughPages):
            return host
        operation = CopyOperation(next(self._numbers), Direction.DOWN, device, host, node, priority, fence)
        with self._lock:
            self._in_flight += 1
        try:
            self._writer.put(operation, priority)
        except KvGrpcError:
            if host_pages is None:
                self.host.table.release(host)
            self._leave(1)
            raise
        return host

    def load(
        self,
        host_pages: Sequence[int] | Pages,
        *,
        node: object = None,
        priority: int = 0,
        device_pages: Pages | None = None,
    ) -> Pages | NotEnoughPages:
        """Queues PRESENT host pages for the next ``start_loading``: their device pages at once. Raises as ``write``
        does, and PageStateInvalid.

        ``device_pages``: the caller's own; None: taken from the device pool, which may be ``NotEnoughPages``. The host
        pages are read-locked until the ack.
        """
        host = as_pages(host_pages)
        given = None if device_pages is None else self._checked(device_pages)
        self._check_room()
        fence = self._lane[Direction.UP].fence()
        self.host.table.read(host)
        device = self.device.table.take(len(host)) if given is None else given
        if isinstance(device, NotEnoughPages):
            self.host.table.end_read(host)
            return device
        operation = CopyOperation(next(self._numbers), Direction.UP, device, host, node, priority, fence)
        with self._lock:
            if not self._closed:
                self._queued.append(operation)
                self._loads.add(operation)
                self._in_flight += 1
                return device
        # Nobody would begin it or say its end.
        self.host.table.end_read(host)
        if given is None:
            self.device.table.release(device)
        raise TooManyRequests(
            "the copy engine was closed", metadata={"limit": MAX_WAITING, "value": 1, "scope": "copies"}
        )

    def start_loading(self) -> LayerSignal | None:
        """Begins all queued loads as one, layer by layer; what a forward pass waits on. None: nothing was queued."""
        with self._lock:
            operations, self._queued = sorted(self._queued, key=lambda each: each.priority), []
        if not operations:
            return None
        signal = LayerSignal(self.host.shape.layers)
        for operation in operations:
            operation.signal = signal
        priority = operations[0].priority
        try:
            self._loader.put((operations, signal), priority)
        except KvGrpcError as error:
            signal.fail(error)
            for operation in operations:
                self._acknowledge(operation, 0.0, error)
        return signal

    def awaited(self, device_pages: Pages) -> bool:
        """True if a load of one of these pages is still to queue a layer of it."""
        with self._lock:
            coming = [each for each in self._loads if each.signal is None or each.signal.ready < each.signal.layers]
        return any(np.isin(device_pages, each.device_pages).any() for each in coming)

    def acks(self) -> list[CopyAck]:
        """The copies that ended since the call before, oldest first. Every copy is acknowledged once; who does not
        take the acks can begin no more copies one day."""
        with self._lock:
            taken, self._acks = list(self._acks), deque()
        return taken

    def evict_device(self, device_pages: Sequence[int] | Pages, host_pages: Sequence[int] | Pages) -> int:
        """Frees device pages whose bytes the host has; how many. Raises PageStateInvalid when it has not all of
        them."""
        device, host = as_pages(device_pages), as_pages(host_pages)
        self.host.table.read(host)
        try:
            self.device.table.release(device)
        finally:
            self.host.table.end_read(host)
        return len(device)

    def evict_host(self, host_pages: Sequence[int] | Pages) -> int:
        """Frees host pages that nothing reads; how many. Raises PageStateInvalid."""
        host = as_pages(host_pages)
        self.host.table.release(host)
        return len(host)

    def wait_idle(self, timeout: float) -> bool:
        """Waits until every copy that was begun is acknowledged; queued loads are cancelled, with an ack."""
        self._cancel_queued()
        with self._lock:
            return self._idle.wait_for(lambda: self._in_flight == 0, timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Ends the threads after what they do now; what waits is acknowledged as failed. False: one was left behind."""
        end = time.monotonic() + timeout
        with self._lock:
            self._closed = True
        error = CopyFailed("the copy engine was closed", metadata={"direction": "", "layer": ""})
        for worker in (self._writer, self._loader):
            # Nothing comes, and no write of several pieces comes back, once what waits is taken.
            worker.stop(0.0)
        for operation in self._writer.clear():
            self._acknowledge(operation, 0.0, error)
        for operations, signal in self._loader.clear():
            signal.fail(error)
            for operation in operations:
                self._acknowledge(operation, 0.0, error)
        self._cancel_queued()
        stopped = self._writer.stop(timeout)
        stopped = self._loader.stop(max(0.1, end - time.monotonic())) and stopped
        if stopped:
            self._unpin()
        return stopped

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, False
        if pinned:
            unpin(self.host)

    def _check_room(self) -> None:
        with self._lock:
            open_ones = self._in_flight + len(self._acks)
        if open_ones >= MAX_WAITING:
            raise TooManyRequests(
                f"{open_ones} copies were begun and their acks not taken, at most {MAX_WAITING}: call acks()",
                metadata={"limit": MAX_WAITING, "value": open_ones + 1, "scope": "copies"},
                retry_after=1.0,
            )

    def _checked(self, device_pages: Sequence[int] | Pages) -> Pages:
        """Device pages that may be an engine's own, of which no table knows."""
        pages = as_pages(device_pages)
        if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < self.device.pages):
            rule = f"0 to {self.device.pages - 1}"
            raise InvalidRequest.of("device_pages", f"{int(pages.min())} to {int(pages.max())}", rule)
        return pages

    def _cancel_queued(self) -> None:
        with self._lock:
            operations, self._queued = self._queued, []
        for operation in operations:
            error = CopyFailed("cancelled before it began", metadata={"direction": "load", "layer": ""})
            self._acknowledge(operation, 0.0, error)

    # On the writing thread.

    def _write_all(self, operations: list[CopyOperation]) -> None:
        """One piece of what waits, the most urgent first, as one copy; what is left goes back into the queue."""
        began = time.monotonic()
        lane, path = self._lane[Direction.DOWN], self._path[Direction.DOWN]
        pieces: list[tuple[CopyOperation, CopyPiece]] = []
        room = self._piece_pages
        for operation in operations:
            if room <= 0:
                break
            pieces.append((operation, operation.next_piece(room)))
            room -= len(pieces[-1][1].host_pages)
        with lane.current():
            for operation, _ in pieces:
                assert operation.fence is not None
                operation.fence.wait_on_stream()
            device, host = merge([piece for _, piece in pieces])
            for layer in range(path.layers):
                path.down(layer, device, host)
            mark = lane.mark()
        # On this thread, which has nothing else to do, and not on the caller's.
        mark.wait_here()
        took = time.monotonic() - began
        for operation, piece in pieces:
            operation.done += len(piece.host_pages)
            operation.seconds += took
            if operation.done == len(operation.host_pages):
                self._acknowledge(operation, operation.seconds, None)
        for operation in operations:
            if not operation.acknowledged:
                self._put_back(operation)

    def _put_back(self, operation: CopyOperation) -> None:
        try:
            self._writer.put(operation, operation.priority, again=True)
        except KvGrpcError as error:
            self._acknowledge(operation, 0.0, error)

    def _writes_failed(self, operations: list[CopyOperation], error: Exception) -> None:
        left = [operation for operation in operations if not operation.acknowledged]
        quiescent = self._quiescent(Direction.DOWN)
        if len(left) == 1 or not quiescent:
            for operation in left:
                self._acknowledge(operation, 0.0, copy_failed(Direction.DOWN, error), quiescent)
            return
        for operation in left:
            # Which of them it was is not known: each alone.
            try:
                self._write_all([operation])
            except Exception as own:
                quiescent = self._quiescent(Direction.DOWN)
                self._acknowledge(operation, 0.0, copy_failed(Direction.DOWN, own), quiescent)

    # On the loading thread.

    def _load_all(self, loads: list[_Load]) -> None:
        for operations, signal in loads:
            began = time.monotonic()
            lane, path = self._lane[Direction.UP], self._path[Direction.UP]
            device, host = merge(operations)
            with lane.current():
                for operation in operations:
                    assert operation.fence is not None
                    operation.fence.wait_on_stream()
                for layer in range(path.layers):
                    path.up(layer, host, device)
                    mark = lane.mark()
                    signal.done(mark)
            mark.wait_here()
            for operation in operations:
                self._acknowledge(operation, time.monotonic() - began, None)

    def _loads_failed(self, loads: list[_Load], error: Exception) -> None:
        for operations, signal in loads:
            failed = copy_failed(Direction.UP, error)
            signal.fail(failed)
            quiescent = self._quiescent(Direction.UP)
            for operation in operations:
                if not operation.acknowledged:
                    self._acknowledge(operation, 0.0, failed, quiescent)

    def _quiescent(self, direction: Direction) -> bool:
        """True if nothing moves any more that was begun on a lane, after a copy failed half-way: layers before the one
        that failed may still be on their way. False when the device itself does not answer."""
        try:
            self._lane[direction].mark().wait_here()
            return True
        except Exception as error:
            _log.error("the device does not end a %s, its pages stay taken: %s", direction.value, error)
            return False

    def _acknowledge(
        self, operation: CopyOperation, seconds: float, error: KvGrpcError | None, quiescent: bool = True
    ) -> None:
        """Settles who owns the pages, then tells."""
        operation.acknowledged = True
        down = operation.direction is Direction.DOWN
        if not quiescent:
            pass  # nobody may have them again
        elif down:
            self.host.table.settle(operation.host_pages, error is None)
        else:
            self.host.table.end_read(operation.host_pages)
        with self._lock:
            # At once: whoever takes pages of a load that failed has pages of no load.
            self._loads.discard(operation)
            if quiescent and not down:
                self.device.table.settle(operation.device_pages, error is None)
        ack = CopyAck(
            operation.number,
            operation.node,
            operation.direction,
            operation.device_pages,
            operation.host_pages,
            0 if error else len(operation.host_pages) * self.host.shape.page_bytes,
            seconds,
            None if error is None else Failure.of(error),
            quiescent,
        )
        if self._on_ack is not None:
            try:
                self._on_ack(ack)
            except Exception as failed:
                _log.error("what hears of copies failed: %s", failed, exc_info=failed)
        else:
            with self._lock:
                self._acks.append(ack)
        self._leave(1)

    def _leave(self, count: int) -> None:
        with self._lock:
            self._in_flight -= count
            if self._in_flight == 0:
                self._idle.notify_all()
