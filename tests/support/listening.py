"""A listener with a server's own services and one of all arities, and what its health says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.model import RankId, RankRef, Role
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.server import add_methods
from kvgrpc.server.port.description import ServerInfo
from kvgrpc.server.port.listener import Listener
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.v1 import server_service_pb2
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server
from tests.support.serving import SERVICE, Servicer

SERVER_SERVICE = "kvgrpc.v1.ServerService"
SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"


class Machine:
    """What Drain drains: ends when ``rooms_ended`` is set, at the latest after the grace."""

    def __init__(self) -> None:
        self.rooms_ended = asyncio.Event()
        self.graces: list[float] = []
        self.undrained = 0
        self.fails: Exception | None = None

    async def drain(self, grace: float) -> tuple[bool, int]:
        self.graces.append(grace)
        if self.fails is not None:
            raise self.fails
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.rooms_ended.wait(), grace)
        return self.rooms_ended.is_set(), 0 if self.rooms_ended.is_set() else 3

    async def undrain(self, end_drain: Callable[[], Awaitable[None]]) -> None:
        if self.fails is not None:
            raise self.fails
        await end_drain()
        self.undrained += 1


class CountedDrains(ServerServicer):
    """``waiting``: calls of Drain that have begun or joined a drain, and wait for its end."""

    waiting = 0

    async def Drain(
        self, request: server_service_pb2.DrainRequest, context: object
    ) -> server_service_pb2.DrainResponse:
        # What comes before the wait awaits nothing: in the next turn of the loop it waits.
        self.waiting += 1
        try:
            return await super().Drain(request, context)
        finally:
            self.waiting -= 1


class House:
    """A listener with the real ServerService and the service of all arities."""

    drains: CountedDrains

    def __init__(self, **options: Any) -> None:
        self.well: bool | str = True
        options.setdefault("health_checks", {SERVICE: lambda: self.well})
        self.listener = Listener(**options)
        self.servicer = Servicer()
        self.machine = Machine()
        self.bound: list[str] = []

    async def open(self, *addresses: str) -> House:
        self.bound = await self.listener.start(self._add, addresses or ["127.0.0.1:0"])
        return self

    @property
    def address(self) -> str:
        return self.bound[0]

    def _add(self, server: grpc.aio.Server) -> Sequence[str]:
        add_methods(server, SERVICE, self.servicer.methods())
        info = ServerInfo(
            "1.2.3",
            [SERVICE, SERVER_SERVICE],
            RankRef(RankId("P"), 7),
            Role.PREFILL,
            limits=server_service_pb2.ServerLimits(rank=server_service_pb2.RankLimits(max_rooms=9)),
        )
        self.drains = CountedDrains(info, self.machine, lambda: self.listener.draining)
        add_ServerServiceServicer_to_server(self.drains, server)
        return [SERVICE, SERVER_SERVICE]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = await House().open()
    yield house
    await house.listener.stop(0.0)


@pytest.fixture
async def channel(house: House) -> AsyncIterator[Any]:
    async with open_channel(house.address) as channel:
        yield channel


async def status(channel: Any, service: str = "") -> str:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def watch(channel: Any, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=20)


async def next_status(call: Any) -> str:
    return health_pb2.HealthCheckResponse.ServingStatus.Name((await asyncio.wait_for(call.read(), 5)).status)


def refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
