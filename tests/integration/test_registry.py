"""A registry and ranks as processes of their own: the registry is killed, stopped, restarted; nobody else is."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from kvgrpc.errors import EngineNotFound, WarmingUp
from kvgrpc.model import Layout, RankId, RankRef, Role, new_epoch
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.client.resolver import Resolver
from kvgrpc.registry.model import EVERY_RANK, Endpoints, RankRow, ResolvedEngine
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

ROOT = Path(__file__).parents[2]
TTL = 3.0
KEEPALIVE = TTL / 3

REGISTRY = """
import asyncio, sys, grpc
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.memory import MemoryStore
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity

async def main():
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity()), options=SERVER_OPTIONS)
    servicer = RegistryServicer(MemoryStore(ttl=float(sys.argv[1])))
    add_registry_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:" + sys.argv[2])
    await server.start()
    await servicer.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""

# A node with some ranks of one engine; says when it is registered, and exits by itself when its parent is gone.
NODE = """
import asyncio, functools, sys
from kvgrpc.model import Layout, RankId, RankRef, Role, new_epoch
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.rpc.dialing.channel import open_channel

async def main(address, dp, ranks):
    rows = [
        RankRow(RankRef(RankId("P", dp=dp, tp=tp), new_epoch()), Role.PREFILL, Endpoints(f"127.0.0.1:{9000 + tp}"),
                Layout(dp=2, tp=ranks), data_plane="shm")
        for tp in range(ranks)
    ]
    registration = Registration(functools.partial(open_channel, own_connection=True), address, rows)
    await registration.start(20)
    print("registered", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await registration.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


class Process:
    def __init__(self, source: str, *arguments: object) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        """Its next line."""
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._popen.pid, number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(10)

    def leave(self) -> None:
        """Ends it in order, by closing its standard input."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        assert self._popen.wait(10) == 0


class Cluster:
    """One registry and two nodes with two ranks each."""

    def __init__(self, started: contextlib.ExitStack) -> None:
        self._started = started
        self.registry = self.run(REGISTRY, TTL, 0)
        self.port = self.registry.says()
        self.address = f"127.0.0.1:{self.port}"
        self.nodes = [self.run(NODE, self.address, dp, 2) for dp in range(2)]
        for node in self.nodes:
            assert node.says() == "registered"

    def run(self, source: str, *arguments: object) -> Process:
        process = Process(source, *arguments)
        self._started.callback(process.kill)
        return process

    def restart_registry(self) -> None:
        self.registry = self.run(REGISTRY, TTL, self.port)
        assert self.registry.says() == self.port


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as started:
        yield Cluster(started)


@pytest_asyncio.fixture
async def resolver() -> AsyncIterator[Resolver]:
    made = Resolver(lambda address: open_channel(address, own_connection=True))
    yield made
    await made.close()


async def engine_at(resolver: Resolver, cluster: Cluster, timeout: float = 10.0) -> ResolvedEngine:
    return await resolver.resolve(cluster.address, "P", Role.PREFILL, [EVERY_RANK], timeout)


async def test_after_kill_and_restart_all_ranks_are_back_within_one_keepalive(
    cluster: Cluster, resolver: Resolver
) -> None:
    before = await engine_at(resolver, cluster)
    assert len(before.rows) == 4
    for seconds_away in (0.5, 5.0):
        cluster.registry.kill()
        await asyncio.sleep(seconds_away)  # the outage itself
        await asyncio.to_thread(cluster.restart_registry)
        started = time.monotonic()
        after = await engine_at(resolver, cluster)
        took = time.monotonic() - started
        assert after == before
        # The promise is one keepalive; the rest is for a busy machine. A channel's own backoff would take 5 s.
        assert took < KEEPALIVE + 2.0


@pytest.mark.parametrize(
    ("ends", "keepalives"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)], ids=["killed-at-once", "hangs-two-keepalives"]
)
async def test_a_rank_says_that_its_registry_is_gone(cluster: Cluster, ends: signal.Signals, keepalives: int) -> None:
    """A dead one ends the stream; one that hangs owes the answer to the next keepalive, which has one more to come."""
    row = RankRow(
        RankRef(RankId("Q"), new_epoch()), Role.PREFILL, Endpoints("127.0.0.1:9000"), Layout(), data_plane="shm"
    )
    registration = Registration(functools.partial(open_channel, own_connection=True), cluster.address, [row])
    await registration.start(20)
    assert registration.state == "registered"
    cluster.registry.signal(ends)
    began = time.monotonic()
    while registration.state == "registered":
        assert time.monotonic() < began + 20
        await asyncio.sleep(0.005)
    took = time.monotonic() - began
    print(f"registry {ends.name}: the rank says so after {took:.2f} s of a TTL of {TTL:.0f} s")
    assert (registration.state, registration.healthy) == ("retrying", True)
    # The rest is for a busy machine.
    assert took < keepalives * KEEPALIVE + 2.0
    await registration.close()


