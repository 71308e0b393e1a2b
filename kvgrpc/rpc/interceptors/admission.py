"""How much at once: the library's own limit was bypassed by an underflow (grpc#41531)."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.rpc.callers import caller
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Method
from kvgrpc.rpc.shares import RETRY_SECONDS, Shares

# A server that is full can still be looked at, and drained. Watching health is a stream like others.
_NOT_COUNTED = ("/kvgrpc.v1.ServerService/", "/grpc.health.v1.Health/Check")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls run at once at one server, of all callers and of one (``Caller.name``); past it TooManyRequests.

    Attributes:
        unary: of all callers; one may have as many as it leaves to others, so half where it is alone (``Shares``).
        streams: of all callers; shared in the same way.
        watches_per_caller: of EventService.Watch, of RegistryService.WatchEngines, and of
            PrefetchService.WatchOperations.
        health_watches_per_caller: of Health/Watch.
        reflections_per_caller: streams of server reflection.
        locates_per_caller: LocateRooms that wait.
        keepalives_per_caller: of RegistryService.KeepAlive, one for each process.
    """

    unary: int = 4_096
    streams: int = 16_384
    watches_per_caller: int = 64
    health_watches_per_caller: int = 16
    reflections_per_caller: int = 16
    locates_per_caller: int = 1_024
    keepalives_per_caller: int = 1_024

    def per_caller(self, path: str) -> tuple[int, str, str] | None:
        """The bound of a method for one caller, what it bounds, and its name here; None: only that of all holds."""
        if path.startswith("/grpc.reflection."):
            return self.reflections_per_caller, "reflection streams", "reflections_per_caller"
        name = _PER_CALLER.get(path)
        return None if name is None else (getattr(self, name), path.rpartition("/")[2], name)


_PER_CALLER = {
    "/kvgrpc.v1.EventService/Watch": "watches_per_caller",
    "/kvgrpc.v1.RegistryService/WatchEngines": "watches_per_caller",
    "/kvgrpc.v1.PrefetchService/WatchOperations": "watches_per_caller",
    "/grpc.health.v1.Health/Watch": "health_watches_per_caller",
    "/kvgrpc.v1.TransferService/LocateRooms": "locates_per_caller",
    "/kvgrpc.v1.RegistryService/KeepAlive": "keepalives_per_caller",
}


class Admission:
    """Bounds of one server: unary calls in flight, open streams, and both of one caller. Lives on one event loop."""

    def __init__(self, limits: CallLimits | None = None) -> None:
        self._limits = limits or CallLimits()
        self._of_callers: Counter[tuple[str, str]] = Counter()
        self._calls = Shares(self._limits.unary, "calls", "call_limits.unary (KVGRPC_CALL_LIMITS)")
        self._shares = Shares(self._limits.streams, "streams", "call_limits.streams (KVGRPC_CALL_LIMITS)")
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
        bounded = self._of_caller(method, inner)
        return self._stream(bounded) if method.streams else self._call(bounded)

    def _of_caller(self, method: Method, inner: Behaviour) -> Behaviour:
        bound = self._limits.per_caller(method.path)
        if bound is None:
            return inner
        limit, what, setting = bound
        counts = self._of_callers

        async def call(request: Any, context: Context) -> Any:
            name = caller().name
            key = what, name
            if counts[key] >= limit:
                raise _too_many(limit, f"{what} of one caller", setting, name)
            counts[key] += 1
            try:
                return await inner(request, context)
            finally:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]

        return call

    def _call(self, inner: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            if self._refusing:
                raise _draining()
            name = self._calls.take()
            try:
                return await inner(request, context)
            finally:
                self._calls.give_back(name)

        return call

    def _stream(self, inner: Behaviour) -> Behaviour:
        async def call(request: Any, context: Context) -> Any:
            if self._ending:
                raise _draining()
            task = asyncio.current_task()
            assert task is not None
            name = self._shares.take()
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
                self._shares.give_back(name)

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


def _too_many(limit: int, scope: str, setting: str, who: str) -> TooManyRequests:
    """A caller may be all ranks that share a token or come through one host: whoever is refused learns the setting."""
    return TooManyRequests(
        f"{limit} {scope} are open at this server ({who}); its call_limits.{setting} (KVGRPC_CALL_LIMITS) is the bound",
        metadata={"limit": limit, "value": limit + 1, "scope": scope},
        retry_after=RETRY_SECONDS,
    )
