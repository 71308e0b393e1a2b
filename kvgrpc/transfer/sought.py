"""Calls that wait until a room has a sender at this prefill rank: bounded in number, woken by senders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.transfer.model import RoomKey

MAX_SOUGHT = 65_536


class SoughtRooms:
    """Who waits for which room. Lives on one event loop."""

    def __init__(self, limit: int = MAX_SOUGHT) -> None:
        self._limit = limit
        self._count = 0
        self._waiting: dict[RoomKey, set[asyncio.Future[None]]] = {}
        self._draining = False

    async def wait(self, keys: Sequence[RoomKey], timeout: float) -> None:
        """Returns when one of the rooms got a sender, or after ``timeout`` seconds.

        Raises TooManyRequests past the bound, ServerDraining after ``drain``.
        """
        if self._draining:
            raise _draining()
        if self._count + len(keys) > self._limit:
            raise TooManyRequests(
                f"{self._count} rooms are sought already",
                metadata={"limit": self._limit, "value": self._count + len(keys), "scope": "rooms sought"},
                retry_after=1.0,
            )
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiting.setdefault(key, set()).add(woken)
        self._count += len(keys)
        try:
            await asyncio.wait([woken], timeout=timeout)
        finally:
            self._count -= len(keys)
            self._forget(keys, woken)
        if woken.done():
            woken.result()

    def wake(self, key: RoomKey) -> None:
        """The room has a sender."""
        for woken in self._waiting.pop(key, ()):
            if not woken.done():
                woken.set_result(None)

    def drain(self) -> None:
        """Ends all waits, now and later, with ServerDraining: senders that come now are refused."""
        self._draining = True
        for waiting in self._waiting.values():
            for woken in waiting:
                if not woken.done():
                    woken.set_exception(_draining())

    def _forget(self, keys: Iterable[RoomKey], woken: asyncio.Future[None]) -> None:
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(woken)
                if not waiting:
                    del self._waiting[key]


def _draining() -> ServerDraining:
    return ServerDraining("the rank drains: rooms without a sender get none here", retry_after=1.0)
