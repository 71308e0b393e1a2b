"""Threads that work through batches: deadlines hold, whatever a call does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvgrpc.prefetch.storage import paged
from kvgrpc.prefetch.storage.paged import Unfinished, Workers

LONG = 30.0


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 2)
    yield workers
    assert workers.close(LONG)


def test_results_come_in_order(workers: Workers) -> None:
    assert workers.run(lambda number: number * number, 100, LONG) == [number * number for number in range(100)]


def test_what_raises_is_its_own_failure_only(workers: Workers) -> None:
    results = workers.run(lambda number: 1 // (number - 1), 3, LONG)
    assert results[0] == -1 and results[2] == 1
    assert isinstance(results[1], Unfinished) and isinstance(results[1].error, ZeroDivisionError)


def test_a_thread_outlives_what_is_no_exception(workers: Workers) -> None:
    """Such as a panic of a store's client that is written in Rust, or a cancelled task."""

    class Panic(BaseException):
        pass

    def panic(number: int) -> None:
        raise Panic(number)

    for _ in range(3):
        results = workers.run(panic, 2, LONG)
        assert all(isinstance(each, Unfinished) and isinstance(each.error, Panic) for each in results)
    assert workers.run(lambda number: number, 3, LONG) == [0, 1, 2]


def test_what_hangs_is_left_and_says_when_it_ends(workers: Workers) -> None:
    gate, began = threading.Event(), []

    def hang(number: int) -> None:
        began.append(number)
        gate.wait(LONG)

    results = workers.run(hang, 5, 0.05)
    assert len(began) == 2 == sum(result.released is not None for result in results if isinstance(result, Unfinished))
    assert all(isinstance(result, Unfinished) for result in results)
    assert not any(result.released.is_set() for result in results if isinstance(result, Unfinished) and result.released)
    gate.set()
    for result in results:
        assert isinstance(result, Unfinished) and (result.released is None or result.released.wait(LONG))
    assert workers.run(lambda number: number, 2, LONG) == [0, 1], "nothing of the old batch is begun any more"
    assert len(began) == 2


def test_workers_that_all_hang_in_what_nobody_waits_for_say_so(workers: Workers) -> None:
    gates = [threading.Event(), threading.Event()]
    results = workers.run(lambda number: gates[number].wait(LONG), 2, 0.05)
    assert workers.hung
    gates[0].set()
    first = results[0]
    assert isinstance(first, Unfinished) and first.released is not None and first.released.wait(LONG)
    assert not workers.hung, "one thread is there again"
    gates[1].set()


def test_a_thread_that_works_in_time_is_not_taken_for_hung(workers: Workers) -> None:
    going, gate = threading.Semaphore(0), threading.Event()

    def work(number: int) -> None:
        going.release()
        gate.wait(LONG)

    batch = threading.Thread(target=workers.run, args=(work, 2, LONG))
    batch.start()
    assert going.acquire(timeout=LONG) and going.acquire(timeout=LONG)
    assert not workers.hung
    gate.set()
    batch.join()


def test_items_that_take_no_time_are_one_threads(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands. Threads that hand such items to each other take several times as long as one alone."""
    monkeypatch.setattr(paged, "time", SimpleNamespace(monotonic=lambda: 0.0))
    found = set(workers.run(lambda number: threading.get_ident(), 2000, LONG))
    assert len(found) == 1


def test_items_that_take_long_are_all_threads(workers: Workers) -> None:
    both = threading.Barrier(2)
    assert len(set(workers.run(lambda number: both.wait(LONG), 2, LONG))) == 2


def test_a_long_batch_does_not_hold_up_a_short_one(workers: Workers) -> None:
    going, gate = threading.Event(), threading.Event()

    def slow(number: int) -> None:
        going.set()
        gate.wait(LONG if number == 0 else 0.001)

    long = threading.Thread(target=workers.run, args=(slow, 2000, LONG))
    long.start()
    going.wait(LONG)
    assert workers.run(lambda number: number, 3, LONG) == [0, 1, 2]
    assert long.is_alive()
    gate.set()
    long.join()


def test_closed_workers_begin_nothing(workers: Workers) -> None:
    workers.close(LONG)
    assert workers.run(lambda number: number, 2, LONG) == [Unfinished(), Unfinished()]


def test_close_says_that_something_still_hangs() -> None:
    gate = threading.Event()
    workers = Workers("test", 1)
    workers.run(lambda number: gate.wait(LONG), 1, 0.01)
    assert not workers.close(0.01)
    gate.set()
    assert workers.close(LONG)
