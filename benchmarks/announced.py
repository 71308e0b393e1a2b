"""An index of a fleet that a registry announces: how soon all of it is followed, what it weighs, what it costs idle.

``python -m benchmarks.announced [--engines 1000] [--dp 30]`` after ``make native``. One process serves the streams of
all dp ranks at one address (``clients/rust/index/examples/fleet.rs``); the index hears of them by one WatchEngines. A
registry leaves as many of its 65,536 rows to others as a host has, so the ranks register as four hosts of loopback:
61,440 is the most.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import psutil

from benchmarks.large_index import asked
from benchmarks.rows.native_index import fleet, native
from kvgrpc.client import SyncClient
from kvgrpc.model import Layout, ModelIdentity, RankId, RankRef, Role
from kvgrpc.registry.acceptance import MAX_ROWS
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.registry.wire import MAX_ROWS_PER_REQUEST, row_to_pb
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.ports import free_port
from tests.support.waiting import wait_until

BLOCKS, LONG_SECONDS, IDLE_SECONDS, LOOK_SECONDS = 64, 900.0, 10.0, 0.02
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


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


def register_from_hosts(port: int, announced: list[RankRow]) -> None:
    """Each host registers as many as it leaves to the others."""
    left = MAX_ROWS
    for host in HOSTS:
        some, announced = announced[: left // 2], announced[left // 2 :]
        left -= len(some)
        with by_host(host, port) as registry:
            register(registry, some)
    assert not announced, f"{len(announced)} rows more than these hosts may register"


@contextlib.contextmanager
def by_host(host: str, port: int) -> Iterator[str]:
    """The address of a relay to a port of this machine: one call's connection comes from ``host`` there."""
    with socket.create_server((host, 0)) as listening:
        threading.Thread(target=relay, args=(listening, host, port), daemon=True).start()
        yield f"{host}:{listening.getsockname()[1]}"


def relay(listening: socket.socket, host: str, port: int) -> None:
    caller, _ = listening.accept()
    called = socket.create_connection(("127.0.0.1", port), source_address=(host, 0))
    with caller, called:
        back = threading.Thread(target=copy, args=(called, caller), daemon=True)
        back.start()
        copy(caller, called)
        back.join()


def copy(said: socket.socket, to: socket.socket) -> None:
    """Until whoever speaks ends."""
    with contextlib.suppress(OSError):
        while some := said.recv(1 << 16):
            to.sendall(some)
        to.shutdown(socket.SHUT_WR)


def register(registry: str, announced: list[RankRow]) -> None:
    with grpc.insecure_channel(registry) as channel:
        stub = RegistryServiceStub(channel)
        for begin in range(0, len(announced), MAX_ROWS_PER_REQUEST):
            some = announced[begin : begin + MAX_ROWS_PER_REQUEST]
            stub.Register(registry_service_pb2.RegisterRequest(rows=[row_to_pb(row, None) for row in some]))


def until_all(client: SyncClient, caches: int, states: list[pb.IndexSourceState.ValueType] | None = None) -> None:
    """Waits until so many caches are in these states (none: in any). Each look goes over all of them: there are few."""

    def all_of_them() -> bool:
        time.sleep(LOOK_SECONDS)
        counts = client.list_sources(states=[pb.INDEX_SOURCE_STATE_DOUBTFUL]).counts
        return sum(count for state, count in counts.items() if not states or state in states) == caches

    wait_until(all_of_them, LONG_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--dp", type=int, default=30, help="dp ranks of each")
    options = parser.parse_args()
    caches = options.engines * options.dp
    port = free_port()
    registry = RegistryServer([f"127.0.0.1:{port}"], lease_ttl=600.0).open()
    made = fleet(BLOCKS, 0, "chains", engines=caches, dp_ranks=options.dp)
    began = time.monotonic()
    one_more, *announced = rows(options.engines, options.dp, made.address)
    register_from_hosts(port, [one_more, *announced])
    print(f"{options.engines} engines, {caches} dp ranks registered in {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    index = native("", "--registry", registry.address)
    process = psutil.Process(index.pid)
    with SyncClient(index.address) as client:
        until_all(client, caches)
        print(f"all are followed after {time.monotonic() - began:.1f} s", end=", ")
        until_all(client, caches, [pb.INDEX_SOURCE_STATE_CURRENT])
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
    with by_host(HOSTS[-1], port) as by_last:
        register(by_last, [replace(one_more, ref=RankRef(RankId("one-more"), 1), layout=Layout())])
    with SyncClient(index.address) as client:
        until_all(client, caches + 1)
    print(f"one more engine is followed after {time.monotonic() - began:.2f} s")
    index.close()
    made.close()
    registry.close()


if __name__ == "__main__":
    main()
