"""What takes long runs on threads: bounded for all, for each caller, and no caller has all threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.rpc.callers import CALLER, Caller


async def run_as(name: str, calls: BlockingCalls, call: Callable[[], Any]) -> Any:
    CALLER.set(Caller(name))
    return await calls.run(call)


def begin(name: str, calls: BlockingCalls, call: Callable[[], Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(run_as(name, calls, call))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def ended(calls: BlockingCalls) -> None:
    """Once none runs any more."""
    end = time.monotonic() + 20
    while calls._places.count or calls._free.count:  # threads end them
        assert time.monotonic() < end, "a call still runs"
        await asyncio.sleep(0.001)


async def test_a_caller_with_calls_that_hang_leaves_threads_and_places_to_the_others() -> None:
    calls, release = BlockingCalls("test", "calls", threads=4, most=8), threading.Event()
    hanging = [begin("greedy", calls, lambda: release.wait(20)) for _ in range(4)]
    await settle()
    with pytest.raises(TooManyRequests) as refused:
        await run_as("greedy", calls, lambda: None)
    assert refused.value.metadata == {"limit": "4", "value": "5", "scope": "calls of one caller"}
    assert await asyncio.wait_for(run_as("other", calls, lambda: 7), 10) == 7
    release.set()
    assert all(await asyncio.gather(*hanging))
    await ended(calls)
    calls.close()


async def test_all_callers_together_are_bounded_too() -> None:
    calls, release = BlockingCalls("test", "calls", threads=2, most=2), threading.Event()
    hanging = [begin(name, calls, lambda: release.wait(20)) for name in ("a", "b")]
    await settle()
    with pytest.raises(TooManyRequests, match="2 calls are there already"):
        await run_as("c", calls, lambda: None)
    release.set()
    await asyncio.gather(*hanging)
    calls.close()


async def test_who_goes_away_counts_until_the_thread_is_free() -> None:
    """Else one could have all threads by calling and leaving."""
    calls, release = BlockingCalls("test", "calls", threads=4, most=8), threading.Event()
    hanging = [begin("greedy", calls, lambda: release.wait(20)) for _ in range(3)]
    await settle()
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert calls._places.count == 2, "the third never had a thread"
    release.set()
    await ended(calls)
    assert await run_as("greedy", calls, lambda: 1) == 1
    calls.close()


async def test_what_a_call_raises_is_the_callers() -> None:
    calls = BlockingCalls("test", "calls", threads=1, most=1)

    def fails() -> None:
        raise OSError("disk")

    for _ in range(3):
        with pytest.raises(OSError, match="disk"):
            await run_as("a", calls, fails)
        await ended(calls)
    calls.close()


async def test_a_call_for_which_there_was_no_thread_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took one for good: in the end every caller was refused."""
    calls = BlockingCalls("test", "calls", threads=2, most=2)

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", no_thread)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="new thread"):
                await run_as("a", calls, lambda: 1)
    assert not calls._places.count and not calls._free.count
    assert await run_as("a", calls, lambda: 1) == 1
    calls.close()
