"""A registry of 100,000 ranks in one process without sockets: what each rank, renewal, change and reader costs.

Each rank registers by itself and has a lease of its own, as engines' ranks do.

``python -m benchmarks.scale [ranks]``; docs/scale.md reckons with its figures. Times are of the CPU.
``--etcd [ranks]``: what one etcd takes of them instead (scale_etcd.py), of 4,000 ranks unless told.
``--readers [readers]``: what each idle Watch of a stream of events costs its publisher.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import grpc
import psutil

from benchmarks.scale_etcd import measure_etcd
from kvgrpc.events import EventServicer, open_publisher
from kvgrpc.model import Layout, Pool, PoolKind, RankId, RankRef, Region, Role
from kvgrpc.registry.feed import Feed
from kvgrpc.registry.model import Endpoints, EngineFilter, RankRow
from kvgrpc.registry.store.etcd.v1 import etcd_pb2
from kvgrpc.registry.store.memory import MemoryRegistry, random_lease_ids
from kvgrpc.registry.wire import PoolCache, row_to_pb, rows_to_register
from kvgrpc.rpc.interceptors import Admission, CallLimits, interceptors_of
from kvgrpc.rpc.options import OWN_CONNECTION, SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1 import event_service_pb2 as events_pb
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub, add_EventServiceServicer_to_server

RANKS, RANKS_OF_ETCD, READERS, TP, DP, REGIONS = 100_000, 4_000, 2_000, 8, 64, 64


def rows_of(ranks: int) -> Iterator[RankRow]:
    """Engines of 64 x 8 ranks, 8 on a node."""
    regions = tuple(Region(layer, "kv", 0, 32_768, 32_768) for layer in range(REGIONS))
    pool = Pool("kv", PoolKind.KV, 16, 4_096, "bfloat16", regions, "token,head,dim", 8, 0, 1, "cuda:0")
    layout = Layout(dp=DP, tp=TP)
    for node in range(ranks // TP):
        engine, dp = divmod(node, DP)
        for tp in range(TP):
            yield RankRow(
                RankRef(RankId(f"engine-{engine}", dp=dp, tp=tp), 1_700_000_000_000_000 + node),
                Role.PREFILL,
                Endpoints(f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}:{40_000 + tp}"),
                layout,
                (pool,),
                "mooncake",
            )


async def measure(ranks: int) -> None:
    process, pools = psutil.Process(), PoolCache()
    requests = [pb.RegisterRequest(rows=[row_to_pb(row, pools)]).SerializeToString() for row in rows_of(ranks)]
    registry = MemoryRegistry(
        clock=time.monotonic,
        registry_id="r",
        lease_ids=random_lease_ids(),
        ttl=3_600.0,
        max_rows=ranks,
        max_engines=ranks,
    )
    pools, before, began, leases = PoolCache(), process.memory_info().rss, time.process_time(), []
    for request in requests:
        rows = list(rows_to_register(pb.RegisterRequest.FromString(request), pools, peer_is_local=True))
        leases += [lease.lease_id for lease in registry.register(rows)]
    seconds = time.process_time() - began
    say("register, decoded and checked", seconds / ranks * 1e6, "us a rank")
    say("memory", (process.memory_info().rss - before) / ranks, "B a rank")
    say("keepalive message", len(pb.KeepAliveRequest(lease_ids=leases[:1]).SerializeToString()), "B")
    began = time.process_time()
    for lease in leases:
        registry.keep_alive([lease])
    say("renew", (time.process_time() - began) / ranks * 1e6, "us a lease, without gRPC")
    registry.table.take_changes()
    for pooled in (False, True):
        feed = Feed(EngineFilter(pools=pooled), lambda: registry.table, pools)
        began = time.process_time()
        messages, _ = await feed.behind(-1)
        seconds, size = time.process_time() - began, sum(map(len, messages))
        what = "full state with pools" if pooled else "full state without pools"
        say(what, size / ranks, f"B a rank, {len(messages)} messages, encoded once in {seconds:.2f} s")
    row = pb.RegisterRequest.FromString(requests[0]).rows[0]
    stored = etcd_pb2.StoredRow(index=7, row=row.SerializeToString())
    say("value of a row in etcd", stored.ByteSize(), f"B with one pool of {REGIONS} regions")
    changed = registry.table.engine("engine-0")
    assert changed is not None
    feed = Feed(EngineFilter(pools=False), lambda: registry.table, pools)
    _, position = await feed.behind(-1)
    began = time.process_time()
    for number in range(1_000):
        row_now = changed.rows()[number % 8]
        newer = RankRow(
            RankRef(row_now.ref.rank, row_now.ref.epoch + 1),
            row_now.role,
            row_now.endpoints,
            row_now.layout,
            row_now.pools,
            row_now.data_plane,
        )
        registry.register([newer])
        feed.publish(registry.table.take_changes())
        told, position = await feed.behind(position)
    say("replace a rank and encode the change once", (time.process_time() - began) / 1_000 * 1e6, "us")
    say("a change on the wire", len(told[-1]), "B a reader")


async def measure_readers(readers: int) -> None:
    """Readers that have read all, 100 on a connection; memory of this process, which has both ends."""
    rank = RankRef(RankId("engine"), 1)
    publisher = open_publisher({"publisher": "null"}, rank)
    assert publisher.stream is not None
    admission = Admission(CallLimits(watches_per_caller=readers))
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity(), admission), options=SERVER_OPTIONS)
    servicer = EventServicer([publisher.stream], max_watches=readers)
    add_EventServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    process, calls, channels = psutil.Process(), [], []
    before = process.memory_info().rss
    for number in range(readers):
        if number % 100 == 0:
            channels.append(grpc.aio.insecure_channel(address, options=OWN_CONNECTION))
        calls.append(EventServiceStub(channels[-1]).Watch(events_pb.WatchRequest(mode=events_pb.WATCH_MODE_TAIL)))
    for call in calls:
        await call.read()
    assert servicer.watches == readers
    say("memory of a Watch, both its ends", (process.memory_info().rss - before) / readers, "B a reader")
    began = time.process_time()
    await asyncio.sleep(10.0)  # heartbeats, one a second
    say("heartbeats, both ends", (time.process_time() - began) / 10 / readers * 1e6, "us a second and reader")
    for channel in channels:
        await channel.close()
    await server.stop(0)
    publisher.shutdown()


def say(what: str, value: float, unit: str) -> None:
    print(f"{what:<55} {value:12,.1f} {unit}", flush=True)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if "--etcd" in sys.argv[1:]:
        asyncio.run(measure_etcd(list(rows_of(*(given or [RANKS_OF_ETCD]))), say))
    elif "--readers" in sys.argv[1:]:
        asyncio.run(measure_readers(*(given or [READERS])))
    else:
        asyncio.run(measure(*(given or [RANKS])))
