"""The stream of a session at either side, and the wakes of the task that writes it: messages are the core's to say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from kvgrpc.errors import Failure
from kvgrpc.model import RankRef
from kvgrpc.transfer.runtime.death_proofs import NOTHING
from kvgrpc.v1 import transfer_service_pb2 as pb

# A stream that is to end gets so long for what is being written and its goodbye; a peer may read nothing.
_END_WITHIN_SECONDS = 2.0
SessionCall = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


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


class PrefillSession(SessionWriter):
    """One stream at prefill: whose it is, and how to write on it."""

    __slots__ = (
        "_limit",
        "_task",
        "caller",
        "failure",
        "max_frame_bytes",
        "over",
        "pool_pages",
        "ref",
        "verify",
        "write",
    )

    def __init__(
        self,
        ref: RankRef,
        write: Callable[[pb.SessionResponse], Awaitable[None]],
        pool_pages: list[tuple[str, int]],
    ) -> None:
        super().__init__()
        self.ref = ref
        self.write = write
        self.pool_pages = pool_pages
        self.failure: Failure | None = None
        self.caller = ""
        self.max_frame_bytes = 0
        self.verify = False
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        self._task = asyncio.current_task()
        self._limit: asyncio.TimerHandle | None = None

    def end(self, failure: Failure | None) -> None:
        """Says goodbye and ends the stream; the first cause counts."""
        if not self.closing:
            self.failure = failure
            self.close()
            if self._task is not None and not self.over.done():
                self._limit = asyncio.get_running_loop().call_later(_END_WITHIN_SECONDS, self._task.cancel)

    def ended(self) -> None:
        """Nothing more is written."""
        self._task = None
        if self._limit is not None:
            self._limit.cancel()
        self.over.set_result(None)


class DecodeSession(SessionWriter):
    """One stream that decode dialled."""

    __slots__ = (
        "call",
        "channel",
        "heartbeat",
        "is_taken",
        "max_frame_bytes",
        "quiet_heartbeat",
        "resolved",
        "writer",
    )

    def __init__(self) -> None:
        super().__init__()
        self.channel: grpc.aio.Channel | None = None
        self.call: SessionCall | None = None
        self.resolved = NOTHING
        self.is_taken = False
        self.writer: asyncio.Task[None] | None = None
        self.max_frame_bytes = 0
        self.heartbeat = self.quiet_heartbeat = 1

    @property
    def is_connected(self) -> bool:
        """The peer's library shook hands, which takes no interpreter; a stopped process does not get so far. Where it
        would take one, the peer's host has taken the connection."""
        if self.channel is None:
            return False
        return self.is_taken or self.channel.get_state() is grpc.ChannelConnectivity.READY

    def cancel(self) -> None:
        """Ends the stream without a word: the core gave the pair up."""
        self.closing = True
        if self.call is not None:
            self.call.cancel()

    def end(self) -> None:
        self.closing = True
        if self.writer is not None:
            self.writer.cancel()
