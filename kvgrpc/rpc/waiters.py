"""Calls that wait for something to be there: bounded in number, woken by changes, never by polling."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.rpc.callers import caller

Key = TypeVar("Key", bound=Hashable)


class Waiters(Generic[Key]):
    """Who waits for what. Lives on one event loop.

    ``limit``: things that may be waited for at a time, over all calls; ``scope`` says of what, in the refusal.
    ``draining``: what is said when it drains.

    One caller (``Caller.name``) may wait for as many as it leaves to others: half of the limit where it is alone, half
    of what is left where others wait. A thousand ranks that share a token, or come through one proxy, are one caller:
    a fixed share that is enough for them would let two or three take all, and this takes a dozen.
    """

    def __init__(self, limit: int, scope: str, draining: str) -> None:
        self._limit = limit
        self._scope = scope
        self._draining_text = draining
        self._count = 0
        self._of_callers: Counter[str] = Counter()
        self._waiting: dict[Key, set[asyncio.Future[None]]] = {}
        self._draining = False

    @property
    def count(self) -> int:
        return self._count

    async def wait(self, keys: Sequence[Key], timeout: float) -> bool:
        """Waits for one of them; False after ``timeout`` seconds.

        Raises TooManyRequests past the limit or the caller's share of it, ServerDraining after ``drain``.
        """
        if self._draining:
            raise self._refusal()
        name = caller().name
        self._check_room(name, len(keys))
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiting.setdefault(key, set()).add(woken)
        self._count += len(keys)
        self._of_callers[name] += len(keys)
        try:
            await asyncio.wait([woken], timeout=timeout)
        finally:
            self._count -= len(keys)
            self._of_callers[name] -= len(keys)
            if not self._of_callers[name]:
                del self._of_callers[name]
            for key in keys:
                self._forget(key, woken)
        if woken.done():
            woken.result()
        return woken.done()

    def wake(self, key: Key) -> None:
        """It is there."""
        for woken in self._waiting.pop(key, ()):
            if not woken.done():
                woken.set_result(None)

    def drain(self) -> None:
        """Ends all waits, now and later, with ServerDraining."""
        self._draining = True
        for waiting in self._waiting.values():
            for woken in waiting:
                if not woken.done():
                    woken.set_exception(self._refusal())

    def _check_room(self, name: str, more: int) -> None:
        free, own = self._limit - self._count, self._of_callers[name]
        if more > free:
            raise _too_many(
                f"{self._count} {self._scope} are there already, {self._limit} are the most",
                self._limit,
                self._count + more,
                self._scope,
            )
        if own + more > free:
            raise _too_many(
                f"{own} {self._scope} are there already of one caller ({name}), which may have as many as it leaves "
                f"to others: {free} are free",
                free,
                own + more,
                f"{self._scope} of one caller",
            )

    def _forget(self, key: Key, woken: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(woken)
            if not waiting:
                del self._waiting[key]

    def _refusal(self) -> ServerDraining:
        return ServerDraining(self._draining_text, retry_after=1.0)


def _too_many(text: str, limit: int, value: int, scope: str) -> TooManyRequests:
    return TooManyRequests(text, metadata={"limit": limit, "value": value, "scope": scope}, retry_after=1.0)
