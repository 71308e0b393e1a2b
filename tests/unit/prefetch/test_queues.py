"""Who is served next, and what becomes of work that fails."""

from __future__ import annotations

import threading
import time

import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.prefetch.threads.queue_threads import FairQueue, QueueThreads
from kvgrpc.prefetch.threads.timers import AWAKE_SECONDS, Alarms
from tests.support.waiting import wait_until


def test_the_urgent_come_first_and_tenants_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for item, priority, tenant in [("a1", 0, "a"), ("a2", 0, "a"), ("a3", 0, "a"), ("b1", 0, "b"), ("now", -1, "c")]:
        queue.put(item, priority, tenant)
    assert [queue.pop() for _ in range(len(queue))] == ["now", "a1", "b1", "a2", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_who_names_no_priority_waits_at_0_and_an_emptied_queue_is_as_a_new_one() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("later", 1)
    queue.put("now")
    assert queue.clear() == ["now", "later"] and not len(queue)
    with pytest.raises(IndexError):
        queue.pop()
    queue.put("next")
    assert [queue.pop() for _ in range(len(queue))] == ["next"]


def test_a_worker_outlives_whatever_its_items_do() -> None:
    done: list[int] = []
    failed: list[tuple[list[int], Exception]] = []
    every = threading.Event()

    def handle(items: list[int]) -> None:
        if items[0] < 3:
            raise OSError("broken")
        done.extend(items)
        every.set()

    worker = QueueThreads("test", handle, lambda items, error: failed.append((items, error)))
    for number in range(4):
        worker.put(number)
    assert every.wait(20)
    assert done == [3] and [items for items, _ in failed] == [[0], [1], [2]]
    assert worker.healthy and worker.stop(5.0)


def test_a_worker_outlives_what_is_no_exception() -> None:
    """Such as a panic of a store's client that is written in Rust."""

    class Panic(BaseException):
        pass

    def handle(items: list[int]) -> None:
        raise Panic("index out of bounds")

    failed: list[str] = []
    both = threading.Event()

    def note(items: list[int], error: Exception) -> None:
        failed.append(f"{items[0]} {error}")
        if len(failed) == 2:
            both.set()

    worker = QueueThreads("test", handle, note)
    for number in range(2):
        worker.put(number)
    assert both.wait(20) and failed == ["0 Panic: index out of bounds", "1 Panic: index out of bounds"]
    assert worker.healthy and worker.stop(5.0)


def test_a_full_or_closed_worker_says_so() -> None:
    holding, begun = threading.Event(), threading.Event()

    def handle(items: list[int]) -> None:
        begun.set()
        holding.wait(20)

    worker: QueueThreads[int] = QueueThreads("test", handle, lambda items, error: None, limit=2)
    worker.put(0)
    assert begun.wait(20)
    worker.put(1)
    worker.put(2)
    with pytest.raises(TooManyRequests) as refused:
        worker.put(3)
    assert refused.value.retry_after
    assert worker.clear() == [1, 2]
    holding.set()
    assert worker.stop(5.0)
    with pytest.raises(TooManyRequests):
        worker.put(4)


def test_an_idle_worker_ends_at_once() -> None:
    """No poll stands between a stop and the end of a thread."""
    for _ in range(50):
        assert QueueThreads("test", lambda items: None, lambda items, error: None, threads=2).stop(5.0)


def test_alarms_come_in_order_and_one_that_fails_stops_none() -> None:
    heard: list[int] = []
    every = threading.Event()
    alarms = Alarms("test")

    def broken() -> None:
        raise OSError("broken")

    alarms.after(0.04, every.set)
    alarms.after(0.02, lambda: heard.append(2))
    alarms.after(0.015, broken)
    alarms.after(0.01, lambda: heard.append(1))
    assert every.wait(20) and heard == [1, 2]
    assert alarms.healthy and alarms.stop(5.0)


def test_an_alarm_that_is_dropped_is_not_called_and_takes_no_room() -> None:
    heard: list[int] = []
    alarms = Alarms("test")
    for _ in range(1000):
        alarms.after(3600.0, lambda: heard.append(1))()
    assert len(alarms._heap) <= 100
    every = threading.Event()
    drop = alarms.after(0.01, lambda: heard.append(2))
    drop()
    drop()
    alarms.after(0.02, every.set)
    assert every.wait(20) and heard == []
    assert alarms.stop(5.0)


def test_an_alarm_that_comes_too_late_gives_others_a_moment_first() -> None:
    """This process stood still; what others said meanwhile lies in its sockets."""
    alarms, called, standing = Alarms("test"), list[str](), threading.Event()

    def stand_still() -> None:
        standing.set()
        time.sleep(AWAKE_SECONDS + 0.5)  # as all of the process would

    try:
        alarms.after(0.0, stand_still)
        assert standing.wait(10.0)
        alarms.after(0.05, lambda: called.append("absent"), awake=True)
        alarms.after(0.1, lambda: called.append("plain"))
        wait_until(lambda: called)
        assert called == ["plain"]
        wait_until(lambda: called == ["plain", "absent"])
    finally:
        assert alarms.stop(10.0)


def test_an_alarm_in_its_time_comes_then() -> None:
    alarms, called = Alarms("test"), threading.Event()
    began = time.monotonic()
    try:
        alarms.after(0.05, called.set, awake=True)
        assert called.wait(10.0) and time.monotonic() - began < 0.05 + AWAKE_SECONDS
    finally:
        assert alarms.stop(10.0)
