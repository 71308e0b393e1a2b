"""Registries over one etcd, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio

from kvgrpc.registry import wire
from kvgrpc.registry.model import EVERY_RANK, RankRow
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.etcd import EtcdStore
from kvgrpc.registry.store.etcd.client import EtcdClient
from kvgrpc.registry.store.etcd.keys import EtcdKeys
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.common_pb2 import ROLE_PREFILL
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.etcd import Etcd, running_etcd
from tests.support.registry_serving import POOLS, request_of
from tests.support.waiting import until

TTL = 2.0


class Replica:
    """One registry over etcd behind a server."""

    def __init__(self, etcd: Etcd, prefix: str, ttl: float = TTL) -> None:
        self.store = EtcdStore([etcd.address], ttl=ttl, prefix=prefix)
        self.servicer = RegistryServicer(self.store)

    @property
    def client(self) -> EtcdClient:
        """By which it asks etcd."""
        return self.store._client

    @property
    def keys(self) -> EtcdKeys:
        return self.store._keys

    async def start(self, port: int = 0, security: ServerSecurity | None = None) -> Replica:
        audiences = Audiences()
        interceptors = interceptors_of(security or ServerSecurity(), audiences=audiences)
        self.server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        add_registry_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.servicer.start()
        await self.server.start()
        self.address = f"127.0.0.1:{self.port}"
        audiences.add(self.address)
        self.channel = open_channel(self.address, own_connection=True)
        self.stub = RegistryServiceStub(self.channel)
        await until(lambda: self.store.warming_up_for == 0)
        return self

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.servicer.close()

    async def register(self, *rows: RankRow) -> pb.RegisterResponse:
        return await self.stub.Register(request_of(*rows), timeout=20)

    async def resolve(self, engine: str, timeout: float = 10.0) -> list[RankRow]:
        request = pb.ResolveRanksRequest(
            engine=engine, role=ROLE_PREFILL, selectors=[wire.selector_to_pb(EVERY_RANK)], wait_ready=True
        )
        found = (await self.stub.ResolveRanks(request, timeout=timeout)).engine
        return list(wire.engine_from_pb(found, POOLS).rows)

    def known(self) -> set[RankRow]:
        engines = self.store.table.list_engines(None, "", 10_000, rows=True)
        return {at for engine in engines for at in engine.rows}


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as running:
        yield running


@pytest_asyncio.fixture
async def replicas(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[list[Replica]]:
    """Two registries over one etcd, with keys that no other test uses."""
    made = [await Replica(etcd, f"/{request.node.name}/").start() for _ in range(2)]
    yield made
    for replica in made:
        with contextlib.suppress(Exception):
            await replica.stop()
