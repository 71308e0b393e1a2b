"""Operations that an engine carries out itself, on a thread of its own: taken from callers on any thread.

Between them stands the book: callers start, watch and end operations in it, the engine's thread takes them, says how
far they are, and ends them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvgrpc.errors import Failure, ServerDraining
from kvgrpc.prefetch.model import OperationKind, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation, state_of
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.threads.queue_threads import FairQueue

# The engine comes as often as each millisecond, and may have thousands that wait.
_LOOK_SECONDS = 0.05
# Of the queue: operations that ended before they were taken leave it when they are most of it.
_MOST_ENDED = 64


class EngineOrders:
    """``wake`` is called, on the caller's thread, when there is something new for the engine: a start or a cut.

    ``page_tokens``: orders of fewer than the limits' threshold are declined at once. The engine ends every operation
    that it took, when nothing moves its pages any more; what it has not taken by its deadline ends by ``expire``.
    """

    def __init__(self, limits: PrefetchLimits, page_tokens: int, wake: Callable[[], None]) -> None:
        self.limits = limits
        self.book = OperationBook(limits, threading.RLock(), time.monotonic)
        self._page_tokens = page_tokens
        self._wake = wake
        # Those that the engine has not taken. The queue has others, too, until it is tidied.
        self._waiting: set[Operation] = set()
        self._queue: FairQueue[Operation] = FairQueue()
        self._look_at = 0.0
        self._cut: dict[str, Stop] = {}
        self._draining = False

    # For callers, on any thread.

    def began(self, kind: OperationKind, request_id: str) -> Operation | None:
        """The operation that a request id began before, as long as that is remembered."""
        return self.book.of_request(kind, request_id)

    def start(self, order: Order) -> Operation:
        """Puts it into the book. Raises InvalidRequest, RequestIdReused, TooManyRequests, ServerDraining."""
        order.check()
        if self._draining and self.began(order.kind, order.request_id) is None:
            raise ServerDraining("this cache drains and begins nothing new", retry_after=1.0)
        operation = Operation(order, self.limits, began=time.monotonic(), over=threading.Event())
        kept = self.book.add(operation)
        if kept is not operation:
            return kept
        too_short = len(order.hashes) * self._page_tokens < self.limits.threshold_tokens
        if too_short and order.kind is OperationKind.PREFETCH:
            self.end(operation, OperationState.DECLINED, Stop.TOO_SHORT)
        else:
            with self.book.lock:
                self._waiting.add(operation)
                self._queue.put(operation, order.priority, order.tenant)
            self._wake()
        return operation

    def terminate(self, operation: Operation, stop: Stop = Stop.CANCELLED) -> None:
        """Cuts it short: at once where the engine has not taken it, else when the engine has let go of its pages."""
        with self.book.lock:
            if operation.ended:
                return
            self._cut.setdefault(operation.operation_id, stop)
            waited = self._leave_queue(operation)
        if waited:
            self._end_early(operation)
        self._wake()

    def drain(self) -> None:
        """Starts nothing more; what runs goes on."""
        self._draining = True

    def undrain(self) -> None:
        """Starts new ones again."""
        self._draining = False

    def shut_down(self) -> None:
        """Ends all that runs: the engine has stopped, and moves no page any more."""
        self._draining = True
        for operation in self.book.open():
            self.end(operation, state_of(Stop.SHUT_DOWN, operation.completed), Stop.SHUT_DOWN)

    # For the engine's thread.

    @property
    def waiting(self) -> int:
        """Operations that the engine has not taken."""
        return len(self._waiting)

    def take(self) -> Operation | None:
        """The next one, the most urgent first; None: there is none. Nobody but the engine ends it from now on.

        Those that have waited too long end, however many more urgent ones there are.
        """
        self.expire()
        while (operation := self._next()) is not None:
            if self.stop_of(operation) is Stop.NONE:
                return operation
            self._end_early(operation)
        return None

    def expire(self) -> None:
        """Ends those that wait to be taken and are cut or too late, by some 50 ms."""
        now = time.monotonic()
        with self.book.lock:
            if now < self._look_at:
                return
            self._look_at = now + _LOOK_SECONDS
            late = [each for each in self._waiting if now >= each.deadline or each.operation_id in self._cut]
            for operation in late:
                self._leave_queue(operation)
        for operation in late:
            self._end_early(operation)

    def stop_of(self, operation: Operation) -> Stop:
        """Why it is to end early; NONE: it goes on."""
        stop = self._cut.get(operation.operation_id, Stop.NONE)
        return Stop.DEADLINE if stop is Stop.NONE and time.monotonic() >= operation.deadline else stop

    def tell(self, operation: Operation, **news: int | OperationState) -> None:
        """Notes news of one: ``state`` and counts, by the names of their fields. Watchers hear of what is new."""
        with self.book.lock:
            changed = {name: value for name, value in news.items() if getattr(operation, name) != value}
            for name, value in changed.items():
                setattr(operation, name, value)
        if changed:
            self.book.tell(operation)

    def end(
        self,
        operation: Operation,
        state: OperationState,
        stop: Stop = Stop.NONE,
        failure: Failure | None = None,
    ) -> None:
        """Its last state. Nothing moves its pages any more, and nothing is held for it."""
        with self.book.lock:
            self._leave_queue(operation)
            operation.failure = operation.failure or failure
            self._cut.pop(operation.operation_id, None)
        self.book.end(operation, state, stop)
        operation.over.set()

    def _next(self) -> Operation | None:
        with self.book.lock:
            while len(self._queue):
                operation = self._queue.pop()
                if operation in self._waiting:
                    self._waiting.remove(operation)
                    return operation
        return None

    def _leave_queue(self, operation: Operation) -> bool:
        """True if it waited. Under the lock."""
        if operation not in self._waiting:
            return False
        self._waiting.remove(operation)
        if len(self._queue) > 2 * len(self._waiting) + _MOST_ENDED:
            for each in self._queue.clear():
                if each in self._waiting:
                    self._queue.put(each, each.order.priority, each.order.tenant)
        return True

    def _end_early(self, operation: Operation) -> None:
        stop = self.stop_of(operation)
        self.end(operation, state_of(stop, 0), stop)
