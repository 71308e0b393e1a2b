"""registry.*: a whole cluster registers, and everybody who follows it sees a change. ``limit.registry.*``: the same
connections, calls and streams by gRPC alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil

from benchmarks.baselines.bootstrap import BootstrapServer
from benchmarks.baselines.echo import EchoServer, questions_and_streams
from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker

STORM = "registry.storm"
FAN_OUT = "registry.storm.fan_out"
MEMORY = "registry.storm.bytes_per_rank"
KEEPALIVE = "registry.keepalive"
LIMITS = {STORM: f"limit.{STORM}", KEEPALIVE: f"limit.{KEEPALIVE}"}
RANKS_PER_NODE = 8
REGIONS = 64
AT_ONCE = 64
CONNECTIONS = 50
SERVER, RANKS, LOOP = "server", "ranks", "loop"
# Of about the bytes that a rank's row and its lease have.
ROW, LEASE = bytes(2_000), bytes(12)
# As ranks with a TTL of 10 s renew; the leases themselves live longer, so that a slow machine loses none.
RENEW_SECONDS, LEASE_SECONDS = 10.0 / 3, 120.0
KEEPALIVE_SECONDS = 3.0


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [
        Benchmark(
            metrics=(
                Metric(STORM, "ranks/s", "higher", "seed HTTP bootstrap", Target(ratio=1)),
                Metric(FAN_OUT, "s", "lower", "seed: each asks once", Target(value=1)),
                Metric(MEMORY, "B", "lower", "seed HTTP bootstrap"),
                Metric(KEEPALIVE, "renewals/s", "higher", "seed: registers again", Target(ratio=1)),
            ),
            ours=lambda: Ours(plan),
            baseline=lambda: Seed(plan),
            warm_ups=0,
        ),
        Benchmark(
            metrics=(
                Metric(LIMITS[STORM], "ranks/s", "higher", "seed HTTP bootstrap"),
                Metric(LIMITS[KEEPALIVE], "renewals/s", "higher", "seed: registers again"),
            ),
            ours=lambda: Bare(plan),
            baseline=lambda: Seed(plan, LIMITS),
            warm_ups=0,
        ),
    ]


class _Storm:
    """A server and the cluster, in a process each. Each turn begins with an empty server. ``names``: of the figures
    that are wanted, where they are others."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        open_server: Any,
        register: Any,
        follow: Any,
        renew: Any,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._plan = plan
        self._open, self._register, self._follow, self._renew = open_server, register, follow, renew
        self._name = name
        self._names = names or {name: name for name in (STORM, FAN_OUT, MEMORY, KEEPALIVE)}
        self._peak = 0

    def turn(self) -> Figures:
        ranks = self._plan.registry_ranks
        server, cluster = Worker(f"{self._name}-server"), Worker(f"{self._name}-cluster")
        try:
            address = server.call(self._open)
            before = psutil.Process(server.pid).memory_info().rss
            seconds = cluster.call(self._register, address, ranks)
            grown = psutil.Process(server.pid).memory_info().rss - before
            follows = FAN_OUT in self._names
            fan_out = cluster.call(self._follow, address, self._plan.registry_watchers, ranks) if follows else 0.0
            renewed = cluster.call(self._renew, address, ranks)
            self._peak = max(self._peak, server.peak_rss() + cluster.peak_rss())
        finally:
            cluster.close()
            server.close()
        figures = {STORM: ranks / seconds, FAN_OUT: fan_out, MEMORY: max(grown, 0) / ranks, KEEPALIVE: renewed}
        return {name: figures[what] for what, name in self._names.items()}

    def peak_rss(self) -> int:
        return self._peak

    def close(self) -> None: ...


class Ours(_Storm):
    """A connection, a call of Register and a stream a rank; WatchEngines, while every rank renews; then as they can."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("kvgrpc-registry", plan, _open_ours, _register_ours, _follow_ours, _renew_streams)


class Bare(_Storm):
    """As many connections, with a question and a stream each, of a server that only answers."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("bare-grpc", plan, _open_bare, _register_bare, None, _renew_streams, LIMITS)


class Seed(_Storm):
    """One connection and PUT a rank; who wants to know asks."""

    def __init__(self, plan: Plan, names: Mapping[str, str] | None = None) -> None:
        super().__init__("seed-bootstrap", plan, _open_seed, _register_seed, _ask_seed, _renew_seed, names)


def _open_ours(desk: Desk) -> str:
    from kvgrpc.rpc.interceptors import CallLimits
    from kvgrpc.server import RegistryServer

    # All of them come from one host.
    limits = CallLimits(streams=200_000, watches_per_caller=100_000, keepalives_per_caller=100_000)
    server = desk.items[SERVER] = RegistryServer(["127.0.0.1:0"], lease_ttl=LEASE_SECONDS, call_limits=limits).open()
    return server.address


