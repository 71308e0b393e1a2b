"""Wakes the task that writes a session. It holds no messages: the core is asked when there is room to send."""

from __future__ import annotations

import asyncio
import time


class SessionWriter:
    """News of rooms, a heartbeat that is due, or the end. One writer waits; everything is on the loop thread.

    ``ready_at``: since when there is something to say (s, monotonic).
    """

    __slots__ = ("_waiter", "closing", "heartbeat_due", "ready", "ready_at")

    def __init__(self) -> None:
        self.closing = False
        self.heartbeat_due = False
        self.ready = False
        self.ready_at = 0.0
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if not self.ready:
            self.ready, self.ready_at = True, time.monotonic()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def beat(self) -> None:
        """A heartbeat is due, unless something else is said."""
        self.heartbeat_due = True
        self.wake()

    def close(self) -> None:
        self.closing = True
        self.wake()

    async def news(self) -> None:
        """Returns when there is any; the ticks beat, so that no wait is without end."""
        if not self.ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.ready = False
