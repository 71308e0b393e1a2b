"""Calls that wait until an engine is READY: bounded in number, woken by changes, never by polling."""

from __future__ import annotations

import asyncio

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.model import Role

# Waiting calls must not use up what a server admits (4,096 unary calls), or no rank could register and end the wait.
MAX_WAITERS = 2_048

_Key = tuple[str, Role | None]


class ReadyWaiters:
    """Who waits for which engine. Lives on one event loop."""

    def __init__(self, limit: int = MAX_WAITERS) -> None:
        self._limit = limit
        self._count = 0
        self._waiting: dict[_Key, set[asyncio.Future[None]]] = {}
        self._draining = False

    @property
    def count(self) -> int:
        return self._count

    async def wait(self, engine: str, role: Role | None, timeout: float) -> bool:
        """Waits for an engine of this name, or for any of this role when the name is empty, to become READY.

        False after ``timeout`` seconds. Raises TooManyRequests past the bound, ServerDraining after ``drain``.
        """
        if self._draining:
            raise ServerDraining("the registry drains")
        if self._count >= self._limit:
            raise TooManyRequests(
                f"{self._limit} calls wait for engines already",
                metadata={"limit": self._limit, "value": self._count, "scope": "waiting ResolveRanks calls"},
                retry_after=1.0,
            )
        key = (engine, None if engine else role)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(woken)
        self._count += 1
        try:
            await asyncio.wait([woken], timeout=timeout)
        finally:
            self._count -= 1
            self._forget(key, woken)
        if woken.done():
            woken.result()
        return woken.done()

    def wake(self, engine: str, role: Role) -> None:
        """Wakes everybody who waits for this engine, by name or by role."""
        for key in ((engine, None), ("", role)):
            for woken in self._waiting.pop(key, ()):
                if not woken.done():
                    woken.set_result(None)

    def drain(self) -> None:
        """Ends all waits, now and later, with ServerDraining."""
        self._draining = True
        for waiting in self._waiting.values():
            for woken in waiting:
                if not woken.done():
                    woken.set_exception(ServerDraining("the registry drains"))
        self._waiting.clear()

    def _forget(self, key: _Key, woken: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(woken)
            if not waiting:
                del self._waiting[key]
