"""Notices that nothing comes from a stream any more."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc


class StallDetector:
    """Reads a stream of responses and cancels it when nothing comes for ``seconds``.

    Only the time that somebody waits for a message counts. One timer for the whole stream: one for each message would
    cost more than the message.
    """

    def __init__(self, call: Any, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._stalled = False
        self._timer = self._loop.call_later(seconds, self._look)

    async def next_message(self) -> Any:
        """The next message, None at the end. Raises TimeoutError after a stall, AioRpcError for a status."""
        self._waiting_since = self._loop.time()
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            raise TimeoutError(f"nothing came for {self._seconds:g} s") from None
        finally:
            self._waiting_since = None
        return None if message is grpc.aio.EOF else message

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        waited = 0.0 if self._waiting_since is None else self._loop.time() - self._waiting_since
        if waited >= self._seconds:
            self._stalled = True
            self._call.cancel()
        else:
            self._timer = self._loop.call_later(max(self._seconds - waited, 0.01), self._look)
