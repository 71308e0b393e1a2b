"""An asyncio loop whose time passes only while nothing is left to do: minutes of waiting in no time, and the same each
time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Clock(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    """Where a loop would sleep, its time advances instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is left to happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """``unhandled``: what tasks and callbacks raised and nobody took."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self.unhandled: list[dict[str, Any]] = []
        super().__init__(self._clock)
        self.set_exception_handler(lambda loop, context: self.unhandled.append(context))

    def time(self) -> float:
        return self._clock.now

    def hold(self, seconds: float) -> None:
        """Its process does not run for so long."""
        self._clock.now += seconds


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs it on a loop of its own, on which nothing may be left that raised."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.001))  # of virtual time: what was cancelled ends
        loop.close()
        assert not loop.unhandled, loop.unhandled
