"""An index of a fleet that a registry announces: how soon all of it is followed, what it weighs, what it costs idle.

``python -m benchmarks.announced [--engines 1000] [--dp 30]`` after ``make native``. One process serves the streams of
all dp ranks at one address (``clients/rust/index/examples/fleet.rs``); the index hears of them by one WatchEngines. A
registry leaves as many of its 65,536 rows to others as a host has, so the ranks register as two, over IPv4 and over
IPv6: 48,000 is the most.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import grpc
import psutil

from benchmarks.large_index import asked
from benchmarks.rows.native_index import fleet, native
from kvgrpc.client import SyncClient
from kvgrpc.model import Layout, ModelIdentity, RankId, RankRef, Role
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.registry.wire import MAX_ROWS_PER_REQUEST, row_to_pb
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.etcd import free_port
from tests.support.waiting import wait_until

BLOCKS, LONG_SECONDS, IDLE_SECONDS = 64, 900.0, 10.0


def rows(engines: int, dp_ranks: int, address: str) -> list[RankRow]:
    return [
        RankRow(
            RankRef(RankId(f"engine{engine}", dp=dp), 1),
            Role.PREFILL,
            Endpoints(address),
            Layout(dp=dp_ranks),
            model=ModelIdentity("made-up"),
            serves_events=True,
        )
        for engine in range(engines)
        for dp in range(dp_ranks)
    ]


def register_from_two_hosts(port: int, announced: list[RankRow]) -> None:
    first = 2 * len(announced) // 3
    register(f"127.0.0.1:{port}", announced[:first])
    register(f"[::1]:{port}", announced[first:])


def register(registry: str, announced: list[RankRow]) -> None:
    with grpc.insecure_channel(registry) as channel:
        stub = RegistryServiceStub(channel)
        for begin in range(0, len(announced), MAX_ROWS_PER_REQUEST):
            some = announced[begin : begin + MAX_ROWS_PER_REQUEST]
            stub.Register(registry_service_pb2.RegisterRequest(rows=[row_to_pb(row, None) for row in some]))


def counts(client: SyncClient) -> dict[pb.IndexSourceState.ValueType, int]:
    """How many caches are in which state."""
    return client.list_sources(states=[pb.INDEX_SOURCE_STATE_DOUBTFUL]).counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--dp", type=int, default=30, help="dp ranks of each")
    options = parser.parse_args()
    caches = options.engines * options.dp
    port = free_port()
    registry = RegistryServer([f"127.0.0.1:{port}", f"[::1]:{port}"], lease_ttl=600.0).open()
    made = fleet(BLOCKS, 0, "chains", engines=caches, dp_ranks=options.dp)
    began = time.monotonic()
    one_more, *announced = rows(options.engines, options.dp, made.address)
    register_from_two_hosts(port, [one_more, *announced])
    print(f"{options.engines} engines, {caches} dp ranks registered in {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    index = native("", "--registry", registry.address)
    process = psutil.Process(index.pid)
    with SyncClient(index.address) as client:
        wait_until(lambda: sum(counts(client).values()) == caches, LONG_SECONDS)
        print(f"all are followed after {time.monotonic() - began:.1f} s", end=", ")
        wait_until(lambda: counts(client).get(pb.INDEX_SOURCE_STATE_CURRENT, 0) == caches, LONG_SECONDS)
    taken = sum(process.cpu_times()[:2])
    print(f"exact after {time.monotonic() - began:.1f} s ({taken:.1f} s of CPU)")
    print(f"{index.rss() / 2**20:.0f} MiB, {process.num_fds()} descriptors", end=", ")
    print(f"the slowest of 100 questions {asked(index.address):.2f} ms")
    before, of_registry = sum(process.cpu_times()[:2]), sum(psutil.Process().cpu_times()[:2])
    time.sleep(IDLE_SECONDS)
    idle = (sum(process.cpu_times()[:2]) - before) / IDLE_SECONDS
    registrys = (sum(psutil.Process().cpu_times()[:2]) - of_registry) / IDLE_SECONDS
    print(f"idle: {idle:.2f} of a core for heartbeats of all, {registrys:.3f} of the registry's process")
    began = time.monotonic()
    register(f"[::1]:{port}", [replace(one_more, ref=RankRef(RankId("one-more"), 1), layout=Layout())])
    with SyncClient(index.address) as client:
        wait_until(lambda: sum(counts(client).values()) == caches + 1, LONG_SECONDS)
    print(f"one more engine is followed after {time.monotonic() - began:.2f} s")
    index.close()
    made.close()
    registry.close()


if __name__ == "__main__":
    main()
