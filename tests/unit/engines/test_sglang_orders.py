"""Orders on their way to SGLang's scheduler and back, with a scheduler that does what each test says."""

from __future__ import annotations

import concurrent.futures
import pickle
import threading
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.engines.sglang.cache import hooks, prompts, served
from kvgrpc.engines.sglang.cache.hooks import Desk, register_orders
from kvgrpc.engines.sglang.cache.orders import MAX_ORDERS, ORDERS_OF_A_STEP, CacheOrder, OrderKind, OrderQueue, Told
from kvgrpc.engines.sglang.cache.prompts import KnownPrompts
from kvgrpc.engines.sglang.cache.served import SglangCache, TreeCounts
from kvgrpc.errors import FeatureDisabled, PeerUnreachable, StorageFailed, TooManyRequests
from kvgrpc.hashing import page_hashes, storage_seed
from kvgrpc.model import RankId, RankRef, Tier
from kvgrpc.prefetch.model import Namespace, OperationKind, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order
from tests.support.waiting import wait_until

PAGE = 16
PAGES = 8
TOKENS = list(range(PAGES * PAGE))
COUNTS = TreeCounts(1024, 512, 128, 64, 2048, 1024, 32, 256, 1024)


class Scheduler:
    """One rank: takes the orders of a step, and says what the test wants of them."""

    def __init__(self, limits: PrefetchLimits | None = None) -> None:
        self.questions = OrderQueue()
        self.cache = SglangCache(
            RankRef(RankId("engine"), 1),
            Namespace("model", "bfloat16", "page_first", PAGE),
            limits or PrefetchLimits(threshold_tokens=PAGE),
            self.questions,
            self.count,
            lambda: None,
            page_bytes=1000,
            write_policy="write_through",
        )

    def count(self) -> concurrent.futures.Future[TreeCounts]:
        future: concurrent.futures.Future[TreeCounts] = concurrent.futures.Future()
        future.set_result(COUNTS)
        return future

    def step(self) -> list[CacheOrder]:
        return [*self.questions.take(), *self.cache.take(1 << 20)]

    def start(self, tokens: list[int] = TOKENS, **more: Any) -> Operation:
        return self.cache.start(Order(kind=OperationKind.PREFETCH, hashes=self.name(tokens), **more))

    def name(self, tokens: list[int] = TOKENS) -> tuple[str, ...]:
        hashes = self.cache.hash_tokens(tokens, extra_key=None, cache_salt=None, bigram=False)
        return tuple(each.hex() for each in hashes)

    def answering(self, answer: Callable[[CacheOrder], Told]) -> threading.Thread:
        """One step, as soon as there is a question."""

        def run() -> None:
            while not len(self.questions):
                time.sleep(0.001)
            for order in self.step():
                self.cache.told(answer(order))

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


