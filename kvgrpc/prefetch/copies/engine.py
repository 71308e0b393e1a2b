"""Copies between device and host on threads and streams of their own; whoever asks only appends and is told by acks."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvgrpc.errors import CopyFailed, Failure, InvalidRequest, KvGrpcError
from kvgrpc.prefetch.controller.worker import Worker
from kvgrpc.prefetch.copies.layers import LayerSignal
from kvgrpc.prefetch.copies.operation import CopyAck, CopyOperation, Direction, merge
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.copies.streams import open_lane, pin, unpin
from kvgrpc.prefetch.model import Short
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, PageTable, as_pages

_log = logging.getLogger(__name__)

MERGED_COPIES = 256
MAX_WAITING = 65_536
_Load = tuple[list[CopyOperation], LayerSignal]


class CopyEngine:
    """Copies of one device pool and one host pool of the same shape. Thread-safe; only ``close`` waits.

    ``piece_pages``: how many pages of writes go at once, between which a more urgent one may come. The caller evicts:
    a full pool answers ``Short`` and stays as it is. An engine with its own page allocator gives ``load`` device pages;
    it must not use the device pool's table then.
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
        self._path = {direction: CopyPath(device, host, backend) for direction in Direction}
        self._lane = {direction: open_lane(device.device) for direction in Direction}
        self._pinned = pin(host, device.device)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._queued: list[CopyOperation] = []
        self._acks: deque[CopyAck] = deque()
        self._in_flight = 0
        self._idle = threading.Condition(self._lock)
        self._writer: Worker[CopyOperation] = Worker(
            "cache-write", self._write_all, self._writes_failed, most=MERGED_COPIES, limit=MAX_WAITING
        )
        self._loader: Worker[_Load] = Worker("cache-load", self._load_all, self._loads_failed, limit=MAX_WAITING)

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
    ) -> Pages | Short:
        """Copies device pages to the host: their host pages at once, PRESENT after the ack.

        ``host_pages``: RESERVED ones of the caller; None: taken from the host pool, which may be ``Short``. The device
        pages must stay as they are until the ack.
        """
        device = self._checked(device_pages)
        host = self.host.table.take(len(device)) if host_pages is None else host_pages
        if isinstance(host, Short):
            return host
        fence = self._lane[Direction.DOWN].fence()
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
    ) -> Pages | Short:
        """Queues PRESENT host pages for the next ``start_loading``: their device pages at once.

        ``device_pages``: the caller's own; None: taken from the device pool, which may be ``Short``. The host pages are
        read-locked until the ack.
        """
        host = as_pages(host_pages)
        given = None if device_pages is None else self._checked(device_pages)
        self.host.table.read(host)
        device = self.device.table.take(len(host)) if given is None else given
        if isinstance(device, Short):
            self.host.table.end_read(host)
            return device
        fence = self._lane[Direction.UP].fence()
        operation = CopyOperation(next(self._numbers), Direction.UP, device, host, node, priority, fence)
        with self._lock:
            self._queued.append(operation)
            self._in_flight += 1
        return device

    def start_loading(self) -> LayerSignal | None:
        """Begins all queued loads as one, layer by layer; what a forward pass waits on. None: nothing was queued."""
        with self._lock:
            operations, self._queued = sorted(self._queued, key=lambda each: each.priority), []
        if not operations:
            return None
        signal = LayerSignal(self.host.shape.layers)
        priority = operations[0].priority
        try:
            self._loader.put((operations, signal), priority)
        except KvGrpcError as error:
            signal.fail(error)
            for operation in operations:
                self._acknowledge(operation, 0.0, error)
        return signal

    def acks(self) -> list[CopyAck]:
        """What ended since the call before, oldest first. Bounded by what was asked: every copy is acknowledged
        once."""
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
        error = CopyFailed("the copy engine was closed", metadata={"direction": "", "layer": ""})
        for operation in self._writer.clear():
            self._acknowledge(operation, 0.0, error)
        for operations, signal in self._loader.clear():
            signal.fail(error)
            for operation in operations:
                self._acknowledge(operation, 0.0, error)
        self._cancel_queued()
        stopped = self._writer.stop(timeout)
        stopped = self._loader.stop(max(0.1, end - time.monotonic())) and stopped
        if stopped and self._pinned:
            unpin(self.host)
            self._pinned = False
        return stopped

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
        """All that waits as one copy, as far as it is one size of piece; the large ones piece by piece."""
        began = time.monotonic()
        lane, path = self._lane[Direction.DOWN], self._path[Direction.DOWN]
        pieces = [piece for operation in operations for piece in operation.split(self._piece_pages)]
        with lane.current():
            for operation in operations:
                assert operation.fence is not None
                operation.fence.wait_on_stream()
            for batch in _batches(pieces, self._piece_pages):
                device, host = merge(batch)
                for layer in range(path.layers):
                    path.down(layer, device, host)
            mark = lane.mark()
        # On this thread, which has nothing else to do, and not on the caller's.
        mark.wait_here()
        for operation in operations:
            self._acknowledge(operation, time.monotonic() - began, None)

    def _writes_failed(self, operations: list[CopyOperation], error: Exception) -> None:
        if len(operations) == 1:
            self._acknowledge(operations[0], 0.0, _copy_failed(Direction.DOWN, error))
            return
        for operation in operations:
            # Which of them it was is not known: each alone.
            try:
                self._write_all([operation])
            except Exception as own:
                self._acknowledge(operation, 0.0, _copy_failed(Direction.DOWN, own))

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
            failed = _copy_failed(Direction.UP, error)
            signal.fail(failed)
            for operation in operations:
                self._acknowledge(operation, 0.0, failed)

    def _acknowledge(self, operation: CopyOperation, seconds: float, error: KvGrpcError | None) -> None:
        """Settles who owns the pages, then tells."""
        down = operation.direction is Direction.DOWN
        if down:
            _settle(self.host.table, operation.host_pages, error)
        else:
            self.host.table.end_read(operation.host_pages)
            _settle(self.device.table, operation.device_pages, error)
        ack = CopyAck(
            operation.number,
            operation.node,
            operation.direction,
            operation.device_pages,
            operation.host_pages,
            0 if error else len(operation.host_pages) * self.host.shape.page_bytes,
            seconds,
            None if error is None else Failure.of(error),
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


def _settle(table: PageTable, pages: Pages, error: KvGrpcError | None) -> None:
    """Pages that were filled are present, those that were not go back. An engine's own pages are none of the
    table's."""
    if not len(pages) or not table.all_reserved(pages):
        return
    if error is None:
        table.commit(pages)
    else:
        table.release(pages)


def _batches(pieces: Sequence[CopyOperation], most: int) -> list[list[CopyOperation]]:
    """Pieces in order, as many as fit into ``most`` pages together."""
    batches: list[list[CopyOperation]] = []
    size = most
    for piece in pieces:
        if size + len(piece.host_pages) > most:
            batches.append([])
            size = 0
        batches[-1].append(piece)
        size += len(piece.host_pages)
    return batches


def _copy_failed(direction: Direction, error: Exception) -> KvGrpcError:
    if isinstance(error, KvGrpcError):
        return error
    text = f"{direction.value} failed: {type(error).__name__}: {error}"
    return CopyFailed(text, metadata={"direction": direction.value, "layer": ""})
