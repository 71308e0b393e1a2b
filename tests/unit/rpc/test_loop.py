"""The loop thread: one per process, runs coroutines for other threads, notices tasks that fail."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from kvgrpc.observability import metrics
from kvgrpc.rpc.loop import LoopThread, background
from tests.support.waiting import wait_until


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    yield thread
    thread.close()


def counted_failures(task: str) -> float:
    return metrics.REGISTRY.get_sample_value("kvgrpc_task_failures_total", {"task": task}) or 0.0


async def value() -> int:
    await asyncio.sleep(0)
    return 7


def test_there_is_one_loop_per_process() -> None:
    assert LoopThread.shared() is LoopThread.shared()
    assert LoopThread.shared().run(value(), 5) == 7


def test_the_thread_is_a_named_daemon(loop_thread: LoopThread) -> None:
    thread = next(thread for thread in threading.enumerate() if thread.name == "test-loop")
    assert thread.daemon


def test_run_returns_the_result_or_raises_the_error(loop_thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("no")

    assert loop_thread.run(value(), 5) == 7
    with pytest.raises(ValueError, match="no"):
        loop_thread.run(fail(), 5)
    assert loop_thread.healthy, "an error that the caller got is not a failed background task"


def test_run_past_its_time_raises_and_cancels(loop_thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)  # for ever
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        loop_thread.run(forever(), 0.05)
    assert cancelled.wait(5)


def test_run_on_the_loop_itself_is_refused(loop_thread: LoopThread) -> None:
    async def inside() -> None:
        loop_thread.run(value(), 1)

    with pytest.raises(RuntimeError, match="await the coroutine"):
        loop_thread.run(inside(), 5)


def test_a_spawned_task_can_be_awaited_and_cancelled(loop_thread: LoopThread) -> None:
    assert loop_thread.spawn(value(), "short").result(5) == 7
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)  # for ever
        finally:
            ended.set()

    future = loop_thread.spawn(forever(), "long")
    loop_thread.run(asyncio.sleep(0.01), 5)  # a turn of the loop, for the cancellation
    assert future.cancel()
    assert ended.wait(5)
    assert loop_thread.healthy


def test_a_task_that_fails_is_logged_once_and_makes_the_process_unhealthy(
    loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError("cause")

    before = counted_failures("publisher")
    future = loop_thread.spawn(fail(), "publisher of dp 0")
    with pytest.raises(KeyError):
        future.result(5)
    assert not loop_thread.healthy
    assert loop_thread.failures == ("publisher of dp 0",)
    assert counted_failures("publisher") == before + 1
    records = [record for record in caplog.records if "publisher of dp 0" in record.getMessage()]
    assert len(records) == 1
    assert records[0].exc_info and isinstance(records[0].exc_info[1], KeyError)


def test_a_loop_that_is_stuck_shows_its_lag(loop_thread: LoopThread) -> None:
    loop_thread.loop.call_soon_threadsafe(time.sleep, 0.6)
    wait_until(lambda: loop_thread.lag > 0.2)
    loop_thread.run(asyncio.sleep(0), 5)
    wait_until(lambda: loop_thread.lag < 0.2)
    assert loop_thread.healthy


def test_a_late_turn_is_over_when_the_loop_turns_again(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that was stopped, and goes on."""
    monkeypatch.setattr("kvgrpc.rpc.loop.STUCK_AFTER", 0.3)

    async def late() -> tuple[float, bool]:
        asyncio.get_running_loop().call_soon(time.sleep, 1.0)
        await asyncio.sleep(0.05)  # the late turn itself
        await asyncio.sleep(0.02)  # the turn in which the loop measures, too
        return loop_thread.lag, loop_thread.healthy

    late_turn = loop_thread.spawn(late(), "late")
    wait_until(lambda: "has not turned for" in loop_thread.trouble)
    lag, healthy = late_turn.result(10)
    assert lag > 0.3 and healthy


def test_after_close_calls_are_refused_and_tasks_were_cancelled() -> None:
    thread = LoopThread("closing-loop")
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)  # for ever
        finally:
            ended.set()

    thread.spawn(forever(), "long")
    thread.run(asyncio.sleep(0), 5)
    thread.close()
    assert ended.is_set()
    with pytest.raises(RuntimeError):
        thread.run(value(), 1)
    assert not thread.healthy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_refused_with_the_remedy() -> None:
    LoopThread.shared()
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_use_after_fork, args=(sending,))
    process.start()
    assert receiving.poll(10)
    assert "spawn" in receiving.recv()
    process.join(10)


def _use_after_fork(sending: Connection) -> None:
    try:
        LoopThread.shared()
        answer = "no error"
    except RuntimeError as error:
        answer = str(error)
    sending.send(answer)


def test_the_poller_record_of_grpc_is_hidden_and_others_are_not(
    loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("asyncio")
    try:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    except BlockingIOError:
        logger.error("Exception in callback PollerCompletionQueue._handle_events(<loop>)()", exc_info=True)
        logger.error("Exception in callback something_else()", exc_info=True)
    assert [record.getMessage() for record in caplog.records] == ["Exception in callback something_else()"]


def test_a_task_that_fails_is_noticed_also_where_nobody_awaits_it(
    loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async def begin() -> None:
        loop_thread.task(fail(), "transfer-ticks of nobody")

    loop_thread.run(begin(), 5)
    wait_until(lambda: not loop_thread.healthy)
    assert loop_thread.failures == ("transfer-ticks of nobody",)


def test_on_a_loop_of_the_callers_own_a_task_that_fails_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async def begin() -> None:
        await asyncio.wait([background(fail(), "follower of prefill")])
        # The supervisor is told of an end in a turn of the loop after it.
        await asyncio.sleep(0)

    before = counted_failures("follower")
    asyncio.run(begin())
    assert counted_failures("follower") == before + 1
    assert [record.getMessage() for record in caplog.records] == ["background task follower of prefill failed"]
