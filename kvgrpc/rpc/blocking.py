"""Calls that compute or wait too long for the event loop, on a few threads of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import caller

_RETRY_SECONDS = 1.0
T = TypeVar("T")


class BlockingCalls:
    """At most ``most`` run or wait at once, ``per_caller`` of them of one caller, on ``threads`` threads.

    ``scope`` is what a refusal calls them. Belongs to one event loop.
    """

    def __init__(self, name: str, scope: str, *, threads: int, most: int, per_caller: int) -> None:
        self._threads = ThreadPoolExecutor(threads, f"kvgrpc-{name}")
        self._scope = scope
        self._most, self._per_caller = most, per_caller
        self._of_callers: Counter[str] = Counter()

    async def run(self, call: Callable[[], T]) -> T:
        """What it returns or raises. Raises TooManyRequests with the time after which to try again."""
        name = caller().name
        if self._of_callers.total() >= self._most:
            raise self._too_many(self._most, self._scope)
        if self._of_callers[name] >= self._per_caller:
            raise self._too_many(self._per_caller, f"{self._scope} of one caller")
        self._of_callers[name] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._of_callers[name] -= 1
            if not self._of_callers[name]:
                del self._of_callers[name]

    def close(self) -> None:
        """Lets go of the threads; calls that still run on them are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _too_many(self, limit: int, scope: str) -> TooManyRequests:
        return TooManyRequests(
            f"{limit} {scope} wait already",
            metadata={"limit": limit, "value": limit + 1, "scope": scope},
            retry_after=_RETRY_SECONDS,
        )
