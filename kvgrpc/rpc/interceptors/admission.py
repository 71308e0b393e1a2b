"""Bounds how much runs at once: the library's own limit was bypassed by an underflow (grpc#41531)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.errors import ServerDraining
from kvgrpc.fields import Count
from kvgrpc.rpc.callers import Who, caller, who
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Method
from kvgrpc.rpc.methods import HEALTH_CHECK, bound_of_one
from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES, SMALL_BYTES
from kvgrpc.rpc.shares import Shares

# A server that is full can still be looked at, and drained. Watching health is a stream like others.
NOT_COUNTED = ("/kvgrpc.v1.ServerService/", HEALTH_CHECK)

# Of requests above 64 KiB that are read or worked on: two of 4 MiB of one connection, eleven of one caller.
MOST_BODY_BYTES = 96 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The calls that may run at once at one server, of all callers and of one; past it TooManyRequests."""

    unary: Count = 4_096
    """Of all callers; one may have as many as it leaves to others, so half where it is alone (``Shares``)."""
    streams: Count = 16_384
    """Of all callers; shared in the same way."""
    watches_per_caller: Count = 64
    """Of EventService.Watch, of RegistryService.WatchEngines, and of PrefetchService.WatchOperations."""
    health_watches_per_caller: Count = 16
    """Of Health/Watch."""
    reflections_per_caller: Count = 16
    """Streams of server reflection."""
    locates_per_caller: Count = 1_024
    """LocateRooms that wait."""
    keepalives_per_caller: Count = 1_024
    """Of RegistryService.KeepAlive, one for each process."""

    def per_caller(self, path: str) -> tuple[int, str, str] | None:
        """The bound of a method for one caller, what it bounds, and its name here; None: only that of all holds."""
        found = bound_of_one(path)
        return None if found is None else (getattr(self, found[0]), found[1], found[0])


@dataclass(slots=True)
class OpenCalls:
    """Calls of one caller that were admitted and have not ended: unary ones, streams, both by their paths."""

    unary: int = 0
    streams: int = 0
    by_path: Counter[str] = field(default_factory=Counter)

    def add(self, method: Method, calls: int) -> None:
        if method.streams:
            self.streams += calls
        else:
            self.unary += calls
        self.by_path[method.path] += calls
        if not self.by_path[method.path]:
            del self.by_path[method.path]

    def copy(self) -> OpenCalls:
        return OpenCalls(self.unary, self.streams, self.by_path.copy())


class Admission:
    """Bounds of one server: unary calls in flight, open streams, and both of one caller. Lives on one event loop."""

    def __init__(self, limits: CallLimits | None = None) -> None:
        self._limits = limits or CallLimits()
        self._of_callers: dict[tuple[str, str], Shares] = {}
        self._calls = Shares(self._limits.unary, "calls", "call_limits.unary (KVGRPC_CALL_LIMITS)")
        self._shares = Shares(self._limits.streams, "streams", "call_limits.streams (KVGRPC_CALL_LIMITS)")
        self._bodies = Shares(MOST_BODY_BYTES, "bytes of requests")
        self._streams: set[asyncio.Task[Any]] = set()
        self._open: dict[Who, OpenCalls] = {}
        self._ending = False
        self._refusing = False

    @property
    def open_calls(self) -> Mapping[Who, OpenCalls]:
        """The counted calls that are open now, by who makes them."""
        return self._open

    def end_streams(self) -> None:
        """Ends every open stream with SERVER_DRAINING, and each that begins from now on."""
        self._ending = True
        for task in self._streams:
            task.cancel()

    def refuse(self) -> None:
        """Ends the streams and answers every call that is counted with SERVER_DRAINING from now on."""
        self._refusing = True
        self.end_streams()

    @asynccontextmanager
    async def body(self, largest: int) -> AsyncIterator[Callable[[int], None]]:
        """Room for a request of a method that takes ``largest`` bytes, before any of them are read, until its call is
        over; waits for its turn. Call what it gives with the bytes that were read: the rest is others' from then on."""
        if largest <= SMALL_BYTES:
            yield lambda read: None
            return
        # More than most servers take: what would be more of a connection's share never got in.
        left = min(largest, LARGEST_REQUEST_BYTES)
        taken = await self._bodies.take_in_turn(left)

        def shrink(read: int) -> None:
            nonlocal left
            if read < left:
                self._bodies.give_back(taken, left - read)
                left = read

        try:
            yield shrink
        finally:
            self._bodies.give_back(taken, left)

    def layer(self, method: Method, inner: Behaviour) -> Behaviour:
        """Counts the call, or raises TooManyRequests with the time after which to try again."""
        if method.path.startswith(NOT_COUNTED):
            return inner
        bounded = self._of_caller(method, inner)
        return self._stream(method, bounded) if method.streams else self._call(method, bounded)

    def _of_caller(self, method: Method, inner: Behaviour) -> Behaviour:
        bound = self._limits.per_caller(method.path)
        if bound is None:
            return inner
        limit, what, name = bound
        setting = f"call_limits.{name} (KVGRPC_CALL_LIMITS)"

        async def call(request: Any, context: Context) -> Any:
            key = what, caller().name
            shares = self._of_callers.get(key)
            if shares is None:
                shares = self._of_callers[key] = Shares(limit, f"{what} of one caller", setting, of_one=key[1])
            taken = shares.take()
            try:
                return await inner(request, context)
            finally:
                shares.give_back(taken)
                if not shares.count:
                    self._of_callers.pop(key, None)

        return call

    def _begin(self, method: Method) -> Who:
        calling = who()
        calls = self._open.get(calling)
        if calls is None:
            calls = self._open[calling] = OpenCalls()
        calls.add(method, 1)
        return calling

    def _end(self, calling: Who, method: Method) -> None:
        calls = self._open[calling]
        calls.add(method, -1)
        if not calls.by_path:
            del self._open[calling]

    def _call(self, method: Method, inner: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            if self._refusing:
                raise _draining()
            taken = self._calls.take()
            calling = self._begin(method)
            try:
                return await inner(request, context)
            finally:
                self._end(calling, method)
                self._calls.give_back(taken)

        return call

    def _stream(self, method: Method, inner: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            if self._ending:
                raise _draining()
            task = asyncio.current_task()
            assert task is not None
            taken = self._shares.take()
            calling = self._begin(method)
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
                self._end(calling, method)
                self._shares.give_back(taken)

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
