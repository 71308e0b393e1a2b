"""The controller beside storage that fails in every way: each operation ends once, with its reason, and leaves
nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import FeatureDisabled, InvalidRequest, OperationNotFound, RequestIdReused, TooManyRequests
from kvgrpc.observability import metrics
from kvgrpc.prefetch.agreement.votes import Agreement
from kvgrpc.prefetch.controller.backing_up import writer_of
from kvgrpc.prefetch.controller.controller import CacheController
from kvgrpc.prefetch.controller.keeper import CompletionQueue
from kvgrpc.prefetch.controller.operation import Operation
from kvgrpc.prefetch.model import OperationRow, OperationState, PageOutcome, PrefetchLimits, Short, Stop, StopPolicy
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import PageShape
from tests.support.faults.storage import BROKEN, DOWN, FAILED, HANG, Fault, FaultyBackend, memory_backend
from tests.support.waiting import wait_until

SHAPE = PageShape.mha(2, 4, 1, 8, "float16")
LIMITS = PrefetchLimits(threshold_tokens=4, batch_pages=4, storage_timeout=0.3, readers=2)


def hashes(count: int, name: str = "a") -> list[str]:
    return [f"{name}{number:04d}" for number in range(count)]


def content(page_hash: str) -> Any:
    return np.random.default_rng(list(page_hash.encode())).integers(0, 256, SHAPE.page_bytes, dtype=np.uint8)


@dataclass
class Rig:
    """A controller over a backend whose faults a test decides."""

    limits: PrefetchLimits = LIMITS
    pages: int = 64
    writes: Callable[[str], bool] = lambda page_hash: True
    storage: FaultyBackend = field(default_factory=lambda: FaultyBackend(memory_backend()))
    agreement: Agreement | None = None

    def __post_init__(self) -> None:
        self.host = HostPool(SHAPE, self.pages)
        self.controller = CacheController(
            self.host,
            self.storage,
            lambda page_hash, extra_key: f"key-{page_hash}",
            agreement=self.agreement,
            limits=self.limits,
            writes=self.writes,
        )

    @property
    def queue(self) -> CompletionQueue:
        assert isinstance(self.controller.keeper, CompletionQueue)
        return self.controller.keeper

    def on_host(self, names: Sequence[str]) -> Any:
        pages = self.host.table.take(len(names))
        assert not isinstance(pages, Short)
        for page, name in zip(pages, names, strict=True):
            self.host.set_flat(int(page), content(name))
        self.host.table.commit(pages)
        return pages

    def stored(self, names: Sequence[str]) -> list[str]:
        """Storage has them and the host has not."""
        pages = self.on_host(names)
        operation = self.ended(self.controller.write_storage(names, pages))
        assert operation.state is OperationState.DONE
        self.host.table.release(pages)
        return list(names)

    def ended(self, operation: Operation) -> Operation:
        assert operation.wait(20), operation.state
        return operation

    def fault(self, call: str, faults: dict[str, Fault]) -> None:
        by_key = {f"key-{name}": fault for name, fault in faults.items()}
        self.storage.fault = lambda which, key: by_key.get(key) if which == call else None

    def once(self, call: str, name: str, fault: Fault) -> None:
        """The fault happens the first time only."""
        left = [fault]
        self.storage.fault = lambda which, key: left.pop() if which == call and key == f"key-{name}" and left else None

    def take(self) -> list[str]:
        """What landed, its bytes compared; the pages are freed."""
        found = []
        for landed in self.queue.take():
            for page, name in zip(landed.pages, landed.hashes[landed.covered :], strict=True):
                assert (self.host.flat(int(page)) == content(name)).all(), name
                found.append(name)
            self.host.table.release(landed.pages)
        return found

    def nothing_is_left(self) -> None:
        assert self.controller.occupied == 0
        assert not self.controller.book.open()
        assert self.host.table.counts() == {"free": self.pages, "reserved": 0, "present": 0, "read": 0}

    def close(self) -> None:
        self.storage.release()
        assert self.controller.close(20)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


class TestPrefetch:
    def test_every_page_of_every_batch_has_its_own_bytes(self, rig: Rig) -> None:
        names = rig.stored(hashes(23))
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.completed, operation.stop) == (OperationState.DONE, 23, Stop.NONE)
        assert operation.outcomes == [PageOutcome.OK] * 23 and operation.nbytes == 23 * SHAPE.page_bytes
        assert rig.take() == names
        rig.nothing_is_left()

    def test_host_pages_are_reserved_for_what_storage_has_and_not_before(self, rig: Rig) -> None:
        names = hashes(64)
        rig.stored(names[:9])
        assert rig.ended(rig.controller.prefetch([*names, *hashes(100, "z")])).completed == 9
        assert rig.take() == names[:9]
        assert rig.ended(rig.controller.prefetch(hashes(40, "q"))).stop is Stop.BELOW_THRESHOLD
        rig.nothing_is_left()

    def test_a_page_that_fails_once_is_tried_again(self, rig: Rig) -> None:
        names = rig.stored(hashes(10))
        rig.once("read", names[5], FAILED)
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.retries) == (OperationState.DONE, 1)
        assert rig.take() == names

    def test_a_page_that_is_lost_ends_the_prefix_there(self, rig: Rig) -> None:
        names = rig.stored(hashes(10))
        rig.fault("read", {names[5]: BROKEN})
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.stop, operation.completed) == (OperationState.PARTIAL, Stop.PAGE_LOST, 5)
        assert operation.outcomes[5] is PageOutcome.FAILED
        assert operation.failure is not None and "injected" in operation.failure.message
        assert rig.take() == names[:5]
        rig.nothing_is_left()

    def test_a_first_page_that_is_lost_leaves_nothing(self, rig: Rig) -> None:
        names = rig.stored(hashes(10))
        rig.fault("read", {names[0]: BROKEN})
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.completed) == (OperationState.FAILED, 0)
        assert rig.take() == []
        rig.nothing_is_left()

    def test_pages_that_the_backend_still_holds_are_nobodys_until_it_lets_go(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        rig.fault("read", {names[2]: HANG})
        operation = rig.controller.prefetch(names)
        wait_until(lambda: operation.finishing)
        assert not operation.wait(0.2), "it ended while the backend may still write into its pages"
        assert rig.host.table.counts()["reserved"] == 8
        rig.storage.release()
        rig.ended(operation)
        assert operation.outcomes[2] is PageOutcome.TIMEOUT and operation.completed == 2
        assert rig.take() == names[:2]
        rig.nothing_is_left()

    def test_pages_that_the_backend_holds_stay_reserved_when_no_further_step_has_a_place(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = rig.stored(hashes(8))
        rig.fault("read", {names[2]: HANG})
        assert rig.controller._prefetcher is not None
        queries = rig.controller._prefetcher._queries
        put, refused = queries.put, threading.Event()

        def full(item: Any, *arguments: Any) -> None:
            if item[0].finishing:
                refused.set()
                raise TooManyRequests("full", metadata={"limit": 1, "value": 2, "scope": "queries"})
            put(item, *arguments)

        monkeypatch.setattr(queries, "put", full)
        operation = rig.controller.prefetch(names)
        assert refused.wait(20)
        assert not operation.wait(0.2), "it ended while the backend may still write into its pages"
        assert rig.host.table.counts()["reserved"] == 8
        rig.storage.release()
        assert rig.ended(operation).state is OperationState.FAILED
        rig.nothing_is_left()

    def test_storage_that_is_down_declines_and_the_next_one_goes_on(self, rig: Rig) -> None:
        names = rig.stored(hashes(6))
        rig.fault("count", {names[0]: DOWN})
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.stop) == (OperationState.DECLINED, Stop.BACKEND_DOWN)
        assert operation.failure is not None
        rig.fault("count", {})
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
        rig.take()

    @pytest.mark.parametrize("call", ["count_leading", "read"])
    def test_a_backend_that_raises_ends_that_operation_and_no_thread(
        self, rig: Rig, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = rig.stored(hashes(6))

        def broken(*arguments: Any) -> Any:
            raise ZeroDivisionError("a bug of the backend")

        with monkeypatch.context() as patched:
            patched.setattr(rig.storage, call, broken)
            for _ in range(3):
                operation = rig.ended(rig.controller.prefetch(names))
                assert operation.state in (OperationState.DECLINED, OperationState.FAILED)
                assert operation.failure is not None and "a bug of the backend" in operation.failure.message
        rig.nothing_is_left()
        assert rig.controller.healthy
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
        rig.take()

    def test_what_is_told_of_an_operation_fits_together_at_every_moment(self, rig: Rig) -> None:
        names = rig.stored(hashes(32))
        rows: list[OperationRow] = []
        over = threading.Event()

        def look(operation: Operation) -> None:
            while not over.is_set():
                rows.append(rig.controller.book.row(operation))

        for _ in range(10):
            operation = rig.controller.prefetch(names)
            threads = [threading.Thread(target=look, args=(operation,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            rig.ended(operation)
            over.set()
            for thread in threads:
                thread.join(20)
            over.clear()
            rows.append(rig.controller.book.row(operation))
            assert rig.take() == names
        for row in rows:
            arrived = [outcome is PageOutcome.OK for outcome in row.outcomes]
            assert row.nbytes == sum(arrived) * SHAPE.page_bytes
            assert row.completed <= (arrived.index(False) if False in arrived else len(arrived))
            assert row.quiescent == row.state.ended
            assert row.state is not OperationState.DONE or row.completed == 32

    @pytest.mark.parametrize("short", [True, False])
    def test_a_backend_that_answers_another_number_of_written_pages_is_believed_nothing(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, short: bool
    ) -> None:
        names = hashes(4)
        pages = rig.on_host(names)
        write = rig.storage.write

        def other(*arguments: Any) -> Any:
            results = write(*arguments)
            return results[:-1] if short else [*results, results[0]]

        monkeypatch.setattr(rig.storage, "write", other)
        operation = rig.ended(rig.controller.write_storage(names, pages))
        assert (operation.state, operation.completed) == (OperationState.FAILED, 0)
        assert f"{3 if short else 5} of 4 pages" in str(operation.failure)
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_a_backend_that_answers_too_few_pages_is_believed_nothing(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = rig.stored(hashes(4))
        read = rig.storage.read
        monkeypatch.setattr(rig.storage, "read", lambda *arguments: read(*arguments)[:-1])
        operation = rig.ended(rig.controller.prefetch(names))
        assert operation.state is OperationState.FAILED and "3 of 4 pages" in str(operation.failure)
        rig.nothing_is_left()

    def test_a_keeper_that_raises_leaks_no_page(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        names = rig.stored(hashes(6))

        def broken(*arguments: Any) -> None:
            raise KeyError("a bug of the engine")

        monkeypatch.setattr(rig.queue, "keep", broken)
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.FAILED
        rig.nothing_is_left()


class TestDeclining:
    def test_too_few_tokens_are_not_worth_it(self) -> None:
        rig = Rig(replace(LIMITS, threshold_tokens=16))
        names = rig.stored(hashes(8))
        assert rig.ended(rig.controller.prefetch(names[:3])).stop is Stop.TOO_SHORT
        rig.fault("count", {})
        assert rig.ended(rig.controller.prefetch([*names[:3], *hashes(8, "q")])).stop is Stop.BELOW_THRESHOLD
        assert rig.ended(rig.controller.prefetch(names[:4])).state is OperationState.DONE
        rig.take()
        rig.nothing_is_left()
        rig.close()

    def test_a_full_host_takes_what_it_can_or_declines(self) -> None:
        rig = Rig(pages=16)
        names = rig.stored(hashes(12))
        theirs = rig.on_host(hashes(10, "z"))
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.completed) == (OperationState.DONE, 6)
        assert rig.take() == names[:6]
        more = rig.on_host(hashes(6, "y"))
        assert rig.ended(rig.controller.prefetch(names)).stop is Stop.CAPACITY
        rig.host.table.release(theirs)
        rig.host.table.release(more)
        rig.nothing_is_left()
        rig.close()

    def test_what_landed_and_was_not_taken_makes_room_for_what_comes(self) -> None:
        rig = Rig(pages=16)
        for name in "abcdef":
            names = rig.stored(hashes(8, name)) if name == "a" else hashes(8, name)
            if name != "a":
                rig.take()
                rig.stored(names)
            assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
        assert rig.take() == hashes(8, "f")
        rig.nothing_is_left()
        rig.close()

    def test_what_landed_and_is_backed_up_makes_no_room(self) -> None:
        rig = Rig(pages=16)
        rig.stored(hashes(8))
        rig.stored(hashes(8, "b"))
        rig.stored(hashes(12, "c"))
        for name in "ab":
            assert rig.ended(rig.controller.prefetch(hashes(8, name))).state is OperationState.DONE
        read = rig.queue.pages_of(hashes(8))
        operation = rig.ended(rig.controller.prefetch(hashes(12, "c")))
        assert (operation.state, operation.completed) == (OperationState.DONE, 8)
        rig.host.table.end_read(read)
        assert rig.take() == [*hashes(8), *hashes(8, "c")]
        rig.nothing_is_left()
        rig.close()

    def test_prefetches_hold_no_more_than_their_share(self, rig: Rig) -> None:
        names = rig.stored(hashes(40))
        rig.fault("read", {each: HANG for each in names[:1]})
        first = rig.controller.prefetch(names)
        wait_until(lambda: first.finishing)
        assert rig.controller.occupied == 32
        assert rig.ended(rig.controller.prefetch(hashes(8, "b"))).stop is Stop.RATE_LIMITED
        rig.storage.release()
        rig.ended(first)
        assert rig.controller.occupied == 0
        rig.take()

    def test_a_share_that_others_hold_is_another_reason_than_a_pool_that_is_full(self) -> None:
        rig = Rig(replace(LIMITS, threshold_tokens=16))  # 4 pages at least
        names = rig.stored(hashes(30))
        rig.fault("read", {each: HANG for each in names[:1]})
        first = rig.controller.prefetch(names)
        wait_until(lambda: first.finishing)
        rig.fault("read", {})
        other = rig.stored(hashes(8, "b"))
        assert rig.controller.occupied == 30 and rig.controller.capacity == 32
        assert rig.ended(rig.controller.prefetch(other)).stop is Stop.RATE_LIMITED, "two pages of the share are left"
        rig.storage.release()
        rig.ended(first)
        rig.take()
        full = rig.on_host(hashes(62, "z"))
        assert rig.ended(rig.controller.prefetch(other)).stop is Stop.CAPACITY
        rig.host.table.release(full)
        small = Rig(replace(LIMITS, threshold_tokens=16, occupancy=0.05), storage=rig.storage)
        assert small.ended(small.controller.prefetch(other)).stop is Stop.CAPACITY, "the whole share is too small"
        rig.nothing_is_left()
        small.close()
        rig.close()

    def test_a_pool_that_is_no_larger_than_the_device_still_prefetches(self) -> None:
        """The seed's 0.8 x (host - device) is 0 there."""
        rig = Rig(pages=1)
        names = rig.stored(hashes(1))
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
        assert rig.take() == names
        rig.close()

    def test_without_storage_it_declines(self) -> None:
        host = HostPool(SHAPE, 4)
        controller = CacheController(host, None, lambda page_hash, extra_key: page_hash)
        assert controller.prefetch(hashes(4)).stop is Stop.BACKEND_DOWN
        pages = host.table.take(1)
        assert not isinstance(pages, Short)
        host.table.commit(pages)
        with pytest.raises(FeatureDisabled):
            controller.write_storage(hashes(1), pages)
        assert host.table.counts()["read"] == 0
        assert controller.close(5)


