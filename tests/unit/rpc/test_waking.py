"""Whoever wakes the loop keeps the interpreter, and whoever could spare it sees that the loop's thread wants it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.waking import Waker
from tests.support.waiting import wait_until


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    yield thread
    thread.close()


def test_a_burst_of_wakes_runs_the_callback_on_the_loop(loop: LoopThread) -> None:
    ran: list[str] = []
    waker = Waker(loop.loop, lambda: ran.append(threading.current_thread().name))
    for _ in range(100):
        waker.wake()
    wait_until(lambda: bool(ran))
    assert set(ran) == {"test-loop"} and len(ran) <= 100
    before = len(ran)
    waker.wake()
    wait_until(lambda: len(ran) > before)


def test_what_waited_when_a_waker_closed_still_runs_once(loop: LoopThread) -> None:
    ran: list[int] = []
    waker = Waker(loop.loop, lambda: ran.append(1))

    async def close() -> None:
        waker.wake()
        waker.close()

    loop.run(close(), 5)
    wait_until(lambda: bool(ran))


def test_a_late_wake_writes_to_no_other_file(loop: LoopThread) -> None:
    waker = Waker(loop.loop, lambda: None)

    async def close() -> None:
        waker.close()

    loop.run(close(), 5)
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        waker.wake()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)


def test_a_waker_without_an_owner_leaves_no_descriptor(loop: LoopThread) -> None:
    waker = Waker(loop.loop, lambda: None)
    fd = waker._fd

    async def close(waker: Waker) -> None:
        waker.close()

    loop.run(close(waker), 5)
    loop.run(_nothing(), 5)
    del waker
    gc.collect()
    wait_until(lambda: not _open(fd))


def test_a_wake_of_a_closed_loop_says_so() -> None:
    thread = LoopThread("test-loop")
    waker = Waker(thread.loop, lambda: None)
    thread.close()
    with pytest.raises(RuntimeError):
        waker.wake()


def test_a_sleeping_loop_has_nothing_to_do_and_one_that_was_woken_has(loop: LoopThread) -> None:
    wait_until(lambda: not loop.work_waits)
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert leave.wait(10)

    loop.loop.call_soon_threadsafe(work)
    assert entered.wait(10)
    assert loop.work_waits, "its thread is in the middle of a turn"
    leave.set()
    wait_until(lambda: not loop.work_waits)


def test_what_the_loop_did_not_see_yet_counts(loop: LoopThread) -> None:
    """This thread keeps the interpreter from the wake to the question: the loop's thread cannot have run."""
    waker = Waker(loop.loop, lambda: None)
    loop.run(_nothing(), 5)
    seen = 0
    for _ in range(50):
        wait_until(lambda: not loop.work_waits)
        waker.wake()
        seen += loop.work_waits
    assert seen > 0


def test_the_loop_itself_never_gives_way_to_itself(loop: LoopThread) -> None:
    async def ask() -> bool:
        return loop.work_waits

    assert loop.run(ask(), 5) is False


async def _nothing() -> None: ...


def _open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


_AN_ENGINES_END = """
import atexit, threading
from kvgrpc.rpc.loop import LoopThread

ran = threading.Event()

def end():
    waker.wake()
    print(ran.wait(timeout=10))

atexit.register(end)
from kvgrpc.rpc.waking import Waker
waker = Waker(LoopThread.shared().loop, ran.set)
"""


def test_a_handler_of_the_engines_own_at_the_end_of_the_process_is_heard() -> None:
    """The descriptor was closed before handlers that were registered first: a wake was lost, or met another file."""
    ended = subprocess.run([sys.executable, "-c", _AN_ENGINES_END], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("True\n", 0), ended.stderr
