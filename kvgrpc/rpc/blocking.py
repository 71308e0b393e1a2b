"""Calls that compute or wait too long for the event loop, on a few threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvgrpc.rpc.shares import Shares

T = TypeVar("T")


class BlockingCalls:
    """At most ``most`` wait or run at once; of these places, and of the threads, each caller leaves as many to others
    as it takes (``Shares``): where it is alone it has half.

    ``scope`` is what a refusal calls them. Belongs to one event loop.
    """

    def __init__(self, name: str, scope: str, *, threads: int, most: int) -> None:
        self._threads = ThreadPoolExecutor(threads, f"kvgrpc-{name}")
        self._places, self._free = Shares(most, scope), Shares(threads, f"threads for {scope}")

    async def run(self, call: Callable[[], T]) -> T:
        """Returns what it returns or raises. Raises TooManyRequests with the time after which to try again."""
        place = self._places.take()
        try:
            thread = await self._free.take_in_turn(1)
        except asyncio.CancelledError:
            self._places.give_back(place)
            raise
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._places.give_back(place)
            self._free.give_back(thread)

        def ended(_: Future[Any]) -> None:
            # A caller that went away counts until its thread is free again.
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end)

        try:
            future = self._threads.submit(call)
        except RuntimeError:  # the system has no thread left
            end()
            raise
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Lets go of the threads; calls that still run on them are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)
