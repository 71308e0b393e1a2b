"""vLLM's bootstrap port, which passes connections on to the registry behind it. Without vLLM: tests/engines has it."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvgrpc
from kvgrpc.errors import AddressNotAllowed, TooManyRequests
from kvgrpc.model import new_epoch
from kvgrpc.observability import metrics
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.v1 import common_pb2, registry_service_pb2
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.ports import free_port
from tests.support.serving import failure

CAME_FROM = "127.0.0.2"


@pytest.fixture
def bootstrap() -> Iterator[Any]:
    """Loaded as a file: the package that it is in imports vLLM."""
    file = Path(kvgrpc.__file__).parent / "engines/vllm/bootstrap.py"
    specification = importlib.util.spec_from_file_location("bootstrap_without_vllm", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    opened = module.Bootstrap(
        f"127.0.0.1:{free_port()}", "e", None, 10.0, CallLimits(health_watches_per_caller=1)
    ).open()
    yield opened
    opened.close()


@pytest.fixture
async def from_elsewhere(bootstrap: Any) -> Any:
    """The address of a link to the port, whose connections come from another address of this host."""
    host, port = bootstrap._server.sockets[0].getsockname()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, port, local_addr=(CAME_FROM, 0))
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer), return_exceptions=True)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
        writer.close()

    link = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{link.sockets[0].getsockname()[1]}"
    link.close()


async def watch(channel: Any) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    await call.read()
    return call


async def test_callers_are_told_apart_by_the_hosts_that_they_came_from(bootstrap: Any, from_elsewhere: str) -> None:
    host, port = bootstrap._server.sockets[0].getsockname()
    async with open_channel(f"{host}:{port}") as here, open_channel(from_elsewhere) as elsewhere:
        watches = [await watch(here), await watch(elsewhere)]
        error = await failure(watch(elsewhere))
        assert isinstance(error, TooManyRequests) and CAME_FROM in error.message
        for each in watches:
            each.cancel()


async def test_a_rank_of_another_host_cannot_advertise_loopback(
    from_elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode ranks would dial themselves."""
    monkeypatch.setattr("kvgrpc.net.is_local", lambda address: CAME_FROM not in address)
    row = registry_service_pb2.RankRow(
        rank=common_pb2.RankRef(rank=common_pb2.RankId(engine="e"), epoch=new_epoch()),
        role=common_pb2.ROLE_PREFILL,
        layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=1),
        endpoints=registry_service_pb2.Endpoints(grpc="127.0.0.1:9"),
        data_plane="shm",
    )
    request = registry_service_pb2.RegisterRequest(rows=[row])
    async with open_channel(from_elsewhere) as channel:
        error = await failure(RegistryServiceStub(channel).Register(request, timeout=5))
    assert isinstance(error, AddressNotAllowed) and "loopback" in error.message


async def test_connections_that_are_too_many_are_said_and_counted(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(type(bootstrap)._serve.__globals__, "_MOST_CONNECTIONS", 0)
    before = metrics.BOOTSTRAP_REFUSED._value.get()
    host, port = bootstrap._server.sockets[0].getsockname()
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b""
        writer.close()
    assert metrics.BOOTSTRAP_REFUSED._value.get() == before + 3
    told = [message for message in caplog.messages if "bootstrap port" in message]
    assert told == [f"the bootstrap port {bootstrap._address} has 0 connections: one of 127.0.0.1 was closed"] * 3


def test_a_port_that_is_taken_leaves_no_registry_behind(bootstrap: Any) -> None:
    host, port = bootstrap._server.sockets[0].getsockname()
    second = type(bootstrap)(f"{host}:{port}", "e", None, 10.0)
    with pytest.raises(AddressNotAllowed, match="bootstrap_port"):
        second.open()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError):
        probe.connect("\0" + second._path)
    second.close()