class TestOperations:
    def test_the_scheduler_gets_the_tokens_and_its_word_is_what_callers_see(self, scheduler: Scheduler) -> None:
        operation = scheduler.start()
        (order,) = scheduler.step()
        assert (order.kind, order.number) == (OrderKind.PREFETCH, operation.operation_id)
        assert order.prompt == array("q", TOKENS)
        scheduler.cache.told(Told(order.number, OperationState.TRANSFERRING, near=PAGE, hit=7 * PAGE, done=3 * PAGE))
        assert (operation.state, operation.covered, operation.hit) == (OperationState.TRANSFERRING, 1, 7)
        assert (operation.agreed, operation.completed, operation.nbytes) == (8, 3, 2000)
        scheduler.cache.told(Told(order.number, OperationState.DONE, near=PAGE, hit=7 * PAGE, done=8 * PAGE))
        assert (operation.state, operation.completed, operation.ended) == (OperationState.DONE, 8, True)
        assert scheduler.step() == []

    def test_a_cut_before_the_scheduler_took_it_ends_it_at_once(self, scheduler: Scheduler) -> None:
        operation = scheduler.start()
        scheduler.cache.terminate(operation)
        assert (operation.state, operation.stop) == (OperationState.CANCELLED, Stop.CANCELLED)
        assert scheduler.step() == []

    def test_a_cut_of_one_that_runs_is_an_order_given_once(self, scheduler: Scheduler) -> None:
        operation = scheduler.start()
        scheduler.step()
        scheduler.cache.terminate(operation)
        scheduler.cache.terminate(operation)
        (cut,) = scheduler.step()
        assert (cut.kind, cut.number, cut.stop) == (OrderKind.CUT, operation.operation_id, Stop.CANCELLED)
        assert scheduler.step() == [] and not operation.ended
        scheduler.cache.told(Told(cut.number, OperationState.CANCELLED, Stop.CANCELLED, done=2 * PAGE))
        assert (operation.state, operation.completed) == (OperationState.CANCELLED, 2)

    def test_one_that_its_caller_ends_while_the_scheduler_takes_it_costs_the_others_nothing(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = scheduler.start(), scheduler.start(TOKENS[: 4 * PAGE])
        take = EngineOrders.take

        def taken_and_ended(orders: EngineOrders) -> Operation | None:
            operation = take(orders)
            if operation is first:
                orders.end(operation, OperationState.CANCELLED, Stop.CANCELLED)
            return operation

        monkeypatch.setattr(EngineOrders, "take", taken_and_ended)
        assert [order.number for order in scheduler.step()] == [second.operation_id]
        assert scheduler.step() == []

    def test_one_that_ends_while_others_are_looked_at_costs_them_nothing(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever ends one does so at any time, and SGLang's thread goes through all that run in each step."""
        running = [scheduler.start(TOKENS[: pages * PAGE]) for pages in (2, 3, 4)]
        scheduler.step()
        scheduler.cache.terminate(running[2])
        stop_of, ended = EngineOrders.stop_of, list[Operation]()

        class Cut(set[str]):
            def __contains__(self, number: object) -> bool:
                if not ended:
                    ended.append(running[0])
                    scheduler.cache.told(Told(running[0].operation_id, OperationState.DONE))
                return super().__contains__(number)

        def ended_meanwhile(orders: EngineOrders, operation: Operation) -> Stop:
            stop = stop_of(orders, operation)
            if operation is running[2]:
                orders.end(running[2], OperationState.DONE)
            return stop

        monkeypatch.setattr(EngineOrders, "stop_of", ended_meanwhile)
        monkeypatch.setattr(scheduler.cache, "_cut", cut := Cut())
        assert [order.number for order in scheduler.step()] == [running[2].operation_id]
        assert not cut, "what has ended is not remembered"
        scheduler.cache.terminate(running[1])
        assert [order.number for order in scheduler.step()] == [running[1].operation_id]

    def test_one_whose_time_is_over_is_cut(self, scheduler: Scheduler) -> None:
        operation = scheduler.start(timeout=0.01)
        scheduler.step()
        while time.monotonic() < operation.deadline:
            time.sleep(0.001)
        (cut,) = scheduler.step()
        assert (cut.kind, cut.stop) == (OrderKind.CUT, Stop.DEADLINE)

    def test_what_went_wrong_in_the_engine_is_its_failure(self, scheduler: Scheduler) -> None:
        operation = scheduler.start()
        scheduler.step()
        scheduler.cache.told(Told(operation.operation_id, OperationState.FAILED, error="assert False"))
        assert operation.state is OperationState.FAILED
        assert operation.failure is not None and "assert False" in operation.failure.message

    def test_a_repeat_is_the_same_operation_and_waits_once(self, scheduler: Scheduler) -> None:
        assert scheduler.start(request_id="a") is scheduler.start(request_id="a")
        assert len(scheduler.step()) == 1
        assert not scheduler.cache._starting

    def test_without_tokens_nothing_is_begun(self, scheduler: Scheduler) -> None:
        with pytest.raises(FeatureDisabled, match="tokens instead of page_hashes"):
            scheduler.cache.start(Order(kind=OperationKind.PREFETCH, hashes=("ab" * 32,)))
        assert scheduler.cache.book.all() == []

    def test_tokens_that_wait_for_the_scheduler_are_bounded(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served, "MAX_TOKENS", len(TOKENS))
        scheduler.start()
        with pytest.raises(TooManyRequests, match="tokens of orders"):
            scheduler.start()
        scheduler.step()
        scheduler.start()

    def test_a_step_takes_no_more_than_its_share(self, scheduler: Scheduler) -> None:
        for _ in range(3):
            scheduler.start()
        assert len(scheduler.cache.take(2 * len(TOKENS))) == 2
        assert len(scheduler.cache.take(1)) == 1, "at least one, however long"


class TestQuestions:
    def test_a_lookup_is_answered_by_the_next_step(self, scheduler: Scheduler) -> None:
        thread = scheduler.answering(lambda order: Told(order.number, device=PAGE, near=3 * PAGE))
        assert scheduler.cache.lookup(scheduler.name(), 10) == (1, 3, 3)
        thread.join()

    def test_a_scheduler_that_takes_no_step_is_told_as_unreachable_and_asked_no_more(
        self, scheduler: Scheduler
    ) -> None:
        with pytest.raises(PeerUnreachable, match="took no step"):
            scheduler.cache.lookup(scheduler.name(), 0.01)
        assert scheduler.step() == []

    def test_what_went_wrong_is_raised(self, scheduler: Scheduler) -> None:
        thread = scheduler.answering(lambda order: Told(order.number, OperationState.FAILED, error="assert False"))
        with pytest.raises(StorageFailed, match="assert False"):
            scheduler.cache.lookup(scheduler.name(), 10)
        thread.join()

    def test_questions_that_wait_are_bounded(self) -> None:
        queue = OrderQueue()
        for number in range(MAX_ORDERS):
            queue.put(CacheOrder(OrderKind.LOOK, str(number)))
        with pytest.raises(TooManyRequests):
            queue.put(CacheOrder(OrderKind.LOOK, "more"))
        assert len(queue.take()) == ORDERS_OF_A_STEP
        queue.put(CacheOrder(OrderKind.LOOK, "more"))

    def test_a_scheduler_that_leaves_orders_lying_is_not_healthy(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert scheduler.cache.healthy
        scheduler.questions.put(CacheOrder(OrderKind.LOOK, "a"))
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        assert not scheduler.cache.healthy
        scheduler.step()
        assert scheduler.cache.healthy

    def test_so_is_one_that_leaves_operations_lying(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler.start(timeout=600)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        assert not scheduler.cache.healthy
        scheduler.step()
        assert scheduler.cache.healthy, "what it does with them takes as long as storage takes"

    def test_each_question_wakes_a_scheduler_that_sleeps(self) -> None:
        woken: list[bool] = []
        OrderQueue(lambda: woken.append(True)).put(CacheOrder(OrderKind.LOOK, "a"))
        assert woken


class TestPins:
    def test_a_pin_ends_by_itself_when_its_time_is_over(self, scheduler: Scheduler) -> None:
        thread = scheduler.answering(lambda order: Told(order.number, done=len(TOKENS)))
        assert scheduler.cache.pin(scheduler.name(), 0.05) == PAGES
        thread.join()
        orders: list[CacheOrder] = []
        end = time.monotonic() + 10
        while not orders and time.monotonic() < end:
            orders = scheduler.step()
        assert [order.kind for order in orders] == [OrderKind.UNPIN]
        assert orders[0].number == f"pin-{scheduler.name()[-1]}"

    def test_each_who_pins_a_prefix_at_once_hears_an_answer(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served, "_STEP_SECONDS", 5.0)
        with concurrent.futures.ThreadPoolExecutor(2) as callers:
            asked = [callers.submit(scheduler.cache.pin, scheduler.name(), 60) for _ in range(2)]
            wait_until(lambda: len(scheduler.questions) == 2)
            for order in scheduler.step():
                scheduler.cache.told(Told(order.number, done=len(TOKENS)))
            assert [each.result(10.0) for each in asked] == [PAGES, PAGES]

    def test_who_pins_a_prefix_and_leaves_takes_only_one_order_away(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as callers:
            waits = callers.submit(scheduler.cache.pin, scheduler.name(), 60)
            wait_until(lambda: len(scheduler.questions) == 1)
            monkeypatch.setattr(served, "_STEP_SECONDS", 0.01)
            with pytest.raises(PeerUnreachable):
                scheduler.cache.pin(scheduler.name(), 60)
            for order in scheduler.step():
                scheduler.cache.told(Told(order.number, done=len(TOKENS)))
            assert waits.result(10.0) == PAGES

    def test_a_pin_that_nobody_heard_of_ends_as_well(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served, "_STEP_SECONDS", 0.01)
        with pytest.raises(PeerUnreachable):
            scheduler.cache.pin(scheduler.name(), 3600)
        scheduler.cache.pin(scheduler.name(), 0)
        assert [order.kind for order in scheduler.step()] == [OrderKind.UNPIN]

    def test_a_pin_that_is_over_before_the_scheduler_comes_to_it_ends_behind_it(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for before in range(ORDERS_OF_A_STEP):
            scheduler.questions.put(CacheOrder(OrderKind.LOOK, str(before)))
        number = f"pin-{scheduler.name()[-1]}"
        with concurrent.futures.ThreadPoolExecutor(1) as callers:
            asked = callers.submit(scheduler.cache.pin, scheduler.name(), 1)
            wait_until(lambda: len(scheduler.questions) == ORDERS_OF_A_STEP + 1)
            now = time.monotonic()
            with monkeypatch.context() as later:
                later.setattr(time, "monotonic", lambda: now + 2)
                orders = [*scheduler.step(), *scheduler.step()]
            scheduler.cache.told(Told(number, done=len(TOKENS)))
            assert asked.result(10.0) == PAGES
        monkeypatch.setattr(time, "monotonic", lambda: now + 2)
        orders += scheduler.step()
        kinds = [order.kind for order in orders if order.number == number]
        assert OrderKind.PIN in kinds and kinds[-1] is OrderKind.UNPIN, "else it stays for ever"

    def test_pins_are_bounded(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served, "MAX_PINS", 0)
        with pytest.raises(TooManyRequests, match="pins"):
            scheduler.cache.pin(scheduler.name(), 10)


class TestWhatSglangCannot:
    @pytest.mark.parametrize("tiers", [[Tier.HOST], [Tier.DEVICE, Tier.STORAGE], [Tier.STORAGE]])
    def test_a_purge_of_what_is_not_ours_is_refused_with_what_to_do(
        self, scheduler: Scheduler, tiers: list[Tier]
    ) -> None:
        with pytest.raises(FeatureDisabled, match="flush_cache"):
            scheduler.cache.purge(tiers, None, dry_run=False, timeout=1)

    def test_its_counts_are_told_in_pages(self, scheduler: Scheduler) -> None:
        device, host = scheduler.cache.use()
        assert (device.tier, device.pages, device.used, device.details) == (
            Tier.DEVICE,
            64,
            32,
            {"evictable": 8, "protected": 4},
        )
        assert (host.tier, host.pages, host.used, host.reserved, host.details) == (
            Tier.HOST,
            128,
            64,
            16,
            {"pinned": 2},
        )


class TestPrompts:
    def test_a_prompt_is_known_by_its_last_page(self) -> None:
        known = KnownPrompts(PAGE, bigram=False)
        hashes = known.hash(TOKENS, "lora", "salt")
        assert hashes == page_hashes(TOKENS, PAGE, after=storage_seed("lora", "salt"))
        found = known.of([each.hex() for each in hashes])
        assert (found.tokens, found.extra_key, found.cache_salt) == (array("q", TOKENS).tobytes(), "lora", "salt")

    def test_the_last_ones_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompts, "MAX_TOKENS", 2 * PAGE)
        known = KnownPrompts(PAGE, bigram=False)
        names = [known.hash([first] * PAGE, None, None)[0].hex() for first in (1, 2, 3)]
        known.of([names[2]])
        known.of([names[1]])
        with pytest.raises(FeatureDisabled):
            known.of([names[0]])


class Registry:
    """SGLang's, as far as an order comes by it."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.hooks[target.rpartition(".")[2]] = hook


def test_orders_travel_with_the_requests_of_a_step_and_never_reach_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, done = Registry(), list[CacheOrder]()
    order = CacheOrder(OrderKind.LOOK, "a", array("q", TOKENS).tobytes())
    desk = SimpleNamespace(
        take=lambda: [order], do=done.extend, step=lambda: None, note_loads=lambda: None, orders=None
    )
    monkeypatch.setattr(Desk, "open", classmethod(lambda cls, scheduler, listen: desk))
    register_orders("127.0.0.1:0", registry, SimpleNamespace(AFTER="after", BEFORE="before", AROUND="around"))
    assert registry.hooks["_broadcast_reqs_across_ranks"]("receiver", ["request"], ["abort"]) is None, "not open yet"
    registry.hooks["init_request_receiver"](None, "scheduler")
    (_, requests, ours), named = registry.hooks["_broadcast_reqs_across_ranks"]("receiver", ["request"], ["abort"])
    assert (requests, ours, named) == (["request"], ["abort", order], {})
    travelled = pickle.loads(pickle.dumps(ours[1]))
    (_, left), _ = registry.hooks["process_input_requests"]("scheduler", ["request", "abort", travelled])
    assert left == ["request", "abort"] and done == [order]
    assert registry.hooks["process_input_requests"]("scheduler", ["request"]) is None


def test_a_sleeping_scheduler_is_woken_by_an_event_that_it_polls() -> None:
    zmq = pytest.importorskip("zmq")
    poller = zmq.Poller()
    wakes = hooks.Wakes(SimpleNamespace(poller=poller))
    assert poller.poll(0) == []
    wakes.wake()
    assert poller.poll(10_000)
    wakes.clear()
    assert poller.poll(0) == []
    hooks.Wakes(None).wake()
