"""Undrain takes a drain back: what a process is again, and when it is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from kvgrpc.client import Client, SyncClient
from kvgrpc.errors import PeerUnreachable, ServerDraining, StaleEpoch
from kvgrpc.events import open_publisher
from kvgrpc.model import RankId, RankRef
from kvgrpc.prefetch.model import OperationKind
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.pull.model import PullConfig
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.status import error_from
from kvgrpc.server import EventServer, IndexServer, RegistryServer
from kvgrpc.transfer import KVPoll
from kvgrpc.v1 import server_service_pb2 as pb
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
from tests.support.cache_serving import hashes_of, open_cache_rank, prompt
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until


@dataclass
class Pair:
    """A prefill and a decode, and the registry that has both."""

    registry: RegistryServer
    prefill: RankHost
    decode: RankHost

    def engines(self) -> dict[str, int]:
        """The epoch of each, as the registry has them."""
        with SyncClient(self.registry.address) as client:
            return {engine.name: engine.rows[0].rank.epoch for engine in client.list_engines(include_rows=True)}

    def begin(self, room: int, *, last: bool) -> None:
        self.decode.receive(room, f"{self.registry.address}/P", range(4))
        self.prefill.send(room, range(4, 8) if last else range(4, 7), last=last)

    def hand_off(self, room: int) -> None:
        self.begin(room, last=True)
        self.decode.wait("receivers", [room], [KVPoll.Success])


@pytest.fixture
def pair() -> Iterator[Pair]:
    registry = RegistryServer(["127.0.0.1:0"], lease_ttl=600.0).open()
    changes = {"registry": registry.address, "start_timeout": 2.0}
    pair = Pair(registry, RankHost("P", "PREFILL", changes), RankHost("D", "DECODE", changes))
    pair.prefill.fill(1)
    yield pair
    pair.decode.close(2.0)
    pair.prefill.close(2.0)
    registry.close()


def state(client: SyncClient) -> tuple[str, bool]:
    return client.health(), client.get_server_info().draining


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_takes_new_rooms_again_as_the_same_incarnation(pair: Pair, side: str) -> None:
    pair.hand_off(1)
    before = pair.engines()
    with SyncClient(getattr(pair, side).rank.address) as client:
        client.undrain()  # nothing to take back
        assert client.drain(1.0).drained
        assert state(client) == ("NOT_SERVING", True)
        assert pair.engines().keys() == before.keys() - {"P" if side == "prefill" else "D"}
        client.undrain()
        assert state(client) == ("SERVING", False)
        assert pair.engines() == before
        pair.hand_off(2)
        assert client.drain(1.0).drained
        assert state(client) == ("NOT_SERVING", True)


@contextlib.contextmanager
def drain_with_a_room(pair: Pair) -> Iterator[Future[pb.DrainResponse]]:
    """Room 1 lacks its last page, and prefill drains for a minute because of it."""
    pair.begin(1, last=False)
    pair.decode.wait("receivers", [1], [KVPoll.Transferring])
    with SyncClient(pair.prefill.rank.address) as client, ThreadPoolExecutor(1) as aside:
        draining = aside.submit(client.drain, 60.0)
        wait_until(lambda: client.get_server_info().draining and "P" not in pair.engines())
        yield draining


def test_rooms_that_a_drain_still_waits_for_go_on(pair: Pair) -> None:
    address = pair.prefill.rank.address
    with SyncClient(address) as client, drain_with_a_room(pair) as draining:
        client.undrain()
        assert not draining.result(20).drained
        assert state(client) == ("SERVING", False)
    pair.prefill.send_rest(1, 7)
    pair.decode.wait("receivers", [1], [KVPoll.Success])
    pair.hand_off(2)


def test_a_rank_whose_place_was_taken_drains_on(pair: Pair) -> None:
    with SyncClient(pair.prefill.rank.address) as client:
        assert client.drain(1.0).drained
        successor = RankHost("P", "PREFILL", {"registry": pair.registry.address})
        try:
            with pytest.raises(StaleEpoch):
                client.undrain()
            assert state(client) == ("NOT_SERVING", True)
            assert pair.engines()["P"] == successor.rank.ref.epoch
        finally:
            successor.close(2.0)


def test_a_rank_whose_registry_is_away_drains_on(pair: Pair) -> None:
    address = pair.prefill.rank.address
    with SyncClient(address) as client:
        assert client.drain(1.0).drained
        pair.registry.close()
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            ServerServiceStub(channel).Undrain(pb.UndrainRequest(), timeout=30)
        assert isinstance(error_from(refused.value), PeerUnreachable)
        assert state(client) == ("NOT_SERVING", True)


def test_rooms_keep_their_grace_where_a_drain_cannot_be_taken_back(pair: Pair) -> None:
    address = pair.prefill.rank.address
    with SyncClient(address) as client, drain_with_a_room(pair) as draining:
        pair.registry.close()
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            ServerServiceStub(channel).Undrain(pb.UndrainRequest(), timeout=30)
        assert not draining.done() and state(client) == ("NOT_SERVING", True)
        pair.prefill.send_rest(1, 7)
        pair.decode.wait("receivers", [1], [KVPoll.Success])
        assert draining.result(30).drained


def test_a_cache_begins_prefetches_again(tmp_path: Path) -> None:
    cache = open_cache_rank(tmp_path)
    try:
        hashes = hashes_of(prompt(2))
        cache.store(hashes)
        order = Order(kind=OperationKind.PREFETCH, hashes=tuple(hashes))
        with SyncClient(cache.address) as client:
            client.drain(0.0)
            with pytest.raises(ServerDraining):
                cache.manager.start(order)
            client.undrain()
            assert state(client) == ("SERVING", False)
            assert client.health("kvgrpc.v1.PrefetchService") == "SERVING"
            assert cache.manager.start(order).wait(20)
            cache.assert_bytes(hashes)
    finally:
        cache.close()


def test_a_cache_takes_no_drain_back_at_its_own_port_while_its_rank_drains(tmp_path: Path) -> None:
    cache = open_cache_rank(tmp_path, pull=PullConfig(staging_pages=8))
    try:
        peer: Any = cache.rank
        with SyncClient(cache.address) as client, SyncClient(peer._parts.cache_peer.address) as own_port:
            client.drain(0.0)
            # Asked once: the client would ask until its time is over.
            channel = grpc.insecure_channel(peer._parts.cache_peer.address)
            with channel, pytest.raises(grpc.RpcError) as refused:
                ServerServiceStub(channel).Undrain(pb.UndrainRequest(), timeout=5)
            assert isinstance(error_from(refused.value), ServerDraining)
            assert own_port.get_server_info().draining
            client.undrain()
            assert not own_port.get_server_info().draining
            own_port.drain(0.0)
            own_port.undrain()
            assert not own_port.get_server_info().draining
            # Drained at its own port, taken back with its rank.
            own_port.drain(0.0)
            client.drain(0.0)
            client.undrain()
            assert not own_port.get_server_info().draining
    finally:
        cache.close()


def test_a_rank_that_begins_to_drain_while_its_caches_drain_is_taken_back_keeps_it_drained(tmp_path: Path) -> None:
    cache = open_cache_rank(tmp_path, pull=PullConfig(staging_pages=8))
    try:
        parts: Any = cast(Any, cache.rank)._parts
        with SyncClient(parts.cache_peer.address) as own_port:
            own_port.drain(0.0)
            with pytest.raises(ServerDraining):
                LoopThread.shared().run(parts.cache_peer.undrain(parts.listener.drain), 20)
            assert own_port.get_server_info().draining
    finally:
        cache.close()


async def test_a_registry_an_index_and_a_publisher_answer_again() -> None:
    registry = await asyncio.to_thread(RegistryServer(["127.0.0.1:0"]).open)
    index = await asyncio.to_thread(IndexServer(["127.0.0.1:0"], registry=registry.address).open)
    publisher = open_publisher({"publisher": "null"}, RankRef(RankId("E"), 1))
    events = await asyncio.to_thread(EventServer(publisher, ["127.0.0.1:0"]).open)
    try:
        async with Client(registry.address) as client:
            await client.drain(0.0)
            with pytest.raises(ServerDraining):
                await anext(client.watch_engines())
            await client.undrain()
            assert (await anext(client.watch_engines())).state_begins
        async with Client(index.address) as client:
            await client.drain(0.0)
            await client.undrain()
            assert list(await client.list_sources()) == []
        async with Client(events.address) as client:
            await client.drain(0.0)
            await client.undrain()
            assert await client.health("kvgrpc.v1.EventService") == "SERVING"
            assert [stream.engine for stream in await client.list_streams()] == ["E"]
    finally:
        for each in (events, index, registry):
            await asyncio.to_thread(each.close)
        publisher.shutdown()
