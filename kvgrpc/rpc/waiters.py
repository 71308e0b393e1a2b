"""Calls that wait for something to be there: bounded in number, woken by changes, never by polling."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvgrpc.errors import ServerDraining
from kvgrpc.rpc.shares import Shares

# Below what a server grants a call that has no deadline.
LONGEST_WAIT_SECONDS = 50.0

Key = TypeVar("Key", bound=Hashable)


class Waiters(Generic[Key]):
    """Calls by what they wait for. Lives on one event loop.

    ``limit``: things that may be waited for at a time, over all calls, and shared by the callers as ``Shares`` does;
    ``scope`` says of what, in the refusal.
    ``draining``: what is said when it drains.
    """

    def __init__(self, limit: int, scope: str, draining: str) -> None:
        self._shares = Shares(limit, scope)
        self._draining_text = draining
        self._waiting: dict[Key, set[asyncio.Future[None]]] = {}
        self._draining = False

    @property
    def count(self) -> int:
        return self._shares.count

    async def wait(self, keys: Sequence[Key], timeout: float) -> bool:
        """Waits for one of them; False after ``timeout`` seconds.

        Raises TooManyRequests past the limit or the caller's share of it, ServerDraining after ``drain``.
        """
        if self._draining:
            raise self._refusal()
        taken = self._shares.take(len(keys))
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiting.setdefault(key, set()).add(woken)
        try:
            await asyncio.wait([woken], timeout=timeout)
        finally:
            self._shares.give_back(taken)
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

    def undrain(self) -> None:
        """Takes calls that wait again."""
        self._draining = False

    def _forget(self, key: Key, woken: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(woken)
            if not waiting:
                del self._waiting[key]

    def _refusal(self) -> ServerDraining:
        return ServerDraining(self._draining_text, retry_after=1.0)


def longest_wait(remaining: float | None) -> float:
    """Seconds, of a call that has ``remaining`` seconds left (None: no deadline).

    Until shortly before the deadline, so that the client gets an answer and not a timeout.
    """
    if remaining is None:
        return LONGEST_WAIT_SECONDS
    return max(remaining - min(0.25, remaining / 4), 0.0)
