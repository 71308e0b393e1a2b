"""Callers of a registry that ask for as much as they may, and for more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import MAX_EPOCH, MAX_REGIONS, Layout, RankRef, new_epoch
from kvgrpc.registry import wire
from kvgrpc.registry.servicer import RegistryServicer
from kvgrpc.registry.store.memory import EXPIRED_AT_ONCE, MemoryRegistry, MemoryStore
from kvgrpc.registry.wire import MAX_POOLS
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.registry_builders import HandClock, pool, registry, row
from tests.support.registry_serving import Served
from tests.support.serving import failure
from tests.support.waiting import until


def registration(rows: int, regions: int) -> pb.RegisterRequest:
    """No two pools of it are alike."""
    request, epoch = pb.RegisterRequest(), new_epoch()
    for tp in range(rows):
        row = request.rows.add(
            rank=common_pb2.RankRef(rank=common_pb2.RankId(engine="P", tp=tp), epoch=epoch),
            role=common_pb2.ROLE_PREFILL,
            layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=rows),
            endpoints=pb.Endpoints(grpc="127.0.0.1:9"),
            data_plane="shm",
        )
        pool = row.pools.add(name="kv", kind=common_pb2.POOL_KIND_KV, page_tokens=1, pages=8, location=f"cpu:{tp}")
        for layer in range(regions):
            pool.regions.add(layer=layer, component="kv", page_stride_bytes=1, page_bytes=1)
    return request


async def test_the_largest_registration_takes_many_turns_of_the_loop_and_others_have_theirs_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_this_turn, turns = 0, list[int]()
    decode = wire.PoolCache.decode

    def end_of_turn() -> None:
        nonlocal in_this_turn
        turns.append(in_this_turn)
        in_this_turn = 0

    def counted(self: wire.PoolCache, message: common_pb2.PagePool, path: str) -> Any:
        nonlocal in_this_turn
        if not in_this_turn:
            asyncio.get_running_loop().call_soon(end_of_turn)
        in_this_turn += len(message.regions)
        return decode(self, message, path)

    monkeypatch.setattr(wire.PoolCache, "decode", counted)
    request = registration(rows=75, regions=4_000)
    assert 3 << 20 < request.ByteSize() < 4 << 20
    served = await Served().start()
    async with open_channel(served.address) as channel:
        assert len((await RegistryServiceStub(channel).Register(request, timeout=60)).leases) == 75
    await served.stop()
    assert sum(turns) == 300_000
    assert max(turns) <= 2 * 4_000  # a row alone takes longer than a piece of a turn may


async def test_the_largest_renewal_takes_many_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed, keep_alive = list[int](), MemoryStore.keep_alive

    async def counted(self: MemoryStore, lease_ids: Sequence[int]) -> list[int]:
        renewed.append(len(lease_ids))
        return await keep_alive(self, lease_ids)

    served = await Served().start()
    async with open_channel(served.address) as channel:
        stub = RegistryServiceStub(channel)
        (lease,) = (await stub.Register(registration(1, 1), timeout=20)).leases
        monkeypatch.setattr(MemoryStore, "keep_alive", counted)
        nobodys = [number for number in range(1, wire.MAX_LEASES_PER_REQUEST + 1) if number != lease.lease_id]
        call: Any = stub.KeepAlive(timeout=60)
        await call.write(pb.KeepAliveRequest(lease_ids=[*nobodys[1:], lease.lease_id]))
        assert list((await call.read()).unknown_lease_ids) == nobodys[1:]
        await call.done_writing()
    await served.stop()
    assert sum(renewed) == len(nobodys) and max(renewed) <= 4_096


async def test_leases_that_run_out_at_once_take_many_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32,768, as many as one caller may have, one turn took 0.3 s."""
    ended, expire = list[int](), MemoryRegistry.expire

    def counted(self: MemoryRegistry) -> tuple[RankRef, ...]:
        found = expire(self)
        ended.append(len(found))
        return found

    monkeypatch.setattr(MemoryRegistry, "expire", counted)
    served = await Served(ttl=0.6).start()
    async with open_channel(served.address) as channel:
        leases = (await RegistryServiceStub(channel).Register(registration(1_024, 1), timeout=20)).leases
    await until(lambda: not served.registry.rows)
    await served.stop()
    assert sum(ended) == len(leases) == 1_024 and max(ended) <= EXPIRED_AT_ONCE


async def test_a_deregistration_of_many_ends_no_more_of_them_than_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the table ended EXPIRED_AT_ONCE more, and it looked once a rank: all 32,768 in one turn."""
    looks, expire = list[None](), MemoryRegistry.expire

    def counted(self: MemoryRegistry) -> tuple[RankRef, ...]:
        looks.append(None)
        return expire(self)

    monkeypatch.setattr(MemoryRegistry, "expire", counted)
    servicer = RegistryServicer(MemoryStore(ttl=600.0))  # not started: no tick looks meanwhile
    request = pb.DeregisterRequest(ranks=[row.rank for row in registration(64, 1).rows])
    context: Any = None
    assert not (await servicer.Deregister(request, context)).removed
    assert len(looks) <= 4


def test_ranks_that_come_back_with_other_pools_are_compared_with_each_pool_once() -> None:
    """Each pool was looked for in each pool of all rows of the request: nine seconds of the loop for this one, of
    200 KB, and ten minutes for the largest."""
    layout, names = Layout(tp=121), [str(number) for number in range(MAX_POOLS)]
    known = registry(HandClock())

    def come(epoch: int, page_tokens: int) -> None:
        pools = tuple(pool(name, page_tokens=page_tokens, layers=1) for name in names)
        known.register([row(tp=tp, epoch=epoch, layout=layout, pools=pools) for tp in range(120)])

    come(1, 16)
    known.register([row(tp=120, layout=layout, pools=(pool("other"),))])
    began = time.monotonic()
    come(2, 32)
    assert time.monotonic() - began < 2.0
    assert known.rows == 121


@pytest.mark.parametrize("ahead", [11 * 60, None])
async def test_an_epoch_far_ahead_is_refused_and_its_place_stays_free(ahead: int | None) -> None:
    """It would fence every later incarnation of that rank, for good."""
    request = registration(1, 1)
    epoch = MAX_EPOCH if ahead is None else round((time.time() + ahead) * 1e6)
    request.rows[0].rank.epoch = epoch
    served = await Served().start()
    async with open_channel(served.address) as channel:
        stub = RegistryServiceStub(channel)
        error = await failure(stub.Register(request, timeout=20))
        assert isinstance(error, InvalidRequest)
        assert (error.metadata["field"], error.metadata["value"]) == ("rows[0].rank.epoch", str(epoch))
        assert len((await stub.Register(registration(1, 1), timeout=20)).leases) == 1
    await served.stop()


async def test_more_regions_than_a_rank_may_have_are_refused_before_they_are_looked_at() -> None:
    served = await Served().start()
    async with open_channel(served.address) as channel:
        error = await failure(RegistryServiceStub(channel).Register(registration(2, MAX_REGIONS + 1), timeout=20))
    await served.stop()
    assert isinstance(error, InvalidRequest) and error.metadata["field"] == "rows[0].pools.regions"
