"""How much at once: the library's own limit was bypassed by an underflow (grpc#41531)."""

from __future__ import annotations

import asyncio
from typing import Any

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Method

_RETRY_SECONDS = 0.2
# A server that is full can still be looked at, and drained. Watching health is a stream like others.
_NOT_COUNTED = ("/kvgrpc.v1.ServerService/", "/grpc.health.v1.Health/Check")


class Admission:
    """Bounds of one server: unary calls in flight, and open streams. Lives on one event loop."""

    def __init__(self, unary: int = 4096, streams: int = 16_384) -> None:
        self._max_unary = unary
        self._max_streams = streams
        self._unary = 0
        self._streams: set[asyncio.Task[Any]] = set()
        self._ending = False
        self._refusing = False

    def end_streams(self) -> None:
        """Ends every open stream with SERVER_DRAINING, and each that begins from now on."""
        self._ending = True
        for task in self._streams:
            task.cancel()

    def refuse(self) -> None:
        """Ends the streams and answers every call that is counted with SERVER_DRAINING from now on."""
        self._refusing = True
        self.end_streams()

    def layer(self, method: Method, inner: Behaviour) -> Behaviour:
        """Counts the call, or raises TooManyRequests with the time after which to try again."""
        if method.path.startswith(_NOT_COUNTED):
            return inner
        return self._stream(inner) if method.streams else self._call(inner)

    def _call(self, inner: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            if self._refusing:
                raise _draining()
            if self._unary >= self._max_unary:
                raise _too_many(self._max_unary, "calls")
            self._unary += 1
            try:
                return await inner(request, context)
            finally:
                self._unary -= 1

        return call

    def _stream(self, inner: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            if self._ending:
                raise _draining()
            if len(self._streams) >= self._max_streams:
                raise _too_many(self._max_streams, "streams")
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                await _send_headers(context)
                return await inner(request, context)
            except asyncio.CancelledError:
                if self._ending:
                    raise _draining() from None
                raise
            finally:
                self._streams.discard(task)

        return call


async def _send_headers(context: Context) -> None:
    """Answers a stream at once, and takes no cancellation half-way.

    The library notes that headers were sent only when the write that carried them returns: were that write cancelled,
    the status that says why would be refused as a second answer, and the caller would hear nothing.
    """
    sending = asyncio.ensure_future(context.send_initial_metadata(()))
    # It fails where the caller went away meanwhile: asyncio would log that as an exception that nobody looked at.
    sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.wait([sending])
        raise


def _draining() -> ServerDraining:
    return ServerDraining("the server stops; go on elsewhere, or here when it is back")


def _too_many(limit: int, scope: str) -> TooManyRequests:
    return TooManyRequests(
        f"{limit} {scope} are open at this server",
        metadata={"limit": limit, "value": limit + 1, "scope": scope},
        retry_after=_RETRY_SECONDS,
    )
