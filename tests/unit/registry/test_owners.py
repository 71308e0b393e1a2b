"""Rows and engines of one caller: whoever registers leaves as many to others, and gets its places back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.registry.store.memory import MemoryRegistry
from kvgrpc.rpc.callers import CALLER, Caller
from tests.support.callers import calls_of
from tests.support.registry_builders import TTL, HandClock, registry, row


@pytest.fixture(autouse=True)
def greedy() -> Iterator[None]:
    with calls_of("greedy"):
        yield


def fill(known: MemoryRegistry) -> int:
    """Engines of one row each that the caller gets."""
    count = 0
    while True:
        try:
            known.register([row(engine=f"{CALLER.get().name}-{count}")])
        except TooManyRequests as refused:
            assert refused.retry_after and refused.metadata["scope"].endswith("of one caller")
            return count
        count += 1


def held(known: MemoryRegistry) -> tuple[int, int]:
    """Rows and engines that somebody has."""
    return known._owners._rows.count, known._owners._engines.count


def test_one_caller_leaves_rows_and_engines_to_others() -> None:
    clock = HandClock()
    for known in (registry(clock, max_rows=64), registry(clock, max_engines=64)):
        CALLER.set(Caller("greedy"))
        assert fill(known) == 32
        CALLER.set(Caller("honest"))
        assert fill(known) == 16


def test_what_ran_out_or_was_taken_back_is_nobodys() -> None:
    clock = HandClock()
    known = registry(clock, max_rows=64)
    assert fill(known) == 32
    clock.now += TTL + 1
    known.expire()
    assert held(known) == (0, 0)
    (lease,) = known.register([row()])
    known.deregister([lease.ref])
    assert held(known) == (0, 0)
    assert not known._owners._of_rows and not known._owners._of_engines


def test_a_caller_with_its_whole_share_may_come_back_as_another_incarnation() -> None:
    known = registry(HandClock(), max_rows=64)
    count = fill(known)
    again = [row(engine=f"greedy-{number}", epoch=2) for number in range(count)]
    assert len(known.register(again)) == count
    assert known.register(again), "a renewal takes no place"
    assert held(known) == (count, count)
    with pytest.raises(TooManyRequests):
        known.register([row(engine="one-more"), *again])
    assert held(known) == (count, count)