def _register_ours(desk: Desk, address: str, ranks: int) -> float:
    """Every rank dials, registers its one row and begins its stream, AT_ONCE ranks at a time; the seconds it took."""
    from kvgrpc.model import Layout, Pool, PoolKind, RankId, RankRef, Region, Role
    from kvgrpc.registry.model import Endpoints, RankRow
    from kvgrpc.registry.wire import PoolCache, row_to_pb
    from kvgrpc.rpc.dialing.channel import open_channel
    from kvgrpc.v1 import registry_service_pb2 as pb
    from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

    pools, layout = PoolCache(), Layout(dp=ranks // RANKS_PER_NODE, tp=RANKS_PER_NODE)
    regions = tuple(Region(layer, "kv", 0, 32_768, 32_768) for layer in range(REGIONS))
    pool = Pool("kv", PoolKind.KV, 16, 4_096, "bfloat16", regions, "token,head,dim", 8, 0, 1, "cuda:0")

    def request_of(number: int) -> pb.RegisterRequest:
        dp, tp = divmod(number, RANKS_PER_NODE)
        ref, endpoints = RankRef(RankId("P", dp=dp, tp=tp), 1), Endpoints(f"127.0.0.1:{1 + number % 60_000}")
        row = RankRow(ref, Role.PREFILL, endpoints, layout, (pool,), "mooncake")
        return pb.RegisterRequest(rows=[row_to_pb(row, pools)])

    async def register(request: pb.RegisterRequest) -> _Rank:
        channel = open_channel(address, own_connection=True)
        stub = RegistryServiceStub(channel)
        answer = await stub.Register(request, timeout=120)
        leases = pb.KeepAliveRequest(lease_ids=[lease.lease_id for lease in answer.leases])
        return _Rank(channel, stub.KeepAlive, leases, lambda answer: not answer.unknown_lease_ids)

    async def check() -> None:
        async with open_channel(address) as channel:
            listed = await RegistryServiceStub(channel).ListEngines(pb.ListEnginesRequest())
        assert [engine.registered_ranks for engine in listed.engines] == [ranks] and listed.engines[0].ready

    took = _register_all(desk, [partial(register, request_of(number)) for number in range(ranks)])
    desk.items[LOOP].run_until_complete(check())
    return took


def _open_bare(desk: Desk) -> str:
    server = desk.items[SERVER] = EchoServer()
    return server.address


def _register_bare(desk: Desk, address: str, ranks: int) -> float:
    async def register() -> _Rank:
        channel, ask, begin = questions_and_streams(address)
        await ask(ROW)
        return _Rank(channel, begin, LEASE, lambda answer: answer == LEASE)

    return _register_all(desk, [register] * ranks)


def _register_all(desk: Desk, registrations: Sequence[Callable[[], Awaitable[_Rank]]]) -> float:
    """Seconds until every rank is registered and was answered on its stream, AT_ONCE ranks at a time."""

    async def storm() -> float:
        free = asyncio.Semaphore(AT_ONCE)

        async def begin(register: Callable[[], Awaitable[_Rank]]) -> None:
            async with free:
                rank = await register()
                await rank.renew()
                desk.items[RANKS].append(rank)

        began = time.perf_counter()
        await asyncio.gather(*map(begin, registrations))
        return time.perf_counter() - began

    desk.items[RANKS], desk.items[LOOP] = [], asyncio.new_event_loop()
    return float(desk.items[LOOP].run_until_complete(storm()))


class _Rank:
    """A rank at its registry: a connection, and a stream on which a request is answered with what is ``right``."""

    def __init__(self, channel: Any, begin: Callable[[], Any], request: object, right: Callable[[Any], bool]) -> None:
        self.channel = channel
        self._begin, self._request, self._right = begin, request, right
        self._call = begin()

    async def renew(self) -> None:
        await self._call.write(self._request)
        assert self._right(await self._call.read())

    async def begin_anew(self) -> None:
        """On another stream: a renewal that was cancelled may have left an answer behind."""
        self._call.cancel()
        self._call = self._begin()
        await self.renew()

    async def keep(self, pause: float) -> None:
        """A message each ``pause`` seconds, from a moment of its own, for ever."""
        await asyncio.sleep(random.random() * pause)
        while True:
            await self.renew()
            await asyncio.sleep(pause)


def _follow_ours(desk: Desk, address: str, watchers: int, ranks: int) -> float:
    """From a change until every watcher, with the full state of all ranks behind it, has it."""
    from kvgrpc.model import Layout, RankId, RankRef, Role
    from kvgrpc.registry.model import Endpoints, RankRow
    from kvgrpc.registry.wire import PoolCache, row_to_pb
    from kvgrpc.rpc.dialing.channel import open_channel
    from kvgrpc.v1 import registry_service_pb2 as pb
    from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

    async def follow() -> float:
        channels = [open_channel(address, own_connection=True) for _ in range(CONNECTIONS)]
        stubs = [RegistryServiceStub(channel) for channel in channels]
        asked = pb.WatchEnginesRequest(without_pools=True)
        calls = [stubs[number % CONNECTIONS].WatchEngines(asked) for number in range(watchers)]

        async def whole_state(call: Any) -> int:
            rows = 0
            while True:
                message = await call.read()
                rows += sum(len(change.engine.rows) for change in message.changes)
                if message.state_complete:
                    return rows

        assert set(await asyncio.gather(*map(whole_state, calls))) == {ranks}
        renewing = [asyncio.create_task(rank.keep(RENEW_SECONDS)) for rank in desk.items[RANKS]]
        await asyncio.sleep(RENEW_SECONDS)

        async def change_seen(call: Any) -> None:
            while "new" not in {change.engine.name for change in (await call.read()).changes}:
                continue

        seen = asyncio.gather(*map(change_seen, calls))
        await asyncio.sleep(0.1)
        ref = RankRef(RankId("new"), 1)
        row = RankRow(ref, Role.PREFILL, Endpoints("127.0.0.1:1"), Layout(), (), "mooncake")
        began = time.perf_counter()
        await stubs[0].Register(pb.RegisterRequest(rows=[row_to_pb(row, PoolCache())]))
        await seen
        took = time.perf_counter() - began
        for task in renewing:
            task.cancel()
        ended = await asyncio.gather(*renewing, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), "a renewal failed"
        for channel in channels:
            await channel.close()
        return took

    return float(desk.items[LOOP].run_until_complete(follow()))


def _renew_streams(desk: Desk, address: str, ranks: int) -> float:
    """Renewals a second: AT_ONCE ranks at a time, one after the other, each on its own stream."""

    async def renew() -> float:
        idle = deque[_Rank](desk.items[RANKS])
        renewed, end = 0, 0.0

        async def begin_all(left: list[_Rank]) -> None:
            while left:
                await left.pop().begin_anew()

        async def some() -> None:
            nonlocal renewed
            while time.perf_counter() < end:
                rank = idle.popleft()
                await rank.renew()
                idle.append(rank)
                renewed += 1

        async def at_once(what: Callable[[], Awaitable[None]]) -> None:
            await asyncio.gather(*(what() for _ in range(min(AT_ONCE, ranks))))

        left = list(idle)
        await at_once(lambda: begin_all(left))
        began = time.perf_counter()
        end = began + KEEPALIVE_SECONDS
        await at_once(some)
        took = time.perf_counter() - began
        await asyncio.gather(*(rank.channel.close() for rank in idle))
        return renewed / took

    return float(desk.items[LOOP].run_until_complete(renew()))


def _open_seed(desk: Desk) -> str:
    server = desk.items[SERVER] = BootstrapServer()
    return server.address


def _register_seed(desk: Desk, address: str, ranks: int) -> float:
    import aiohttp

    async def storm() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)) as session:

            async def register(number: int) -> None:
                row = {
                    "role": "Prefill",
                    "tp_size": ranks,
                    "dp_size": ranks // RANKS_PER_NODE,
                    "rank_ip": "127.0.0.1",
                    "rank_port": 1 + number % 60_000,
                    "engine_rank": number,
                }
                async with session.put(f"http://{address}/route", json=row) as response:
                    assert response.status == 200

            began = time.perf_counter()
            await asyncio.gather(*(register(number) for number in range(ranks)))
            return time.perf_counter() - began

    return asyncio.run(storm())


def _renew_seed(desk: Desk, address: str, ranks: int) -> float:
    """There are no leases: who wants to be seen registers again."""
    return ranks / _register_seed(desk, address, ranks)


def _ask_seed(desk: Desk, address: str, watchers: int, ranks: int) -> float:
    """Nobody is told: everybody asks for one rank, once."""
    import aiohttp

    async def ask_all() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:

            async def ask(number: int) -> None:
                query = {"engine_rank": str(number % ranks), "target_dp_group": str(number % ranks // RANKS_PER_NODE)}
                async with session.get(f"http://{address}/route", params=query) as response:
                    assert (await response.json())["rank_ip"] == "127.0.0.1"

            began = time.perf_counter()
            await asyncio.gather(*map(ask, range(watchers)))
            return time.perf_counter() - began

    return asyncio.run(ask_all())
