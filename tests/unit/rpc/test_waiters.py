"""Calls that wait are bounded, of all callers and of each: who waits for as much as it may locks nobody out."""

from __future__ import annotations

import asyncio

import pytest

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.rpc.callers import CALLER, Caller
from kvgrpc.rpc.waiters import Waiters

LIMIT = 100


def waiting_calls() -> Waiters[str]:
    return Waiters[str](LIMIT, "waiting calls", draining="it drains")


async def wait_as(waiters: Waiters[str], name: str, *keys: str) -> bool:
    CALLER.set(Caller(name))
    return await waiters.wait(keys or ("x",), timeout=30.0)


async def take_all(waiters: Waiters[str], name: str) -> list[asyncio.Task[bool]]:
    """Calls of one caller that wait, as many as it gets."""
    tasks: list[asyncio.Task[bool]] = []
    while True:
        task = asyncio.create_task(wait_as(waiters, name))
        await asyncio.wait([task], timeout=0)
        if task.done():
            assert isinstance(task.exception(), TooManyRequests)
            return tasks
        tasks.append(task)


async def test_one_caller_has_half_and_the_next_half_of_what_is_left() -> None:
    waiters = waiting_calls()
    shares = [len(await take_all(waiters, name)) for name in ("a", "b", "c")]
    assert shares == [50, 25, 13] and waiters.count == 88
    late = asyncio.create_task(wait_as(waiters, "honest"))
    await asyncio.wait([late], timeout=0)
    assert not late.done()
    waiters.wake("x")
    assert await late


async def test_a_refusal_says_what_is_the_callers_bound_now_and_what_it_asked_for() -> None:
    waiters = waiting_calls()
    tasks = await take_all(waiters, "router")
    with pytest.raises(TooManyRequests, match="router") as refused:
        await wait_as(waiters, "router", "x", "y")
    assert refused.value.metadata == {"limit": "50", "value": "52", "scope": "waiting calls of one caller"}
    assert refused.value.retry_after == 1.0
    with pytest.raises(TooManyRequests) as whole:
        await wait_as(waiters, "other", *map(str, range(51)))
    assert whole.value.metadata == {"limit": "100", "value": "101", "scope": "waiting calls"}
    waiters.wake("x")
    assert all([await task for task in tasks])


@pytest.mark.parametrize("end", ["woken", "cancelled"])
async def test_what_no_longer_waits_is_nobodys_share(end: str) -> None:
    waiters = waiting_calls()
    tasks = await take_all(waiters, "a")
    if end == "woken":
        waiters.wake("x")
    else:
        for task in tasks:
            task.cancel()
    await asyncio.wait(tasks)
    assert waiters.count == 0 and not waiters._shares._of_callers
    assert len(await take_all(waiters, "a")) == 50
    waiters.wake("x")


async def test_a_bound_of_one_admits_one() -> None:
    waiters = Waiters[str](1, "waiting calls", draining="it drains")
    assert len(await take_all(waiters, "a")) == 1
    waiters.wake("x")


async def test_a_drain_ends_every_wait_and_leaves_alone_what_was_woken() -> None:
    waiters = waiting_calls()
    both, one = (asyncio.create_task(wait_as(waiters, "a", *keys)) for keys in (("x", "y"), ("y",)))
    await asyncio.sleep(0)
    waiters.wake("x")
    waiters.drain()
    assert await both
    with pytest.raises(ServerDraining):
        await one
    with pytest.raises(ServerDraining):
        await wait_as(waiters, "a")
