"""A bound on how long one thing is waited for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

from kvgrpc.errors import InvalidRequest

T = TypeVar("T")
LONGEST_SECONDS = 86_400.0


def check_seconds(field: str, seconds: float, longest: float = LONGEST_SECONDS) -> None:
    """Raises InvalidRequest for what is no time from 0 to ``longest``, a day; ``math.inf`` where somebody may wait for
    ever. NaN is neither below nor above any bound, so whatever waits for it ends at once or never."""
    if not 0 <= seconds <= longest:
        rule = "0 seconds or more" if longest == math.inf else f"0 to {longest:g} seconds"
        raise InvalidRequest.of(field, seconds, rule)


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Returns what it gives; raises asyncio.TimeoutError after ``seconds``, when it has been cancelled and has ended.

    It takes the place of ``asyncio.wait_for``, which before Python 3.12 drops a cancellation that comes together with
    the result: a loop that reads until it is cancelled then reads on, and whoever waits for its end waits as long.
    """
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(_look_at)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            task.cancel()
            await asyncio.wait([task])
            if _was_cancelled(task):
                raise asyncio.TimeoutError
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task.result()


def _was_cancelled(task: asyncio.Future[Any]) -> bool:
    """A gather of several does not say that it was: it raises the cancellation."""
    return task.cancelled() or isinstance(task.exception(), asyncio.CancelledError)


def _look_at(task: asyncio.Future[Any]) -> None:
    """Nobody is left to be told of an error of what was given up, which asyncio would log."""
    if not task.cancelled():
        task.exception()
