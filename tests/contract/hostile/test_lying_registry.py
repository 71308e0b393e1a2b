"""A registry that answers whatever it likes: a request may name one, and decode asks it on the loop of its rooms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvgrpc.errors import Failure, InvalidRequest, Reason
from kvgrpc.model import MAX_ENGINE_RANKS, MAX_REGIONS, Role
from kvgrpc.registry import wire
from kvgrpc.registry.client.resolver import Resolver
from kvgrpc.registry.model import MAX_LABELS, ResolvedEngine
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.runtime.resolve import MOST_PREFILL_RANKS
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from tests.support.counted_turns import CountedTurns
from tests.support.hostile.honest_pair import ROOMS
from tests.support.rank_host import RankHost
from tests.support.registry_serving import dial
from tests.support.transfer_peers import receiver_of
from tests.support.waiting import wait_until

ROWS = 20_000


class Liar(RegistryServiceServicer):
    def __init__(self) -> None:
        self.engine = pb.Engine()
        self.address = ""

    async def ResolveRanks(self, request: pb.ResolveRanksRequest, context: object) -> pb.ResolveRanksResponse:
        return pb.ResolveRanksResponse(engine=self.engine)


@pytest_asyncio.fixture
async def liar() -> AsyncIterator[Liar]:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    made = Liar()  # type: ignore[abstract]
    add_RegistryServiceServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(0)


def engine(
    rows: int = 1,
    change: Callable[[pb.Engine], Any] = lambda made: None,
    *,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
) -> pb.Engine:
    layout = common_pb2.Layout(dp=dp, pp=pp, cp=cp, tp=tp)
    made = pb.Engine(name="P", role=common_pb2.ROLE_PREFILL, layout=layout, ready=True)
    ref = common_pb2.RankRef(rank=common_pb2.RankId(engine="P"), epoch=1)
    nowhere = pb.Endpoints(grpc="127.0.0.1:9")  # nobody listens
    made.rows.extend([pb.RankRow(rank=ref, role=common_pb2.ROLE_PREFILL, layout=layout, endpoints=nowhere)] * rows)
    change(made)
    return made


async def resolved(liar: Liar) -> ResolvedEngine:
    resolver = Resolver(dial)
    try:
        return await resolver.resolve(liar.address, "P", Role.PREFILL, with_pools=True, timeout=20.0)
    finally:
        await resolver.close()


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        (engine(MAX_ENGINE_RANKS + 1), "engine.rows", MAX_ENGINE_RANKS + 1),
        (engine(cp=2**31), "engine.layout", 2**31),
        (engine(pp=2**16, tp=2), "engine.layout", 2**17),
        (engine(dp=0), "engine.layout.dp", 0),
        (engine(tp=0), "engine.layout.tp", 0),
        (engine(1, lambda made: made.rows[0].pools.extend([common_pb2.PagePool()] * 65)), "engine.rows[0].pools", 65),
        (
            engine(1, lambda made: made.rows[0].pools.add().regions.extend([common_pb2.PoolRegion()] * 5_000)),
            "engine.rows[0].pools.regions",
            5_000,
        ),
        (engine(1, lambda made: made.rows[0].pools.add(name="n" * 300_000)), "engine.rows[0]", 300_044),
        (
            engine(1, lambda made: made.rows[0].labels.update({str(number): "" for number in range(MAX_LABELS + 1)})),
            "engine.rows[0].labels",
            MAX_LABELS + 1,
        ),
        (
            engine(1, lambda made: made.dp_lacking_events.extend(range(MAX_ENGINE_RANKS + 1))),
            "engine.dp_lacking_events",
            MAX_ENGINE_RANKS + 1,
        ),
    ],
    ids=["rows", "cp", "product", "no dp", "no tp", "pools", "regions", "bytes", "labels", "lacking"],
)
async def test_more_than_an_engine_has_is_refused_before_it_is_looked_at(
    liar: Liar, said: pb.Engine, field: str, value: int
) -> None:
    liar.engine = said
    with pytest.raises(InvalidRequest) as refused:
        await resolved(liar)
    assert (refused.value.metadata["field"], refused.value.metadata["value"]) == (field, str(value))
    assert refused.value.metadata["rule"]


@pytest.mark.parametrize("what", ["rows", "regions"])
async def test_thousands_of_rows_take_many_turns_of_the_loop_and_others_have_theirs_between(
    liar: Liar, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountedTurns()

    def row(*arguments: Any) -> Any:
        counted.count()
        return row_from_pb(*arguments)

    def pool(self: wire.PoolCache, message: common_pb2.PagePool, path: str) -> Any:
        counted.count(len(message.regions))
        return decode(self, message, path)

    row_from_pb, decode = wire.row_from_pb, wire.PoolCache.decode
    if what == "rows":
        monkeypatch.setattr(wire, "row_from_pb", row)
        liar.engine, most = engine(ROWS, tp=ROWS), ROWS // 4
    else:
        monkeypatch.setattr(wire.PoolCache, "decode", pool)
        # A row alone takes longer than a piece of a turn may.
        liar.engine, most = engine(40, _with_regions, tp=40), 2 * MAX_REGIONS
    found = await resolved(liar)
    assert len(found.rows) == len(liar.engine.rows)
    assert sum(counted.turns) == (ROWS if what == "rows" else 40 * MAX_REGIONS) and max(counted.turns) <= most


def _with_regions(made: pb.Engine) -> None:
    """No two pools of it are alike."""
    for tp, row in enumerate(made.rows):
        pool = row.pools.add(name="kv", kind=common_pb2.POOL_KIND_KV, page_tokens=1, pages=8, location=f"cpu:{tp}")
        for layer in range(MAX_REGIONS):
            pool.regions.add(layer=layer, component="kv", page_stride_bytes=1, page_bytes=1)


@pytest.mark.parametrize(
    ("said", "field"), [(engine(cp=MAX_ENGINE_RANKS + 1), "engine.layout"), (engine(dp=0), "engine.layout.dp")]
)
async def test_a_room_whose_registry_names_sizes_that_no_engine_has_fails_with_their_field(
    liar: Liar, decode: RankHost, said: pb.Engine, field: str
) -> None:
    liar.engine = said
    for _ in range(2):  # what were remembered of the first answer, the engine's thread would compute with
        failure = await failed(decode, liar)
        assert (failure.reason, failure.metadata["field"]) == (Reason.INVALID_REQUEST, field)


@pytest.mark.parametrize(
    ("field", "rank", "epoch"),
    [
        ("rank.engine", common_pb2.RankId(engine="L\n2026-11-29 ERROR a line of nobody's"), 1),
        ("rank.tp", common_pb2.RankId(engine="L", tp=1), 1),
        ("epoch", common_pb2.RankId(engine="L"), 2**64 - 1),
    ],
    ids=["a name of two lines", "outside the layout", "no epoch"],
)
async def test_ranks_that_cannot_be_are_refused_by_the_field(
    liar: Liar, decode: RankHost, field: str, rank: common_pb2.RankId, epoch: int
) -> None:
    """They were dialled, and named in the log of whoever lost them."""
    liar.engine = engine()
    liar.engine.rows[0].rank.CopyFrom(common_pb2.RankRef(rank=rank, epoch=epoch))
    failure = await failed(decode, liar)
    assert failure.metadata["field"] == f"engine.rows[0].rank.{field}"


@pytest.mark.parametrize("axis", ["dp", "tp"], ids=["looked for at each", "named to each"])
async def test_more_ranks_than_a_room_may_have_are_not_dialled(liar: Liar, decode: RankHost, axis: str) -> None:
    """A room had a session, or a call, to each of 65,536 addresses."""
    most = MOST_PREFILL_RANKS + 1
    said = liar.engine = engine(dp=most) if axis == "dp" else engine(tp=most)
    said.rows[0].engine_selects_dp = True
    for number in range(1, MOST_PREFILL_RANKS + 1):
        said.rows.append(said.rows[0])
        setattr(said.rows[-1].rank.rank, axis, number)
    assert (await failed(decode, liar)).metadata["field"] == "engine.layout"


async def test_pools_that_nobody_asked_for_are_not_read(liar: Liar, decode: RankHost) -> None:
    """Of an engine with as many stages as ours: its first rank is dialled, whatever its pools may be."""
    liar.engine = engine(1, lambda made: made.rows[0].pools.add(name="n" * 300))
    with pytest.raises(InvalidRequest, match=r"engine.rows\[0\].pools\[0\]"):
        await resolved(liar)
    assert (await failed(decode, liar)).reason is Reason.PEER_LOST


async def failed(decode: RankHost, liar: Liar) -> Failure:
    receiver = receiver_of(decode, f"{liar.address}/P", next(ROOMS))
    await asyncio.to_thread(wait_until, lambda: receiver.poll() is KVPoll.Failed)
    failure: Failure | None = receiver.failure
    assert failure is not None
    return failure
