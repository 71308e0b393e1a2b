"""hostile.*: how long the largest legal request keeps a server's event loop to itself, beside an ordinary one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows.rooms import settle

REGISTER, FORGETS, STOPS = "hostile.register", "hostile.forgets", "hostile.stops"
# A heartbeat of a session comes each 300 ms; a peer is given up after ten of them.
MOST_MS = 100.0
FRAME_ROOMS = 65_536
PAGES, PAGE_BYTES = 16, 4_096
SERVER = "server"


def benchmarks(plan: Plan) -> list[Benchmark]:
    def row(name: str, open_server: Any, ask: Any) -> Benchmark:
        metric = Metric(name, "ms", "lower", "an ordinary one", Target(value=MOST_MS))
        return Benchmark((metric,), lambda: _Side(name, open_server, ask, True), lambda: _Side(name, open_server, ask))

    return [
        row(REGISTER, _open_registry, _register),
        row(FORGETS, _open_prefill, _forget),
        row(STOPS, _open_prefill, _stop),
    ]


class _Side:
    """A server, whose loop is watched, and a caller, in a process each."""

    def __init__(self, name: str, open_server: Any, ask: Any, largest: bool = False) -> None:
        self._name, self._ask, self._largest = name, ask, largest
        self._server, self._caller = Worker(f"{name}-server"), Worker(f"{name}-caller")
        self._address = self._server.call(open_server)

    def turn(self) -> Figures:
        self._server.call(_watch)
        self._caller.call(self._ask, self._address, self._largest)
        return {self._name: self._server.call(_longest_ms)}

    def peak_rss(self) -> int:
        return self._server.peak_rss() + self._caller.peak_rss()

    def close(self) -> None:
        self._caller.close()
        self._server.close()


def _watch(desk: Desk) -> None:
    """From now on the longest time between two looks of a task that looks each millisecond is kept."""
    from kvgrpc.rpc.loop import LoopThread

    longest = desk.items["longest"] = [0.0]

    async def look() -> None:
        before = time.perf_counter()
        while desk.items["longest"] is longest:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest[0], before = max(longest[0], now - before), now

    LoopThread.shared().spawn(look(), "longest-turn")


def _longest_ms(desk: Desk) -> float:
    time.sleep(0.2)  # the turn that answered may not be over
    return float(desk.items["longest"][0]) * 1000


def _open_registry(desk: Desk) -> str:
    from kvgrpc.server import RegistryServer

    server = desk.items[SERVER] = RegistryServer(["127.0.0.1:0"], lease_ttl=600.0).open()
    settle()
    return server.address


def _register(desk: Desk, address: str, largest: bool) -> None:
    """75 rows of 4,000 regions, no two pools alike: 3.7 MiB; or 8 rows of 64 regions."""
    import grpc

    from kvgrpc.v1 import common_pb2
    from kvgrpc.v1 import registry_service_pb2 as pb
    from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

    rows, regions = (75, 4_000) if largest else (8, 64)
    desk.items["epoch"] = epoch = desk.items.get("epoch", 0) + 1
    request = pb.RegisterRequest()
    for tp in range(rows):
        row = request.rows.add(
            rank=common_pb2.RankRef(rank=common_pb2.RankId(engine="P", tp=tp), epoch=epoch),
            role=common_pb2.ROLE_PREFILL,
            layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=rows),
            endpoints=pb.Endpoints(grpc="127.0.0.1:9"),
            data_plane="shm",
        )
        pool = row.pools.add(name="kv", kind=common_pb2.POOL_KIND_KV, page_tokens=1, pages=8)
        pool.location = f"cpu:{tp}.{epoch}"
        for layer in range(regions):
            pool.regions.add(layer=layer, component="kv", page_stride_bytes=1, page_bytes=1)
    with grpc.insecure_channel(address) as channel:
        assert len(RegistryServiceStub(channel).Register(request, timeout=60).leases) == rows


def _open_prefill(desk: Desk) -> str:
    import kvgrpc.dataplane
    from kvgrpc.model import Pool, PoolKind, Region, Role
    from kvgrpc.server import RankConfig, open_rank

    plane: Any = kvgrpc.dataplane.open_plane("shm")
    region = Region(0, "kv", plane.allocate(PAGES * PAGE_BYTES), PAGE_BYTES, PAGE_BYTES)
    pool = Pool("kv", PoolKind.KV, 16, PAGES, "x", (region,))
    desk.items[SERVER] = open_rank(RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), data_plane=plane))
    settle()
    return str(desk.items[SERVER].address)


def _forget(desk: Desk, address: str, largest: bool) -> None:
    from kvgrpc.v1 import transfer_service_pb2 as pb

    _session(address, lambda: pb.SessionRequest(forget_rooms=range(1, FRAME_ROOMS if largest else 9)))


def _stop(desk: Desk, address: str, largest: bool) -> None:
    from kvgrpc.v1 import transfer_service_pb2 as pb

    def frame() -> Any:
        rooms = range(1, FRAME_ROOMS if largest else 9)
        return pb.SessionRequest(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_STOP) for room in rooms])

    _session(address, frame)


def _session(address: str, frame: Callable[[], Any]) -> None:
    """Says hello, sends the frame, and a room behind it that is answered when all of the frame was applied."""
    import grpc

    from kvgrpc.model import Layout, Pool, PoolKind, RankId, RankRef, Region, new_epoch
    from kvgrpc.v1 import transfer_service_pb2 as pb
    from kvgrpc.v1.server_service_pb2 import GetServerInfoRequest
    from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
    from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
    from kvgrpc.wire import layout_to_pb, pool_to_pb, rank_ref_to_pb

    last, answered = 2**62, threading.Event()
    pool = Pool("kv", PoolKind.KV, 16, PAGES, "x", (Region(0, "kv", 4096, PAGE_BYTES, PAGE_BYTES),))
    with grpc.insecure_channel(address) as channel:
        hello = pb.Hello(
            stream=1,
            layout=layout_to_pb(Layout()),
            pools=[pool_to_pb(pool)],
            data_plane="shm",
            data_plane_address=b"{}",
            expected=pb.CachePart(layer_start=0, layer_count=1),
        )
        hello.to.CopyFrom(ServerServiceStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=10).rank)
        hello.opener.CopyFrom(rank_ref_to_pb(RankRef(RankId("D"), new_epoch())))

        def requests() -> Any:
            yield pb.SessionRequest(hello=hello)
            yield frame()
            yield pb.SessionRequest(rooms=[pb.DecodeRoom(room=last, want=pb.WANT_STOP)])
            answered.wait(60)

        for message in TransferServiceStub(channel).Session(requests(), timeout=60):
            if message.HasField("goodbye"):
                raise AssertionError(f"the session was ended: {message.goodbye}")
            if any(room.room == last for room in message.rooms):
                answered.set()
                return