class TestEndingEarly:
    def test_a_cancel_keeps_what_is_in_place_once_nothing_moves(self, rig: Rig) -> None:
        names = rig.stored(hashes(32))
        gate = threading.Event()
        read, begun = rig.storage.read, threading.Semaphore(0)

        def slow(keys: Any, pages: Any, timeout: float) -> Any:
            begun.release()
            if keys[0] != f"key-{names[0]}":
                gate.wait(20)
            return read(keys, pages, timeout)

        rig.storage.read = slow  # type: ignore[method-assign]
        operation = rig.controller.prefetch(names)
        for _ in range(3):
            assert begun.acquire(timeout=20)
        rig.controller.terminate(operation)
        assert operation.state is OperationState.ENDING and not operation.ended
        gate.set()
        rig.ended(operation)
        assert (operation.state, operation.stop) == (OperationState.CANCELLED, Stop.CANCELLED)
        assert 4 <= operation.completed <= 16
        assert rig.take() == names[: operation.completed]
        rig.nothing_is_left()

    def test_a_cancel_before_the_first_read_reads_nothing(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        rig.storage.fault = lambda call, key: Fault(delay=0.1) if call == "count" else None
        rig.storage.calls.clear()
        operation = rig.controller.prefetch(names)
        rig.controller.terminate(operation)
        assert rig.ended(operation).state is OperationState.CANCELLED
        assert not [call for call, _ in rig.storage.calls if call == "read"]
        rig.nothing_is_left()

    def test_time_that_is_over_ends_it_with_what_it_has(self, rig: Rig) -> None:
        names = rig.stored(hashes(60))
        over = threading.Event()
        first = {f"key-{name}" for name in names[:4]}
        # All but the first batch is slower than the operation's time.
        rig.storage.fault = lambda call, key: Fault() if call == "read" and key not in first and over.wait(20) else None
        operation = rig.controller.prefetch(names, timeout=2.0)
        wait_until(lambda: operation.completed == 4)
        wait_until(lambda: operation.cut)
        over.set()
        rig.ended(operation)
        assert (operation.state, operation.stop) == (OperationState.EXPIRED, Stop.DEADLINE)
        assert 4 <= operation.completed < 60
        assert rig.take() == names[: operation.completed]
        rig.nothing_is_left()

    def test_a_read_that_has_no_more_time_than_its_operation_lost_no_page(self, rig: Rig) -> None:
        names = rig.stored(hashes(4))
        rig.fault("read", {names[2]: HANG})
        operation = rig.controller.prefetch(names, timeout=0.25)  # less than a call of storage may take
        wait_until(lambda: operation.finishing or operation.ended)
        rig.storage.release()
        assert rig.ended(operation).state in (OperationState.EXPIRED, OperationState.DECLINED)
        assert operation.stop is Stop.DEADLINE
        rig.take()
        rig.nothing_is_left()

    def test_a_scheduler_waits_as_its_policy_says(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        rig.storage.fault = lambda call, key: Fault(delay=0.05) if call == "read" else None
        waited = rig.controller.prefetch(names)
        wait_until(lambda: rig.controller.poll(waited, StopPolicy.WAIT_COMPLETE))
        assert waited.completed == 8
        best = rig.controller.prefetch(names)
        assert rig.controller.poll(best, StopPolicy.BEST_EFFORT) is None
        assert rig.ended(best).state is OperationState.CANCELLED
        rig.take()

    def test_the_time_of_the_policy_follows_the_engines_formula(self) -> None:
        rig = Rig(replace(LIMITS, timeout_base=0.05, timeout_per_ki_tokens=0.5))
        assert rig.controller.time_allowed(512) == pytest.approx(0.05 + 512 * 4 / 1024 * 0.5)
        names = rig.stored(hashes(40))
        rig.storage.fault = lambda call, key: Fault(delay=0.1) if call == "read" else None
        operation = rig.controller.prefetch(names)
        began = time.monotonic()
        wait_until(lambda: rig.controller.poll(operation, StopPolicy.TIMEOUT))
        assert operation.state is OperationState.EXPIRED
        assert time.monotonic() - began >= rig.controller.time_allowed(40)
        rig.take()
        rig.close()


class TestRequests:
    def test_a_repeat_is_the_same_operation_and_other_pages_are_refused(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        first = rig.controller.prefetch(names, request_id="r")
        assert rig.controller.prefetch(names, request_id="r") is first
        rig.ended(first)
        assert rig.controller.prefetch(names, request_id="r") is first
        with pytest.raises(RequestIdReused) as refused:
            rig.controller.prefetch(names[:4], request_id="r")
        assert refused.value.metadata == {"requestId": "r", "operationId": first.operation_id}
        assert rig.take() == names

    def test_operations_are_bounded_and_those_that_ended_are_forgotten_in_order(self) -> None:
        rig = Rig(replace(LIMITS, operations=2, remembered=3))
        rig.storage.fault = lambda call, key: Fault(delay=0.2) if call == "count" else None
        begun = [rig.controller.prefetch(hashes(4)) for _ in range(2)]
        with pytest.raises(TooManyRequests):
            rig.controller.prefetch(hashes(4))
        for operation in begun:
            rig.ended(operation)
        rig.storage.fault = lambda call, key: None
        for _ in range(3):
            rig.ended(rig.controller.prefetch(hashes(4)))
        with pytest.raises(OperationNotFound):
            rig.controller.book.get(begun[0].operation_id)
        rig.close()

    def test_tenants_of_one_priority_are_served_in_turn(self) -> None:
        rig = Rig(replace(LIMITS, readers=1), pages=256)
        order: list[str] = []
        names = {name: rig.stored(hashes(16, name)) for name in "abz"}
        rig.storage.fault = lambda call, key: order.append(key) if call == "read" else Fault(delay=0.05)
        begun = [rig.controller.prefetch(names["z"], tenant="z")]
        begun += [rig.controller.prefetch(names["a"], tenant="a"), rig.controller.prefetch(names["a"], tenant="a")]
        begun.append(rig.controller.prefetch(names["b"], tenant="b"))
        for operation in begun:
            assert rig.ended(operation).state is OperationState.DONE
        first_b = next(i for i, key in enumerate(order) if key.startswith("key-b"))
        last_a = max(i for i, key in enumerate(order) if key.startswith("key-a"))
        assert first_b < last_a, "b waited for everything of a"
        rig.take()
        rig.close()

    @pytest.mark.parametrize(
        ("field", "order"),
        [
            ("page_hashes", {"hashes": []}),
            ("priority", {"priority": 1001}),
            ("timeout", {"timeout": 0.0}),
            ("timeout", {"timeout": 3601.0}),
        ],
    )
    def test_what_cannot_be_right_is_named(self, rig: Rig, field: str, order: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest) as refused:
            rig.controller.prefetch(**{"hashes": hashes(4), **order})
        assert refused.value.metadata["field"] == field


class TestBackup:
    def test_a_batch_that_fails_ends_its_own_pages_only(self, rig: Rig) -> None:
        names = hashes(20)
        pages = rig.on_host(names)
        rig.fault("write", {names[5]: BROKEN, names[6]: FAILED})
        operation = rig.ended(rig.controller.write_storage(names, pages))
        assert (operation.state, operation.completed) == (OperationState.PARTIAL, 18)
        lost = {5, 6}
        expected = [PageOutcome.FAILED if i in lost else PageOutcome.OK for i in range(20)]
        assert operation.outcomes == expected and operation.retries == 1
        assert [rig.controller.count_in_storage([name], 1.0) for name in names] == [
            int(i not in lost) for i in range(20)
        ]
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_a_page_that_fails_once_is_written_at_the_next_try(self, rig: Rig) -> None:
        names = hashes(8)
        pages = rig.on_host(names)
        rig.once("write", names[3], FAILED)
        operation = rig.ended(rig.controller.write_storage(names, pages))
        assert (operation.state, operation.retries) == (OperationState.DONE, 1)
        rig.host.table.release(pages)

    def test_a_backend_that_raises_ends_that_backup_and_no_thread(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = hashes(6)
        pages = rig.on_host(names)

        def broken(*arguments: Any) -> Any:
            raise ZeroDivisionError("a bug of the backend")

        with monkeypatch.context() as patched:
            patched.setattr(rig.storage, "write", broken)
            for _ in range(3):
                operation = rig.ended(rig.controller.write_storage(names, pages))
                assert operation.state is OperationState.FAILED and "a bug of the backend" in str(operation.failure)
        assert rig.controller.healthy
        assert rig.ended(rig.controller.write_storage(names, pages)).state is OperationState.DONE
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_pages_are_not_freed_while_they_are_written(self, rig: Rig) -> None:
        names = hashes(4)
        pages = rig.on_host(names)
        rig.fault("write", {names[1]: HANG})
        operation = rig.controller.write_storage(names, pages)
        wait_until(lambda: operation.cut)
        assert len(rig.host.table.unread(pages)) == 0 and not operation.ended
        rig.storage.release()
        assert rig.ended(operation).outcomes[1] is PageOutcome.TIMEOUT
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_replicated_pages_are_spread_over_the_ranks_and_taken_over(self) -> None:
        names = hashes(600)
        before = {name: writer_of(name, range(4)) for name in names}
        counts = [list(before.values()).count(rank) for rank in range(4)]
        assert min(counts) > 100
        after = {name: writer_of(name, (0, 1, 3)) for name in names}
        assert all(after[name] == before[name] for name in names if before[name] != 2)
        assert len({after[name] for name in names if before[name] == 2}) == 3

    def test_pages_of_another_writer_are_skipped_once_storage_has_them(self) -> None:
        names = hashes(12)
        mine = [writer_of(name, range(2)) == 0 for name in names]
        one, two = self.pair()
        first = one.controller.write_storage(names, one.on_host(names))
        wait_until(lambda: first.others)
        assert not first.ended, "nobody has written them yet"
        second = two.ended(two.controller.write_storage(names, two.on_host(names)))
        assert one.ended(first).outcomes == [PageOutcome.OK if own else PageOutcome.SKIPPED for own in mine]
        assert second.outcomes == [PageOutcome.SKIPPED if own else PageOutcome.OK for own in mine]
        assert (first.state, first.completed, second.state) == (OperationState.DONE, 12, OperationState.DONE)
        assert one.controller.count_in_storage(names, 1.0) == 12
        one.close()
        two.close()

    def test_pages_of_a_writer_that_goes_before_it_wrote_are_written_by_those_that_live(self) -> None:
        names = hashes(12)
        live = {0, 1}
        rig = Rig(writes=lambda page_hash: writer_of(page_hash, live) == 0)
        operation = rig.controller.write_storage(names, rig.on_host(names))
        wait_until(lambda: operation.others)
        live.discard(1)
        assert rig.ended(operation).outcomes == [PageOutcome.OK] * 12
        rig.close()

    def test_pages_that_their_writer_never_writes_are_written_after_the_time_of_an_agreement(self) -> None:
        names = hashes(12)
        rig = Rig(replace(LIMITS, agreement_timeout=0.2), writes=lambda page_hash: writer_of(page_hash, range(2)) == 0)
        operation = rig.ended(rig.controller.write_storage(names, rig.on_host(names)))
        assert operation.outcomes == [PageOutcome.OK] * 12
        assert operation.ended_at - operation.began >= 0.2
        rig.close()

    @pytest.mark.parametrize("end", ["cancel", "deadline", "storage"])
    def test_who_waits_for_another_writer_ends_early_and_says_which_pages_are_not_there(self, end: str) -> None:
        names = hashes(12)
        limits = replace(LIMITS, agreement_timeout=0.2 if end == "storage" else 60.0)
        rig = Rig(limits, writes=lambda page_hash: page_hash != names[5])
        pages = rig.on_host(names)
        if end == "storage":
            rig.storage.fault = lambda call, key: DOWN if call == "count" else None
        operation = rig.controller.write_storage(names, pages, timeout=0.2 if end == "deadline" else 20.0)
        wait_until(lambda: operation.others or operation.ended)
        if end == "cancel":
            rig.controller.terminate(operation)
        assert rig.ended(operation).outcomes[5] is PageOutcome.PENDING
        expected = {"cancel": "CANCELLED", "deadline": "EXPIRED", "storage": "PARTIAL"}
        assert (operation.state.name, operation.completed) == (expected[end], 11)
        rig.host.table.release(pages)
        rig.nothing_is_left()
        rig.close()

    @staticmethod
    def pair() -> tuple[Rig, Rig]:
        """Two ranks with the same pages, over one storage."""
        store = memory_backend()
        rigs = [
            Rig(
                replace(LIMITS, agreement_timeout=60.0),
                writes=lambda page_hash, rank=rank: writer_of(page_hash, range(2)) == rank,  # type: ignore[misc]
                storage=FaultyBackend(store),
            )
            for rank in range(2)
        ]
        return rigs[0], rigs[1]


class TestClosing:
    def test_many_resets_leave_no_thread_page_or_operation(self) -> None:
        rig = Rig(replace(LIMITS, storage_timeout=5.0))
        names = rig.stored(hashes(16))
        threads = threading.active_count()
        for cycle in range(100):
            for _ in range(3):
                rig.controller.prefetch(names, request_id=f"r{cycle}")
            assert rig.controller.reset(20)
            rig.take()
            rig.nothing_is_left()
        assert threading.active_count() == threads
        assert not rig.controller.book.all()
        rig.close()

    def test_what_waits_at_a_reset_is_dropped_and_asks_storage_nothing(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        gate = threading.Event()
        rig.storage.fault = lambda call, key: Fault() if not gate.wait(20.0) else None
        rig.storage.calls.clear()
        first = rig.controller.prefetch(names)
        wait_until(lambda: rig.storage.calls)
        waiting = [rig.controller.prefetch(names) for _ in range(20)]
        resetting = threading.Thread(target=rig.controller.reset, args=(20,))
        resetting.start()
        wait_until(lambda: all(operation.cut for operation in (first, *waiting)))
        gate.set()
        resetting.join(20)
        assert [call for call, _ in rig.storage.calls] == ["count"], "the one that was under way"
        assert all(operation.ended and operation.stop is Stop.SHUT_DOWN for operation in (first, *waiting))
        rig.nothing_is_left()

    def test_what_the_backend_has_let_go_of_ends_when_the_threads_stop(self, rig: Rig) -> None:
        names, gate, busy = rig.stored(hashes(4)), threading.Event(), threading.Event()
        rig.fault("read", {names[2]: HANG})
        held = rig.controller.prefetch(names)
        wait_until(lambda: held.finishing)

        def wait(call: str, key: str) -> None:
            busy.set()
            assert gate.wait(20)

        rig.storage.fault = wait
        other = rig.controller.prefetch(names)
        prefetcher = rig.controller._prefetcher
        assert prefetcher is not None and busy.wait(20)
        wait_until(lambda: prefetcher.waiting)
        rig.storage.release()
        assert not prefetcher.stop(0.1), "storage has the thread"
        assert rig.ended(held).state is OperationState.CANCELLED
        gate.set()
        rig.ended(other)
        rig.nothing_is_left()

    @pytest.mark.parametrize("kind", ["prefetch", "backup"])
    def test_what_is_begun_while_it_closes_ends_and_leaves_nothing(self, kind: str) -> None:
        """Begun between the end of all operations and that of the threads: as whoever was just past the check."""
        rig = Rig()
        names = rig.stored(hashes(4))
        call = "count" if kind == "prefetch" else "write"
        busy, may_end = threading.Event(), threading.Event()

        def slow(which: str, key: str) -> None:
            if which == call:
                busy.set()
                assert may_end.wait(20)

        begun: list[Operation] = []
        forget = rig.controller.book.forget_ended

        def meanwhile() -> None:
            forget()
            rig.controller._closed = False
            for number in range(2):
                if kind == "prefetch":
                    begun.append(rig.controller.prefetch(names))
                else:
                    begun.append(rig.controller.write_storage(pages := hashes(4, f"{number}"), rig.on_host(pages)))
                assert busy.wait(20)
            rig.controller._closed = True
            threading.Timer(0.1, may_end.set).start()

        rig.storage.fault = slow
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rig.controller.book, "forget_ended", meanwhile)
            assert rig.controller.close(20)
        assert [operation.wait(20) for operation in begun] == [True, True]
        assert (begun[1].state, begun[1].stop) == (OperationState.CANCELLED, Stop.SHUT_DOWN)
        counts = rig.host.table.counts()
        assert (counts["reserved"], counts["read"], rig.controller.occupied) == (0, 0, 0)

    def test_ids_of_operations_are_of_no_counter(self) -> None:
        names = hashes(4)
        rigs = [Rig(), Rig()]
        ids = [[rig.controller.prefetch(names).operation_id for _ in range(20)] for rig in rigs]
        assert len({*ids[0], *ids[1]}) == 40
        for rig in rigs:
            rig.close()

    def test_operations_are_counted_by_how_they_ended(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))

        def counted(*labels: str) -> float:
            return float(metrics.CACHE_OPERATIONS.labels(*labels)._value.get())

        ends = [("PREFETCH", "DONE", "NONE"), ("PREFETCH", "DECLINED", "BELOW_THRESHOLD")]
        before = [counted(*labels) for labels in ends]
        rig.ended(rig.controller.prefetch(names))
        rig.ended(rig.controller.prefetch(hashes(8, "q")))
        assert [counted(*labels) for labels in ends] == [each + 1 for each in before]
        rig.take()

    def test_what_ended_is_not_kept_until_its_deadline(self, rig: Rig) -> None:
        rig.stored(hashes(8))
        operations = [rig.ended(rig.controller.prefetch(hashes(8), timeout=3600.0)) for _ in range(100)]
        kept = [weakref.ref(operation) for operation in operations]
        assert rig.controller.reset()
        operations.clear()
        gc.collect()
        # Each thread still has what it did last.
        assert sum(each() is not None for each in kept) <= 8

    def test_what_was_forgotten_stays_so_when_its_last_change_is_told(self, rig: Rig) -> None:
        operation = rig.ended(rig.controller.prefetch(hashes(8)))
        assert rig.controller.reset()
        rig.controller.book.changed(operation)
        assert rig.controller.book.changed_since(0) == []

    @pytest.mark.slow
    def test_a_thousand_openings_leave_nothing(self) -> None:
        backend = FaultyBackend(memory_backend())
        threads = threading.active_count()
        for cycle in range(1000):
            rig = Rig(storage=backend)
            if cycle == 0:
                rig.stored(hashes(8))
            operation = rig.controller.prefetch(hashes(8))
            if cycle % 2:
                rig.ended(operation)
            assert rig.controller.close(20)
            rig.take()
            rig.nothing_is_left()
            assert rig.host.close()
        assert threading.active_count() == threads

    def test_a_close_during_a_hang_is_bounded_and_says_that_something_is_left(self, rig: Rig) -> None:
        names = rig.stored(hashes(4))
        rig.fault("read", {names[0]: HANG})
        rig.controller.prefetch(names)
        wait_until(lambda: any(call == "read" for call, _ in rig.storage.calls))
        began = time.monotonic()
        assert not rig.controller.close(1.0)
        assert time.monotonic() - began < 10
        assert not rig.host.close(), "the backend may still write there"
        with pytest.raises(FeatureDisabled):
            rig.controller.prefetch(names)
