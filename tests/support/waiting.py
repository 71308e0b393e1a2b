"""Waits for a condition, with a deadline: what a test does instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

# Of a busy machine too: who waits so long has failed.
SECONDS = 30.0
_LOOK_SECONDS = 0.002


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Returns once the condition is met. Raises AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(_LOOK_SECONDS)


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """The same on an event loop; the condition may be a coroutine function."""
    end = time.monotonic() + seconds
    while not await _met(condition):
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        await asyncio.sleep(_LOOK_SECONDS)


async def _met(condition: Callable[[], object]) -> object:
    answer = condition()
    return await answer if inspect.isawaitable(answer) else answer
