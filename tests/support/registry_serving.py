"""A registry behind a real server in this process, and what its tests share."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc
import pytest

from kvgrpc.errors import (
    KvGrpcError,
)
from kvgrpc.model import Layout
from kvgrpc.registry import wire
from kvgrpc.registry.model import RankRow
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.memory import MemoryRegistry, MemoryStore
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

TP2 = Layout(tp=2)
POOLS = wire.PoolCache()


class Served:
    """A registry behind a server, and a stub that talks to it."""

    def __init__(
        self, ttl: float = 10.0, max_waiters: int = 2_048, peer: str = "", security: ServerSecurity | None = None
    ) -> None:
        self.store = MemoryStore(ttl=ttl)
        self.servicer = RegistryServicer(self.store, max_waiters=max_waiters)
        if peer:
            self.servicer = _from_peer(self.servicer, peer)
        self.port = 0
        self.security = security or ServerSecurity()

    async def start(self, port: int = 0) -> Served:
        audiences = Audiences()
        interceptors = interceptors_of(self.security, audiences=audiences)
        self.server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        add_registry_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        audiences.add(self.address)
        await self.server.start()
        await self.servicer.start()
        self.channel = open_channel(self.address, own_connection=True)
        self.stub = RegistryServiceStub(self.channel)
        return self

    @property
    def registry(self) -> MemoryRegistry:
        return self.store.registry

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def waiting(self) -> int:
        """Calls that wait for an engine to change."""
        return self.servicer._waiters.count

    async def stop(self, grace: float = 0.0) -> None:
        await self.channel.close()
        await self.servicer.close()
        await self.server.stop(grace)

    async def register(self, *rows: RankRow) -> pb.RegisterResponse:
        return await self.stub.Register(request_of(*rows), timeout=10)

    def grown_up(self) -> Served:
        """As it is one TTL after its start."""
        self.registry._started -= self.registry.ttl
        return self


def _from_peer(servicer: RegistryServicer, peer: str) -> RegistryServicer:
    """The same servicer, for callers that seem to come from elsewhere."""

    class Elsewhere(RegistryServicer):
        async def Register(self, request: pb.RegisterRequest, context: object) -> pb.RegisterResponse:
            return await super().Register(request, type("Context", (), {"peer": lambda self: peer})())

    return Elsewhere(servicer.store)


def dial(address: str) -> grpc.aio.Channel:
    return open_channel(address, own_connection=True)


def request_of(*rows: RankRow) -> pb.RegisterRequest:
    return pb.RegisterRequest(rows=[wire.row_to_pb(at, POOLS) for at in rows])


async def failure(call: Awaitable[object]) -> KvGrpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return error_from(refused.value)
