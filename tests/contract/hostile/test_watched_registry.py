"""What a registry tells those who follow it: engines of thousands of ranks, and names that it makes up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvgrpc.client import engine_mirror
from kvgrpc.client.following import prefix_index
from kvgrpc.client.following.lacking import Lacking
from kvgrpc.client.following.prefix_index import PrefixIndex
from kvgrpc.model import Layout, ModelIdentity, RankId, RankRef
from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull.model import PullConfig
from kvgrpc.pull.taking.holders import Holders
from kvgrpc.pull.taking.silent import SilentHolders
from kvgrpc.registry import wire
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from tests.support.counted_turns import CountedTurns
from tests.support.registry_serving import dial
from tests.support.waiting import until

ROWS = 20_000
LINES = 5


class Teller(RegistryServiceServicer):
    """Tells everybody the same, one message after the other, as ``tell`` gives them."""

    def __init__(self) -> None:
        self.address = ""
        self._told: asyncio.Queue[pb.WatchEnginesResponse] = asyncio.Queue()

    def tell(self, *engines: pb.Engine) -> None:
        changes = [pb.EngineChange(engine=engine) for engine in engines]
        self._told.put_nowait(pb.WatchEnginesResponse(state_begins=True, changes=changes, state_complete=True))

    def tell_change(self, engine: pb.Engine) -> None:
        self._told.put_nowait(pb.WatchEnginesResponse(changes=[pb.EngineChange(engine=engine)]))

    async def WatchEngines(
        self, request: pb.WatchEnginesRequest, context: object
    ) -> AsyncIterator[pb.WatchEnginesResponse]:
        while True:
            yield await self._told.get()


@pytest_asyncio.fixture
async def teller() -> AsyncIterator[Teller]:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    made = Teller()  # type: ignore[abstract]
    add_RegistryServiceServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(0)


def engine(name: str = "P", ranks: int = 1, *, epoch: int = 1, only: int | None = None) -> pb.Engine:
    """Each rank lends. ``only``: the row of this tp alone."""
    layout = common_pb2.Layout(dp=1, pp=1, cp=1, tp=ranks)
    made = pb.Engine(name=name, role=common_pb2.ROLE_DECODE, layout=layout, registered_ranks=ranks)
    for tp in range(ranks) if only is None else [only]:
        row = made.rows.add(role=common_pb2.ROLE_DECODE, layout=layout)
        row.rank.CopyFrom(common_pb2.RankRef(rank=common_pb2.RankId(engine=name, tp=tp), epoch=epoch))
        row.endpoints.grpc = row.endpoints.cache = f"127.0.0.1:{tp + 1}"
    return made


@contextlib.asynccontextmanager
async def following(teller: Teller, ranks: int = 1) -> AsyncIterator[Holders]:
    """Who takes pages from engines of so many tensor-parallel ranks."""
    made = Holders(
        RankRef(RankId("T", tp=ranks - 1), 1),
        Layout(tp=ranks),
        ModelIdentity(),
        PageIdentity(model="m", dtype="bfloat16", layout="kv", page_size=16, tp_rank=ranks - 1, tp_size=ranks),
        PullConfig(),
        dial,
    )
    task = asyncio.create_task(made.follow(teller.address))
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.close()


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> CountedTurns:
    """How often a function is called in each turn of the loop."""
    turns, real = CountedTurns(), getattr(where, name)

    def count(*arguments: Any) -> Any:
        turns.count()
        return real(*arguments)

    monkeypatch.setattr(where, name, count)
    return turns


async def test_who_takes_pages_reads_an_engine_of_thousands_in_pieces_and_each_row_once(
    teller: Teller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All on the loop of its rooms: 65,536 rows took 1.5 s of it, and as long again when one of them changed."""
    applied, read = counted(monkeypatch, engine_mirror, "_in_order"), counted(monkeypatch, wire, "row_from_pb")
    async with following(teller, ROWS) as holders:
        teller.tell(engine(ranks=ROWS))
        await until(holders.candidates)
        assert sum(applied.turns) == sum(read.turns) == ROWS
        assert max(applied.turns) <= ROWS // 2 and max(read.turns) <= ROWS // 4
        changed = engine(ranks=ROWS, epoch=2, only=ROWS - 1)
        changed.rows[0].endpoints.grpc = "127.0.0.1:9"
        teller.tell_change(changed)
        await until(lambda: [each.address for each in holders.candidates()] == ["127.0.0.1:9"])
        assert sum(read.turns) == ROWS + 1


