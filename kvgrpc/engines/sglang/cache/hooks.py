"""The way of orders into SGLang's scheduler, and what serves them: hooks that SGLang's plug-in group applies.

An order is broadcast with the requests of a step (``_broadcast_reqs_across_ranks``), so every rank of a replica does it
in the same step (``process_input_requests``); what became of it is looked at where SGLang itself takes what its storage
threads have done (``check_hicache_events``), which it does in every step, idle ones too. What storage took of a backup
is noted where SGLang's thread writes it (``_page_backup``): its acknowledgement tells the end alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Any

from kvgrpc.engines.sglang.cache.orders import TOKENS_OF_A_STEP, CacheOrder, OrderQueue, Told
from kvgrpc.engines.sglang.cache.outcomes import BroughtPages
from kvgrpc.engines.sglang.cache.served import SglangCache, TreeCounts
from kvgrpc.errors import StorageFailed
from kvgrpc.observability.logging import RateLimited, one_line

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"


def register_orders(listen: str, registry: Any, kinds: Any) -> None:
    """``listen``: where an operator wants the cache to be served. ``registry``, ``kinds``: SGLang's of hooks."""
    # One desk a scheduler, of which a process has one.
    desks: list[Desk] = []

    def opened(result: None, scheduler: Any, *arguments: Any, **more: Any) -> None:
        desks[:] = [Desk.open(scheduler, listen)]

    def joined(receiver: Any, recv_reqs: list[Any] | None, local_reqs: list[Any] | None = None) -> Any:
        orders = desks[0].take() if desks else []
        return ((receiver, recv_reqs, [*(local_reqs or []), *orders]), {}) if orders else None

    def parted(scheduler: Any, recv_reqs: list[Any]) -> Any:
        if desks:
            desks[0].note_loads()
        orders = [each for each in recv_reqs if isinstance(each, CacheOrder)]
        if not orders:
            return None
        desks[0].do(orders)
        return (scheduler, [each for each in recv_reqs if not isinstance(each, CacheOrder)]), {}

    def stepped(result: None, tree: Any) -> None:
        if desks:
            desks[0].step()

    def emptied(result: None, tree: Any) -> None:
        if desks:
            desks[0].orders.forget()

    def written(write: Callable[[Any, Any], None], controller: Any, operation: Any) -> None:
        try:
            write(controller, operation)
        finally:
            if desks:
                desks[0].orders.note_written(operation)

    registry.register(f"{_SCHEDULER}.init_request_receiver", opened, kinds.AFTER)
    registry.register(f"{_RECEIVER}._broadcast_reqs_across_ranks", joined, kinds.BEFORE)
    registry.register(f"{_SCHEDULER}.process_input_requests", parted, kinds.BEFORE)
    registry.register(f"{_TREE}.check_hicache_events", stepped, kinds.AFTER)
    registry.register(f"{_TREE}.reset", emptied, kinds.AFTER)
    registry.register(f"{_CONTROLLER}._page_backup", written, kinds.AROUND)


