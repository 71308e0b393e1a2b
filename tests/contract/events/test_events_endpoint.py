"""Where PUB listens, and what a registry is told of it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any

import grpc
import pytest

import kvgrpc.dataplane
from kvgrpc.client import Client, PrefixIndex, SyncClient
from kvgrpc.errors import InvalidRequest, KvGrpcError
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import EventRelay, RankConfig, open_rank
from kvgrpc.server.rank import opening
from kvgrpc.server.rank.opening import dialled_endpoint
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub
from tests.support.ports import free_port
from tests.support.waiting import wait_until


def endpoints(**settings: Any) -> tuple[str, str]:
    """What the stream says it bound, and what the registry says to dial."""
    plane = kvgrpc.dataplane.open_plane("shm")
    address = plane.allocate(4096)
    pool = Pool("kv", PoolKind.KV, 16, 1, "x", (Region(0, "kv", address, 4096, 4096),))
    rank = open_rank(
        RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), data_plane=plane, registry="embedded", **settings)
    )
    try:
        with SyncClient(rank.address) as client:
            (row,) = client.get_engine("P").rows
            (stream,) = client.list_streams()
            return stream.pub_endpoint, row.endpoints.events_pub
    finally:
        rank.close(2.0)
        plane.close(1.0)


def test_the_documented_endpoint_opens_with_a_registry_which_is_told_what_to_dial() -> None:
    port = free_port()
    bound, told = endpoints(events=f'{{"endpoint": "tcp://*:{port}"}}')
    assert (bound, told) == (f"tcp://0.0.0.0:{port}", f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("events", [{"publisher": "zmq"}, "{}"])
def test_beside_a_loopback_port_pub_binds_loopback_unless_told(events: object, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(opening, "_ON_LOOPBACK", endpoint)
    assert endpoints(events=events) == (endpoint, endpoint)


def test_beside_a_loopback_port_an_explicit_wildcard_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING):
        endpoints(events={"endpoint": f"tcp://*:{port}"})
    assert f"tcp://0.0.0.0:{port} is bound for other hosts" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "address", "dialled"),
    [
        ("tcp://0.0.0.0:5557", "10.0.0.7:9001", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "[fd00::5]:9001", "tcp://[fd00::5]:5557"),
        ("tcp://10.0.0.8:5557", "10.0.0.7:9001", "tcp://10.0.0.8:5557"),
        ("ipc:///tmp/events", "10.0.0.7:9001", "ipc:///tmp/events"),
        ("", "10.0.0.7:9001", ""),
    ],
)
def test_a_wildcard_becomes_the_host_that_peers_dial(endpoint: str, address: str, dialled: str) -> None:
    assert dialled_endpoint(endpoint, address) == dialled


def rank_of(engine: str, registry: str, plane: Any, events: object) -> Any:
    address = plane.allocate(4096)
    pool = Pool("kv", PoolKind.KV, 16, 1, "x", (Region(0, "kv", address, 4096, 4096),))
    return open_rank(
        RankConfig(engine=engine, role=Role.PREFILL, pools=(pool,), data_plane=plane, registry=registry, events=events)
    )


async def test_an_index_follows_those_who_publish_and_tries_no_others() -> None:
    plane = kvgrpc.dataplane.open_plane("shm")
    publishing = await asyncio.to_thread(rank_of, "P", "embedded", plane, {"publisher": "null"})
    silent = await asyncio.to_thread(rank_of, "Q", publishing.address, plane, None)
    try:
        async with Client(publishing.address) as client:
            rows = [row for engine in await client.list_engines(include_rows=True) for row in engine.rows]
            assert {row.rank.rank.engine: row.serves_events for row in rows} == {"P": True, "Q": False}
        async with PrefixIndex(registry=publishing.address) as index:
            await index.until_current(1)
            assert [source.engine for source in index.sources()] == ["P"]
    finally:
        await asyncio.to_thread(silent.close, 2.0)
        await asyncio.to_thread(publishing.close, 2.0)
        plane.close(1.0)


def test_a_server_of_events_alone_keeps_to_the_readers_that_it_was_given() -> None:
    relay = EventRelay("127.0.0.1:0", "tcp://127.0.0.1:1", "E", events='{"max_watches": 1}').open()
    try:
        with grpc.insecure_channel(relay.address) as channel:
            watch = EventServiceStub(channel).Watch
            heartbeats = pb.WatchRequest(mode=pb.WATCH_MODE_HEARTBEAT)
            first = watch(heartbeats)
            assert next(first).WhichOneof("kind") == "begin"
            with pytest.raises(grpc.RpcError) as refused:
                next(watch(heartbeats))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        relay.close()


@pytest.mark.parametrize("events", ["{", '{"max_watchs": 1}', '{"max_watches": 0}'])
def test_keys_of_a_relay_that_cannot_be_are_refused(events: str) -> None:
    with pytest.raises(InvalidRequest, match="events"):
        EventRelay("127.0.0.1:0", "tcp://127.0.0.1:1", "E", events=events)


@pytest.mark.parametrize("listen", ["taken", "no address"])
def test_a_relay_that_cannot_be_opened_leaves_no_thread(listen: str) -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(KvGrpcError):
        where = f"127.0.0.1:{taken.getsockname()[1]}" if listen == "taken" else listen
        EventRelay(where, "tcp://127.0.0.1:1", "E").open()
    # Threads of gRPC and of the loop that all share are not a relay's.
    stayed = {thread for thread in set(threading.enumerate()) - before if "events" in thread.name}
    wait_until(lambda: not [thread.name for thread in stayed if thread.is_alive()])