async def test_what_was_known_of_a_holder_ends_with_its_incarnation_and_that_alone(teller: Teller) -> None:
    async with following(teller, 2) as holders:
        holders.silent = SilentHolders(lambda: 0.0)  # of which no time is ever over
        teller.tell(engine(ranks=2), engine("Q", 2), engine("R", 2))
        await until(lambda: len(holders.candidates()) == 3)
        teller.tell(engine(ranks=2), engine("R", 2))
        await until(lambda: len(holders.candidates()) == 2)
        for address in ("127.0.0.1:1", "127.0.0.1:2"):
            holders.silent.failed(address)
        teller.tell_change(engine(ranks=2, epoch=2, only=0))
        await until(lambda: "127.0.0.1:1" not in holders.silent)
        assert "127.0.0.1:2" in holders.silent


async def test_an_index_reads_an_engine_of_thousands_in_pieces(teller: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    applied, looked_at = (
        counted(monkeypatch, engine_mirror, "_in_order"),
        counted(monkeypatch, prefix_index, "_publishes"),
    )
    teller.tell(engine(ranks=ROWS))
    async with PrefixIndex(registry=teller.address) as index:
        await until(index.not_followed)
    assert sum(applied.turns) == sum(looked_at.turns) == ROWS
    assert max(applied.turns) <= ROWS // 2 and max(looked_at.turns) <= ROWS // 2


async def test_thousands_of_engines_without_events_cost_an_index_each_what_is_known_of_it(
    teller: Teller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each of them all that are not followed were gone through: 4,096 took a second in one turn."""
    turns = counted(monkeypatch, Lacking, "replace")
    teller.tell(*(engine(f"P{number}") for number in range(1_000)))
    async with PrefixIndex(registry=teller.address) as index:
        await until(lambda: len(index.not_followed()) == 1_000)
    assert sum(turns.turns) == 1_000 and max(turns.turns) <= 500


def lines_of(caplog: pytest.LogCaptureFixture, text: str) -> Iterator[str]:
    return (record.getMessage() for record in caplog.records if text in record.getMessage())


async def test_a_registry_that_makes_up_names_gets_no_more_lines_of_the_log_than_a_few(
    teller: Teller, caplog: pytest.LogCaptureFixture
) -> None:
    """Each name had lines of its own, for ever in memory, and was written as it came."""
    names = [f"P{number}\n2026-11-29 ERROR a line of nobody's" for number in range(100)]
    unreadable = [engine(name) for name in names]
    async with following(teller) as holders:
        teller.tell(*unreadable, engine("plain"))
        await until(lambda: [each.engine for each in holders.candidates()] == ["plain"])
        teller.tell(*unreadable, engine("plain"), engine("another"))
        await until(lambda: len(holders.candidates()) == 2)
        said = list(lines_of(caplog, "cannot be read"))
        assert len(said) == LINES and len(set(said)) == LINES
        assert not any("\n" in line for line in caplog.messages)


async def test_one_holder_that_never_answers_leaves_the_others_their_lines(
    teller: Teller, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(teller) as holders:
        teller.tell(engine("P"))
        await until(holders.candidates)
        await asyncio.gather(*(holders.best(["00" * 32], 1.0) for _ in range(20)))
        (other := engine("Q")).rows[0].endpoints.grpc = "127.0.0.1:2"
        teller.tell(other)
        await until(lambda: [each.engine for each in holders.candidates()] == ["Q"])
        await holders.best(["00" * 32], 1.0)
    said = list(lines_of(caplog, "does not say what it has"))
    assert [line.split(" does not")[0] for line in said] == ["P at 127.0.0.1:1", "Q at 127.0.0.1:2"]