async def test_a_registry_that_was_restarted_says_so_for_one_ttl(cluster: Cluster, resolver: Resolver) -> None:
    cluster.registry.kill()
    await asyncio.to_thread(cluster.restart_registry)
    started = time.monotonic()
    async with open_channel(cluster.address, own_connection=True) as channel:
        stub, reasons = RegistryServiceStub(channel), []
        while "ENGINE_NOT_FOUND" not in reasons and time.monotonic() - started < TTL + 20:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetEngine(pb.GetEngineRequest(engine="absent"), timeout=20)
            reasons.append(error_from(refused.value).reason.name)
            await asyncio.sleep(0.1)
    assert list(dict.fromkeys(reasons)) == ["WARMING_UP", "ENGINE_NOT_FOUND"]
    assert time.monotonic() - started > TTL - 0.6  # the registry runs a little longer than we watch it


async def test_questions_asked_while_the_registry_is_down_are_answered_when_it_is_back(
    cluster: Cluster, resolver: Resolver
) -> None:
    cluster.registry.kill()
    asking = [asyncio.ensure_future(engine_at(resolver, cluster, 20)) for _ in range(50)]
    await asyncio.sleep(0.5)  # the outage itself
    await asyncio.to_thread(cluster.restart_registry)
    answers = await asyncio.gather(*asking)
    assert all(answer.ready and len(answer.rows) == 4 for answer in answers)


async def test_a_node_that_was_killed_is_missing_after_one_ttl_and_its_successor_takes_over_at_once(
    cluster: Cluster, resolver: Resolver
) -> None:
    before = await engine_at(resolver, cluster)
    cluster.nodes[0].kill()
    successor = cluster.run(NODE, cluster.address, 0, 2)
    assert await asyncio.to_thread(successor.says) == "registered"
    after = await engine_at(resolver, cluster)
    assert [at.ref.epoch > old.ref.epoch for at, old in zip(after.rows, before.rows, strict=True)] == [True] * 2 + [
        False
    ] * 2
    successor.kill()
    killed = time.monotonic()
    while (await resolver.resolve(cluster.address, "P", Role.PREFILL, timeout=20, wait_ready=False)).ready:
        assert time.monotonic() - killed < TTL + 20
        await asyncio.sleep(0.05)
    assert time.monotonic() - killed > TTL - KEEPALIVE - 0.1
    missing = "unknown"
    while missing == "unknown":  # the registry answers 250 ms before the deadline: late on a busy machine
        assert time.monotonic() - killed < TTL + 20
        with pytest.raises(EngineNotFound) as refused:
            await engine_at(resolver, cluster, 2.0)
        missing = refused.value.metadata["missingRanks"]
    assert missing == "dp0/pp0/cp0/tp0, dp0/pp0/cp0/tp1"


async def test_a_node_that_leaves_in_order_is_gone_at_once(cluster: Cluster, resolver: Resolver) -> None:
    await engine_at(resolver, cluster)
    await asyncio.to_thread(cluster.nodes[1].leave)
    with pytest.raises((EngineNotFound, WarmingUp)):  # the registry itself is young
        await engine_at(resolver, cluster, 2.0)


async def test_a_registry_that_was_stopped_for_longer_than_the_ttl_expires_nobody(
    cluster: Cluster, resolver: Resolver
) -> None:
    before = await engine_at(resolver, cluster)
    cluster.registry.signal(signal.SIGSTOP)
    await asyncio.sleep(TTL * 1.5)  # the time that it is stopped
    cluster.registry.signal(signal.SIGCONT)
    end = time.monotonic() + 2 * TTL
    while time.monotonic() < end:
        found = await resolver.resolve(cluster.address, "P", Role.PREFILL, [EVERY_RANK], 10, wait_ready=False)
        assert found == before
        await asyncio.sleep(0.02)
