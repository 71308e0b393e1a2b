"""Serves events from a process without a rank, for engines whose scheduler and workers are different processes."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

import kvgrpc
from kvgrpc.events import EventPublisher
from kvgrpc.events.servicer import MAX_WATCHES, EventServicer
from kvgrpc.model import RankId
from kvgrpc.net import check_listen
from kvgrpc.rpc.interceptors import Admission, CallLimits
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server.alone.draining import DrainsAtOnce
from kvgrpc.server.check import check_call_limits
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, limits_to_pb
from kvgrpc.server.port.listener import Check, Listener
from kvgrpc.server.port.load import RankLoad, load_of
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from kvgrpc.v1.server_service_pb2 import ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server

_SERVICES = ("kvgrpc.v1.EventService", "kvgrpc.v1.ServerService")
_SECONDS = 10.0


class EventServer(DrainsAtOnce):
    """Serves ListStreams and Watch of one publisher. ``open`` and ``close`` block; ``address`` is what was bound.

    The publisher stays its owner's, who shuts it down. ``healthy``: of what fills it; without it, the publisher's.
    ``load``: what is told of the engine beside its events.
    """

    _servicer: EventServicer

    def __init__(
        self,
        publisher: EventPublisher,
        listen: Sequence[str],
        security: ServerSecurity | None = None,
        call_limits: CallLimits | None = None,
        max_watches: int = MAX_WATCHES,
        healthy: Check | None = None,
    ) -> None:
        check_call_limits(call_limits)
        for address in listen:
            check_listen(address)
        self.address = ""
        self._listen = tuple(listen)
        self._security = security or ServerSecurity()
        stream = publisher.stream
        # What the engine's cache lends and takes is known where that is served: in this process, by another server.
        self.load = RankLoad() if stream is None else load_of(RankId(stream.engine, stream.dp))
        streams = [] if stream is None else [stream]
        self._servicer = EventServicer(streams, max_watches=max_watches, load=self.load.now)
        self._call_limits = call_limits or CallLimits()
        self._listener = Listener({_SERVICES[0]: healthy or (lambda: publisher.healthy)}, Admission(self._call_limits))
        self._loop = LoopThread.shared()
        self._closing = False

    def open(self) -> EventServer:
        """Raises AddressNotAllowed for an address that is taken, or plaintext that others reach."""
        self._loop.run(self._open(), _SECONDS)
        return self

    def close(self) -> None:
        self._loop.run(self._close(), _SECONDS)

    async def _open(self) -> None:
        bound = await self._listener.start(self._add_servicers, self._listen, self._security)
        self.address = bound[0]

    async def _close(self) -> None:
        self._closing = True
        await self.drain(0.0)
        await self._listener.stop(1.0)

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        add_EventServiceServicer_to_server(self._servicer, server)
        limits = ServerLimits(calls=limits_to_pb(self._call_limits))
        info = ServerInfo(version=kvgrpc.__version__, services=_SERVICES, limits=limits, security=self._security)
        callers = CallersHere(self._listener.admission, [self._servicer.readers])
        add_ServerServiceServicer_to_server(
            ServerServicer(info, self, lambda: self._listener.draining, callers), server
        )
        return _SERVICES
