"""Calls that compute or wait too long for the event loop, on a few threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import caller
from kvgrpc.rpc.shares import RETRY_SECONDS

T = TypeVar("T")


@dataclass(slots=True)
class _Share:
    """Of one caller: ``calls`` that wait or run, and its turns at the threads."""

    turns: asyncio.Semaphore
    calls: int = 0


class BlockingCalls:
    """At most ``most`` wait or run at once, ``per_caller`` of them of one caller; that has half of the threads at most.

    ``scope`` is what a refusal calls them. Belongs to one event loop.
    """

    def __init__(self, name: str, scope: str, *, threads: int, most: int, per_caller: int) -> None:
        self._threads = ThreadPoolExecutor(threads, f"kvgrpc-{name}")
        self._of_a_caller = max(1, threads // 2)
        self._scope = scope
        self._most, self._per_caller = most, per_caller
        self._calls = 0
        self._shares: dict[str, _Share] = {}

    async def run(self, call: Callable[[], T]) -> T:
        """What it returns or raises. Raises TooManyRequests with the time after which to try again."""
        share = self._admit(name := caller().name)
        try:
            await share.turns.acquire()
        except asyncio.CancelledError:
            self._leave(name)
            raise
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            # A caller that went away counts until its thread is free again.
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end, name)

        try:
            future = self._threads.submit(call)
        except RuntimeError:  # the system has no thread left
            self._end(name)
            raise
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Lets go of the threads; calls that still run on them are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _admit(self, name: str) -> _Share:
        share = self._shares.get(name) or _Share(asyncio.Semaphore(self._of_a_caller))
        if self._calls >= self._most:
            raise self._too_many(self._most, self._scope)
        if share.calls >= self._per_caller:
            raise self._too_many(self._per_caller, f"{self._scope} of one caller")
        self._shares[name] = share
        share.calls += 1
        self._calls += 1
        return share

    def _end(self, name: str) -> None:
        self._shares[name].turns.release()
        self._leave(name)

    def _leave(self, name: str) -> None:
        share = self._shares[name]
        share.calls -= 1
        self._calls -= 1
        if not share.calls:
            del self._shares[name]

    def _too_many(self, limit: int, scope: str) -> TooManyRequests:
        return TooManyRequests(
            f"{limit} {scope} wait already",
            metadata={"limit": limit, "value": limit + 1, "scope": scope},
            retry_after=RETRY_SECONDS,
        )
