"""All ranks of a registry asked side by side: what one of them is, or does, is its own row and nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvgrpc.client import Client
from kvgrpc.client.fleet import Fleet
from kvgrpc.errors import InvalidRequest, PeerUnreachable
from kvgrpc.registry.model import Endpoints
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.registry_builders import row
from tests.support.registry_serving import Served


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = (await Served().start()).grown_up()
    yield made
    await made.stop()


async def ping(rank: Client) -> str:
    if rank.address == "127.0.0.1:1":
        raise PeerUnreachable("nobody", metadata={"address": rank.address})
    return rank.address


async def test_an_address_that_is_none_is_the_error_of_its_own_rank(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a registry of a later version may have it, or a damaged one."""
    rows = [pb.RankRow(endpoints=pb.Endpoints(grpc=address)) for address in ("nowhere", "127.0.0.1:1", "127.0.0.1:2")]

    async def known(fleet: Fleet) -> list[pb.RankRow]:
        return rows

    monkeypatch.setattr(Fleet, "_rows", known)
    answers = await Fleet(served.address).ask(ping)
    assert [type(answer.error) for answer in answers] == [InvalidRequest, PeerUnreachable, type(None)]
    assert answers[2].value == "127.0.0.1:2"


async def test_an_engine_that_goes_while_the_ranks_are_listed_takes_no_other_with_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine, port in (("P", 2), ("Q", 3)):
        await served.register(replace(row(engine), endpoints=Endpoints(grpc=f"127.0.0.1:{port}")))
    get = Client.get_engine

    async def gone(client: Client, engine: str) -> pb.Engine:
        return await get(client, "none" if engine == "P" else engine)

    monkeypatch.setattr(Client, "get_engine", gone)
    assert [answer.value for answer in await Fleet(served.address).ask(ping)] == ["127.0.0.1:3"]
