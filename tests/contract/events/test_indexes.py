"""Several indexes of one fleet: whoever is away costs a router nothing but what it asked in that moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvgrpc.client import Indexes, SyncIndexes
from kvgrpc.errors import InvalidRequest
from kvgrpc.server import IndexServer
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.publishing import Publishing
from tests.support.scoring import question
from tests.support.waiting import until

# Of a busy machine: the bound itself is asserted on one that hangs.
LONG = 10.0
FAILED_OVER_SECONDS = 1.0


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Publishing]:
    async with Publishing("P") as publishing:
        await publishing.store([1, 2, 3])
        yield publishing


@pytest_asyncio.fixture
async def servers(engine: Publishing) -> AsyncIterator[list[IndexServer]]:
    made = [IndexServer(["127.0.0.1:0"], sources=[engine.address]) for _ in range(2)]
    for server in made:
        await asyncio.to_thread(server.open)
        await until(lambda server=server: server.index.standing() == (1, 1))  # type: ignore[misc]
    yield made
    for server in made:
        await asyncio.to_thread(server.close)


@pytest_asyncio.fixture
async def hanging() -> AsyncIterator[str]:
    """Takes connections, and says nothing."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(2**16):
            continue
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()


def blocks(answer: pb.ScoreResponse | None) -> list[int]:
    assert answer is not None
    return [score.blocks for score in answer.prompts[0].scores]


async def test_the_next_index_answers_the_same_question_where_one_refuses(servers: list[IndexServer]) -> None:
    async with Indexes([each.address for each in servers], wait_seconds=LONG) as indexes:
        assert blocks(await indexes.score(question(hashes=[1, 2, 3, 4]))) == [3]
        await asyncio.to_thread(servers[0].close)
        assert blocks(await indexes.score(question(hashes=[1, 2]))) == [2]
        plan = await indexes.plan(pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=question(hashes=[1]).prompts[0])]))
        assert plan is not None and plan.plans[0].placements[0].engine == "P"
        assert indexes.unanswered == 0


async def test_one_that_hangs_costs_one_question_and_is_asked_last(hanging: str, servers: list[IndexServer]) -> None:
    async with Indexes([hanging, servers[0].address], wait_seconds=2.5) as indexes:
        began = time.monotonic()
        assert await indexes.score(question(hashes=[1])) is None
        assert 2.4 < time.monotonic() - began < 4.9  # another one asked in vain would take as long again
        for _ in range(3):
            assert blocks(await indexes.score(question(hashes=[1, 2]))) == [2]
        assert indexes.unanswered == 1


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "dies"])
async def test_a_router_that_waits_no_longer_than_usual_is_answered_within_a_second(
    hangs: bool, hanging: str, servers: list[IndexServer]
) -> None:
    first = hanging if hangs else servers[0].address
    async with Indexes([first, servers[1].address]) as indexes:
        if not hangs:
            assert blocks(await indexes.score(question(hashes=[1]), LONG)) == [1]
            await asyncio.to_thread(servers[0].close)
        began, asked = time.monotonic(), 0
        while await indexes.score(question(hashes=[1, 2])) is None:
            asked += 1
            assert time.monotonic() - began < FAILED_OVER_SECONDS
        assert indexes.unanswered == asked >= hangs, "one that hangs was asked, and cost a question"


async def test_where_all_are_away_a_question_has_no_answer_until_one_is_back(
    engine: Publishing, servers: list[IndexServer]
) -> None:
    addresses = [each.address for each in servers]
    for server in servers:
        await asyncio.to_thread(server.close)
    async with Indexes(addresses, wait_seconds=0.2) as indexes:
        assert [await indexes.score(question(hashes=[1])) for _ in range(3)] == [None, None, None]
        assert indexes.unanswered == 3
        servers[1] = IndexServer([addresses[1]], sources=[engine.address])
        await asyncio.to_thread(servers[1].open)

        async def found() -> bool:
            answer = await indexes.score(question(hashes=[1]))
            return answer is not None and blocks(answer) == [1]

        await until(found)


async def test_what_no_index_would_answer_is_raised(servers: list[IndexServer]) -> None:
    async with Indexes([each.address for each in servers], wait_seconds=LONG) as indexes:
        with pytest.raises(InvalidRequest):
            await indexes.score(pb.ScoreRequest())
    with pytest.raises(InvalidRequest):
        Indexes([])
    with pytest.raises(InvalidRequest):
        Indexes(["nonsense"])


def test_the_plain_one_does_the_same() -> None:
    with SyncIndexes(["127.0.0.1:1"], wait_seconds=0.2) as indexes:
        assert indexes.score(question(hashes=[1])) is None
        assert indexes.plan(pb.PlanRequest()) is None
        assert indexes.unanswered == 2
