"""Orders that wait for an engine: it comes to them on the thread that computes, so they cost it little."""

from __future__ import annotations

import time
import weakref

import pytest

from kvgrpc.prefetch.model import OperationKind, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order

LIMITS = PrefetchLimits(threshold_tokens=1, remembered=4)


class Counted(EngineOrders):
    """Counts how many operations are looked at."""

    def __init__(self) -> None:
        super().__init__(LIMITS, 16, lambda: None)
        self.looks = 0

    def stop_of(self, operation: Operation) -> Stop:
        self.looks += 1
        return super().stop_of(operation)


def order(**more: float) -> Order:
    return Order(kind=OperationKind.PREFETCH, hashes=("aa" * 32,), **more)  # type: ignore[arg-type]


def test_those_that_are_cut_before_an_engine_takes_them_are_kept_nowhere() -> None:
    """An engine may take none for long: its own steps take seconds, or it brings as many as it may."""
    orders = EngineOrders(LIMITS, 16, lambda: None)
    waits = orders.start(order())
    began = []
    for _ in range(1000):
        operation = orders.start(order())
        began.append(weakref.ref(operation))
        orders.terminate(operation)
        assert operation.state is OperationState.CANCELLED
    del operation
    assert sum(each() is not None for each in began) < 100
    assert orders.waiting == 1 and orders.take() is waits and orders.take() is None


def test_taking_some_of_many_looks_at_those_alone() -> None:
    orders = Counted()
    for _ in range(1000):
        orders.start(order())
    assert all(orders.take() is not None for _ in range(256))
    for _ in range(50):  # a thread of vLLM comes each millisecond
        orders.expire()
    assert orders.looks <= 2 * 256


def test_what_is_too_late_ends_though_more_urgent_ones_are_taken() -> None:
    orders = EngineOrders(LIMITS, 16, lambda: None)
    late = orders.start(order(timeout=0.001, priority=1))
    urgent = orders.start(order(priority=9))
    while time.monotonic() <= late.deadline:
        time.sleep(0.001)  # until it is too late
    assert orders.take() is urgent
    assert late.state is OperationState.EXPIRED


def test_what_is_too_late_is_not_taken_and_ends_though_nobody_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = EngineOrders(LIMITS, 16, lambda: None)
    late, later, waits = orders.start(order(timeout=5.0)), orders.start(order(timeout=6.0)), orders.start(order())
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.5)
    orders.expire()
    assert (late.state, late.stop) == (OperationState.EXPIRED, Stop.DEADLINE) and late.wait(0.0)
    assert not later.ended
    monkeypatch.setattr(time, "monotonic", lambda: now + 6.5)
    assert orders.take() is waits and later.state is OperationState.EXPIRED


def test_what_an_engine_took_is_the_engines_to_end() -> None:
    orders = EngineOrders(LIMITS, 16, lambda: None)
    operation = orders.start(order())
    assert orders.take() is operation
    orders.terminate(operation)
    assert not operation.ended and orders.stop_of(operation) is Stop.CANCELLED
    orders.shut_down()
    assert operation.state is OperationState.CANCELLED
