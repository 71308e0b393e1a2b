"""An index that runs alone: ``kvgrpc serve index``."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

import kvgrpc
from kvgrpc.client.following.prefix_index import PrefixIndex
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.index_servicer import IndexServicer
from kvgrpc.events.following.questions import MAX_BLOCKS, MAX_PLAN_PROMPTS, MAX_PROMPTS, MAX_TOKENS
from kvgrpc.rpc.interceptors import Admission, CallLimits
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server.alone.serving import ServerAlone
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, limits_to_pb
from kvgrpc.server.port.listener import Listener
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.v1.index_service_pb2_grpc import add_IndexServiceServicer_to_server
from kvgrpc.v1.server_service_pb2 import IndexLimits, ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server

_SERVICES = ("kvgrpc.v1.IndexService", "kvgrpc.v1.ServerService")


class IndexServer(ServerAlone):
    """An index on a port of its own. ``open`` and ``close`` block; ``address`` and ``metrics_address`` are as bound.

    It follows the caches of the engines at ``registry`` (replicas with commas between them), and of the ranks whose
    gRPC addresses ``sources`` names, with ``client_security``; ``saved`` is the file that a restart goes on from.
    ``metrics_listen``: "host:port" of ``/metrics``, ``/livez`` and ``/readyz``; "": none. Raises InvalidRequest where
    neither is named, and for what is no address.
    """

    _servicer: IndexServicer

    def __init__(
        self,
        listen: Sequence[str],
        *,
        registry: str = "",
        sources: Sequence[str] = (),
        live: bool = False,
        saved: str = "",
        security: ServerSecurity | None = None,
        client_security: ClientSecurity | None = None,
        metrics_listen: str = "",
        call_limits: CallLimits | None = None,
    ) -> None:
        if not registry and not sources:
            raise InvalidRequest.of("registry", registry, "the address of a registry, or sources must name ranks")
        super().__init__(listen, security, metrics_listen, call_limits)
        self.index = PrefixIndex(registry=registry, sources=sources, live=live, security=client_security, saved=saved)
        self._servicer = IndexServicer(self.index)
        self._listener = Listener({_SERVICES[0]: self.index.health}, Admission(self._call_limits))

    def _live(self) -> dict[str, bool]:
        return {"loop": self._loop.healthy, "index": self._closing or self.index.healthy}

    def _ready(self) -> dict[str, bool]:
        current, followed = self.index.standing()
        return {
            f"{current} of {followed} caches are current": self._listener.serving()[_SERVICES[0]],
            **super()._ready(),
        }

    async def _open(self) -> None:
        await self.index.start()
        bound = await self._listener.start(self._add_servicers, self._listen, self._security)
        self.address = bound[0]

    async def _close(self) -> None:
        await self.drain(0.0)
        await self._listener.stop(1.0)
        self._servicer.close()
        await self.index.close()

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        add_IndexServiceServicer_to_server(self._servicer, server)
        index = IndexLimits(
            max_score_blocks=MAX_BLOCKS,
            max_score_tokens=MAX_TOKENS,
            max_score_prompts=MAX_PROMPTS,
            max_plan_prompts=MAX_PLAN_PROMPTS,
        )
        limits = ServerLimits(calls=limits_to_pb(self._call_limits), index=index)
        info = ServerInfo(version=kvgrpc.__version__, services=_SERVICES, limits=limits, security=self._security)
        callers = CallersHere(self._listener.admission)
        add_ServerServiceServicer_to_server(
            ServerServicer(info, self, lambda: self._listener.draining, callers), server
        )
        return _SERVICES