class Desk:
    """One scheduler's part: the orders that it does, and at the leading rank of a replica those that wait.

    Everything but ``count`` is for the scheduler's thread, and absorbs its own errors.
    """

    def __init__(self, tree: Any, wakes: Wakes | None = None) -> None:
        from kvgrpc.engines.sglang.cache.tree import TreeOrders

        self.outcomes = None if wakes is None else BroughtPages(tree, self._came_of)
        self.orders = TreeOrders(tree, self._tell, self.outcomes)
        self.questions = OrderQueue((lambda: None) if wakes is None else wakes.wake)
        self.cache: SglangCache | None = None
        self._tree = tree
        self._lines = RateLimited(logger)
        self._wakes = wakes
        self._lock = threading.Lock()
        # Who asks before the next step: all wait for one answer, however long a scheduler that hangs takes no step.
        self._counting: concurrent.futures.Future[TreeCounts] | None = None

    @classmethod
    def open(cls, scheduler: Any, listen: str) -> Desk:
        """Raises FeatureDisabled for a cache that takes no orders, and what the opening of the server raises: the
        engine does not start then, because somebody asked for it."""
        from kvgrpc.engines.sglang.cache.opening import check_serves, is_leading, serve, serve_pulls

        check_serves(scheduler.tree_cache)
        if not is_leading():
            serve_pulls(scheduler.tree_cache, listen)
            return cls(scheduler.tree_cache)
        desk = cls(scheduler.tree_cache, Wakes(getattr(scheduler, "idle_sleeper", None)))
        serve(desk, scheduler.tree_cache, listen)
        return desk

    def take(self) -> list[CacheOrder]:
        """The orders of this step, at the leading rank."""
        if self.cache is None:
            return []
        if self._wakes is not None:
            self._wakes.clear()
        orders = self.questions.take()
        try:
            orders += self.cache.take(TOKENS_OF_A_STEP)
            if self.outcomes is not None:
                orders += self.outcomes.questions()
        except Exception as error:
            self._lines.exception("take", f"kvgrpc: orders were not taken in this step: {one_line(str(error))}")
        if self._wakes is not None and (len(self.questions) or self.cache.waiting):
            self._wakes.wake()  # a step takes a part of them, and nothing else would bring the next one
        return orders

    def do(self, orders: list[CacheOrder]) -> None:
        for order in orders:
            self.orders.do(order)

    def note_loads(self) -> None:
        """SGLang has formed the batch of the step before."""
        try:
            if self.outcomes is not None:
                self.outcomes.note_loads()
        except Exception as error:
            self._lines.exception("outcomes", f"kvgrpc: what became of pages is not known: {one_line(str(error))}")

    def step(self) -> None:
        """SGLang's tree has taken what its threads had done."""
        try:
            self.orders.look_after()
        except Exception as error:
            self._lines.exception("step", f"kvgrpc: orders were not looked after in this step: {one_line(str(error))}")
        with self._lock:
            asked, self._counting = self._counting, None
        if asked is not None:
            self._answer(asked)

    def count(self) -> concurrent.futures.Future[TreeCounts]:
        """From any thread: the counts of the next step, or StorageFailed. One future for all who ask before it; nobody
        cancels it."""
        with self._lock:
            asked = self._counting = self._counting or concurrent.futures.Future()
        if self._wakes is not None:
            self._wakes.wake()
        return asked

    def _answer(self, asked: concurrent.futures.Future[TreeCounts]) -> None:
        try:
            counts = self._count_pages()
        except Exception as error:
            text = one_line(f"{type(error).__name__}: {error}")
            self._lines.exception("count", f"kvgrpc: SGLang's pools do not tell their counts: {text}")
            asked.set_exception(StorageFailed(text, metadata={"backend": "sglang", "status": "FAILED"}))
        else:
            asked.set_result(counts)

    def _tell(self, told: Told) -> None:
        if self.cache is not None:
            try:
                self.cache.told(told)
            except Exception as error:
                text = one_line(f"{told.number}: {error}")
                self._lines.exception("tell", f"kvgrpc: nobody was told of order {text}")

    def _came_of(self, number: str, used: int, lost: int) -> None:
        try:
            if self.cache is not None:
                self.cache.came_of(number, used, lost)
        except Exception as error:
            self._lines.exception("outcomes", f"kvgrpc: what became of pages is not told: {one_line(str(error))}")

    def _count_pages(self) -> TreeCounts:
        tree = self._tree
        allocator, controller = tree.token_to_kv_pool_allocator, tree.cache_controller
        host = controller.mem_pool_host
        return TreeCounts(
            device=int(allocator.size),
            device_free=int(allocator.available_size()),
            device_evictable=int(tree.full_evictable_size()),
            device_protected=int(tree.full_protected_size()),
            host=int(host.size),
            host_free=int(host.available_size()),
            host_pinned=self.orders.pinned_tokens,
            occupied=int(controller.prefetch_tokens_occupied),
            capacity=int(getattr(controller, "prefetch_capacity_limit", 0)),
        )


class Wakes:
    """Wakes a scheduler that sleeps while it is idle (``--sleep-on-idle``); others need none.

    ``sleeper``: SGLang's, which polls sockets; one that cannot be told of another (its Rust server's) sleeps on, for a
    second at most.
    """

    def __init__(self, sleeper: Any) -> None:
        poller = getattr(sleeper, "poller", None)
        self._event = -1
        if poller is not None:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            poller.register(self._event, select.POLLIN)  # ZMQ's number for it, too

    def wake(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        if self._event >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
