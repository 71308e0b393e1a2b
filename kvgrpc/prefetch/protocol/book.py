"""The operations of a controller: those that run, the last that ended, and who is told of changes. Pure, but for the
lock and the clock that it is given."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvgrpc.errors import OperationNotFound, RequestIdReused, TooManyRequests
from kvgrpc.prefetch.model import OperationKind, OperationRow, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.protocol.operation import Operation

_log = logging.getLogger(__name__)

Listener = Callable[[Operation], None]
# Pages of all operations that have not ended, and of those that are remembered: each takes some 130 bytes here.
MAX_OPEN_PAGES = 1 << 20
MAX_REMEMBERED_PAGES = 1 << 20


class OperationBook:
    """``lock`` is the one lock of all operations, reentrant: hold it while a field of one is read or changed."""

    def __init__(
        self, limits: PrefetchLimits, lock: AbstractContextManager[object], clock: Callable[[], float]
    ) -> None:
        self.lock = lock
        self._clock = clock
        self._limits = limits
        self._open: OrderedDict[str, Operation] = OrderedDict()
        self._ended: OrderedDict[str, Operation] = OrderedDict()
        self._by_request: dict[tuple[OperationKind, str], Operation] = {}
        self._listeners: list[Listener] = []
        self._open_pages = 0
        self._remembered_pages = 0
        self._revision = 0
        self._number = 0
        self._by_change: OrderedDict[str, Operation] = OrderedDict()

    @property
    def revision(self) -> int:
        return self._revision

    def add(self, operation: Operation) -> Operation:
        """The operation, or the one that its request id began before.

        Raises RequestIdReused where that one asks for something else, TooManyRequests.
        """
        order = operation.order
        with self.lock:
            before = self._by_request.get((operation.kind, order.request_id)) if order.request_id else None
            if before is not None:
                if not before.order.asks_the_same(order):
                    raise RequestIdReused(
                        f"request {order.request_id!r} began {before.operation_id} with other pages, priority, "
                        "tenant, extra key or timeout: use a new id",
                        metadata={"requestId": order.request_id, "operationId": before.operation_id},
                    )
                return before
            known = self._open.get(operation.operation_id) or self._ended.get(operation.operation_id)
            if known is not None:
                return known
            if len(self._open) >= self._limits.operations:
                raise _too_many(self._limits.operations, len(self._open) + 1, "cache operations")
            pages = self._open_pages + len(operation.hashes)
            if pages > MAX_OPEN_PAGES:
                raise _too_many(MAX_OPEN_PAGES, pages, "pages of cache operations")
            self._open_pages = pages
            self._number += 1
            operation.number = self._number
            self._open[operation.operation_id] = operation
            if order.request_id:
                self._by_request[operation.kind, order.request_id] = operation
        self.tell(operation)
        return operation

    def get(self, operation_id: str) -> Operation:
        """Raises OperationNotFound."""
        with self.lock:
            found = self._open.get(operation_id) or self._ended.get(operation_id)
        if found is None:
            raise OperationNotFound(
                f"no operation {operation_id[:64]!r}; those that ended are kept for a while only",
                metadata={"operationId": operation_id[:64]},
            )
        return found

    def of_request(self, kind: OperationKind, request_id: str) -> Operation | None:
        with self.lock:
            return self._by_request.get((kind, request_id))

    def changed_since(self, revision: int) -> list[Operation]:
        """Those that changed after it, oldest change first."""
        found = []
        with self.lock:
            for operation in reversed(self._by_change.values()):
                if operation.revision <= revision:
                    break
                found.append(operation)
        return found[::-1]

    def row(self, operation: Operation, *, with_pages: bool = True) -> OperationRow:
        """The operation as it is at one moment."""
        with self.lock:
            return operation.row(self._clock(), with_pages=with_pages)

    def open(self) -> list[Operation]:
        with self.lock:
            return list(self._open.values())

    def all(self) -> list[Operation]:
        """Those that ended first, oldest first."""
        with self.lock:
            return [*self._ended.values(), *self._open.values()]

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls it after each change, on the thread that made it; returns what ends that. It must not block."""
        with self.lock:
            self._listeners.append(listener)

        def end() -> None:
            with self.lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return end

    def tell(self, operation: Operation) -> None:
        """Numbers a change and tells the listeners."""
        with self.lock:
            self._revision += 1
            operation.revision = self._revision
            # One that ended may be forgotten before whoever changed it last comes to say so.
            if operation.operation_id in self._open or operation.operation_id in self._ended:
                self._by_change[operation.operation_id] = operation
                self._by_change.move_to_end(operation.operation_id)
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(operation)
            except Exception as error:
                _log.error("a listener of operations failed: %s", error, exc_info=error)

    def end(self, operation: Operation, state: OperationState, stop: Stop = Stop.NONE) -> bool:
        """Gives it its last state; False when it had one already. Its pages are given away by then."""
        with self.lock:
            if operation.state.ended:
                return False
            operation.state = state
            operation.stop = operation.stop or stop
            operation.ended_at = self._clock()
            if self._open.pop(operation.operation_id, None) is not None:
                self._open_pages -= len(operation.hashes)
            self._ended[operation.operation_id] = operation
            self._remembered_pages += len(operation.hashes)
            while len(self._ended) > self._limits.remembered or self._remembered_pages > MAX_REMEMBERED_PAGES:
                self._forget(self._ended.popitem(last=False)[1])
        self.tell(operation)
        return True

    def forget_ended(self) -> None:
        """Drops the records of what ended, with their request ids."""
        with self.lock:
            for operation in self._ended.values():
                self._forget(operation)
            self._ended.clear()

    def _forget(self, operation: Operation) -> None:
        self._remembered_pages -= len(operation.hashes)
        self._by_change.pop(operation.operation_id, None)
        key = (operation.kind, operation.order.request_id)
        if self._by_request.get(key) is operation:
            del self._by_request[key]


def _too_many(limit: int, value: int, scope: str) -> TooManyRequests:
    return TooManyRequests(
        f"{scope} that have not ended: {value}, at most {limit}",
        metadata={"limit": limit, "value": value, "scope": scope},
        retry_after=1.0,
    )
