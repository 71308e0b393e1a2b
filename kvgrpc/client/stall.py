"""Notices that nothing comes from a stream any more."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

# It looks at the clock so many times in ``seconds``. What passed since the look before counts for nothing where a look
# is later than that: a process that did not get to run heard nobody, and what came meanwhile has not been read yet.
_LOOKS, LATE_SECONDS = 4, 0.1
# However late its own loop is, nobody waits longer, but for whom ``seconds`` is more.
LONGEST_SECONDS = 60.0


class StallDetector:
    """Reads a stream of responses and cancels it when nothing comes for ``seconds``.

    Only the time that somebody waits for a message counts, and of it only what the loop was there. One timer for the
    whole stream: one for each message would cost more than the message.
    """

    def __init__(self, call: Any, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._silent = 0.0
        self._stalled = False
        self._look_within(seconds)

    async def next_message(self) -> Any:
        """The next message, None at the end. Raises TimeoutError after a stall, AioRpcError for a status."""
        self._waiting_since, self._silent = self._loop.time(), 0.0
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

    def _look_within(self, seconds: float) -> None:
        self._looked = self._loop.time()
        self._due = self._looked + min(seconds, self._seconds / _LOOKS)
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        waited = 0.0 if self._waiting_since is None else now - self._waiting_since
        if now - self._due <= LATE_SECONDS:
            self._silent += min(now - self._looked, waited)
        if self._silent >= self._seconds or waited >= max(LONGEST_SECONDS, self._seconds):
            self._stalled = True
            self._call.cancel()
        else:
            self._look_within(max(self._seconds - self._silent, 0.01))
