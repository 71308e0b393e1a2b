"""What is asked of the controller: what a repeat is, how many operations there may be, who is served first, and when a
prefetch is declined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.errors import FeatureDisabled, InvalidRequest, OperationNotFound, RequestIdReused, TooManyRequests
from kvgrpc.prefetch.model import NotEnoughPages, OperationState, Stop
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.protocol.order import MAX_PAGES
from kvgrpc.prefetch.runtime.controller import CacheController
from tests.support.controller_rig import LIMITS, SHAPE, Rig, hashes, rig
from tests.support.faults.storage import HANG, Fault, FaultyBackend, memory_backend
from tests.support.waiting import wait_until

__all__ = ["rig"]


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
        names = {name: rig.stored(hashes(16, name)) for name in "abcz"}
        rig.storage.fault = lambda call, key: order.append(key) if call == "read" else Fault(delay=0.05)
        begun = [rig.controller.prefetch(names["z"], tenant="z")]
        begun += [rig.controller.prefetch(names["a"], tenant="a"), rig.controller.prefetch(names["c"], tenant="a")]
        begun.append(rig.controller.prefetch(names["b"], tenant="b"))
        for operation in begun:
            assert rig.ended(operation).state is OperationState.DONE
        first_b = next(i for i, key in enumerate(order) if key.startswith("key-b"))
        last_a = max(i for i, key in enumerate(order) if key.startswith(("key-a", "key-c")))
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
        assert not isinstance(pages, NotEnoughPages)
        host.table.commit(pages)
        with pytest.raises(FeatureDisabled):
            controller.write_storage(hashes(1), pages)
        assert host.table.counts()["read"] == 0
        assert controller.close(5)


class DearBatches(FaultyBackend):
    """Wants megabytes in each."""

    batch_bytes = 16 << 20


def test_however_small_a_page_is_a_batch_has_no_more_pages_than_an_operation() -> None:
    host = HostPool(PageShape.mha(1, 1, 1, 1, "uint8"), 4)
    controller = CacheController(host, DearBatches(memory_backend()), lambda page_hash, extra_key: page_hash)
    operation = controller.prefetch(hashes(2))
    assert operation.limits.batch_pages == MAX_PAGES
    assert controller.close() and host.close()
