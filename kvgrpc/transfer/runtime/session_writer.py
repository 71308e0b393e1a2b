"""What the task that writes a session waits for. It holds no messages: the core is asked when there is room to send."""

from __future__ import annotations

import asyncio


class SessionWriter:
    """News of rooms, a heartbeat that is due, or the end. One writer waits; everything is on the loop thread."""

    __slots__ = ("_waiter", "closing", "heartbeat_due", "ready")

    def __init__(self) -> None:
        self.closing = False
        self.heartbeat_due = False
        self.ready = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self.ready = True
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
