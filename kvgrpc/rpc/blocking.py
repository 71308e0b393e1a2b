"""Calls that compute or wait too long for the event loop, on a few threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvgrpc.rpc.shares import Shares

_log = logging.getLogger(__name__)
T = TypeVar("T")


class BlockingCalls:
    """At most ``most`` wait or run at once; of these places, and of the threads, each caller leaves as many to others
    as it takes (``Shares``): where it is alone it has half.

    ``scope`` is what a refusal calls them. Belongs to one event loop.
    """

    def __init__(self, name: str, scope: str, *, threads: int, most: int) -> None:
        self._scope = scope
        self._threads = ThreadPoolExecutor(threads, f"kvgrpc-{name}")
        self._places, self._free = Shares(most, scope), Shares(threads, f"threads for {scope}")

    async def run(self, call: Callable[[], T]) -> T:
        """Returns what it returns or raises. Raises TooManyRequests with the time after which to try again."""
        return await self.run_telling(lambda tell: call())

    async def run_telling(self, call: Callable[[Callable[[T], None]], T]) -> T:
        """``run`` of a call that may ``tell`` its answer before it ends. What it raises afterwards is logged."""
        place = self._places.take()
        try:
            thread = await self._free.take_in_turn(1)
        except asyncio.CancelledError:
            self._places.give_back(place)
            raise
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(ended: Future[T]) -> None:
            self._places.give_back(place)
            self._free.give_back(thread)
            error = None if ended.cancelled() else ended.exception()
            if ended.cancelled():
                answer.cancel()
            elif error is None:
                tell(ended.result())
            elif not answer.done():
                answer.set_exception(error)
            elif not answer.cancelled():
                _log.error("%s: %s", self._scope, error, exc_info=error)

        def tell(value: T) -> None:
            if not answer.done():
                answer.set_result(value)

        def soon(do: Callable[[Any], None], value: Any) -> None:
            # A caller that went away counts until its thread is free again.
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(do, value)

        try:
            future = self._threads.submit(call, partial(soon, tell))
        except RuntimeError:  # the system has no thread left
            self._places.give_back(place)
            self._free.give_back(thread)
            raise
        future.add_done_callback(partial(soon, end))
        try:
            return await answer
        except asyncio.CancelledError:
            future.cancel()
            raise

    def close(self) -> None:
        """Lets go of the threads; calls that still run on them are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)
