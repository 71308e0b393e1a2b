"""How an index finds what it follows: engines as they come and go at a registry, large ones too, and what it cannot."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvgrpc.client import PrefixIndex
from kvgrpc.client.following import prefix_index
from kvgrpc.client.following.follower import EventFollower
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.saved import SavedCache
from kvgrpc.model import Layout, ModelIdentity, RankId, RankRef
from kvgrpc.registry import wire
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.publishing import Publishing
from tests.support.registry_builders import pool, row
from tests.support.registry_serving import POOLS, Served
from tests.support.waiting import until


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = (await Served().start()).grown_up()
    yield made
    await made.stop()


def publishing(address: str, engine: str = "P", *, model: str = "", **more: object) -> RankRow:
    port = int(address.rpartition(":")[2]) if address else 1
    made = row(engine, port=port, model=ModelIdentity(name=model), **more)  # type: ignore[arg-type]
    return replace(made, serves_events=True, endpoints=Endpoints(grpc=address))


async def test_an_engine_of_320_dp_ranks_with_244_regions_is_followed_whole(served: Served) -> None:
    """Its rows are 3 MiB: ListEngines left them out, and nobody said so."""
    async with Publishing("P") as engine:
        await engine.store([1, 2])
        rows = [
            publishing(engine.address, dp=dp, layout=Layout(dp=320), pools=(pool(layers=244),)) for dp in range(320)
        ]
        assert sum(wire.row_to_pb(each, POOLS).ByteSize() for each in rows) > 2**20
        for begin in range(0, 320, 64):
            await served.register(*rows[begin : begin + 64])
        async with PrefixIndex(registry=served.address) as index:
            await until(lambda: len(index.sources()) == 320)
            await index.until_current(1)
            assert [(score.engine, score.dp, score.blocks) for score in index.score([1, 2, 3])] == [("P", 0, 2)]
            assert index.not_followed() == []


async def test_engines_are_followed_as_they_come_and_go(served: Served) -> None:
    async with PrefixIndex(registry=served.address) as index, Publishing("P") as first, Publishing("Q") as second:
        await first.store([1])
        await second.store([1, 2])
        registered = await served.register(publishing(first.address, model="m"))
        await until(lambda: [score.engine for score in index.score([1])] == ["P"])
        await served.register(publishing(second.address, "Q", model="n"))
        await until(lambda: len(index.sources()) == 2)
        await until(lambda: [score.engine for score in index.score([1, 2], model="n")] == ["Q"])
        assert [score.engine for score in index.score([1, 2], model="m")] == ["P"]
        assert [source.model for source in index.sources()] == ["m", "n"]
        await served.stub.Deregister(pb.DeregisterRequest(ranks=[registered.leases[0].rank]))
        await until(lambda: index._gone == {("P", 0)})
        assert len(index.score([1], model="m")) == 1, "it answers: a registry's silence proves nothing"
        await first.hang_up()
        await until(lambda: [source.engine for source in index.sources()] == ["Q"])
        await first.serve()


async def test_an_engine_that_moved_is_followed_where_it_is(served: Served) -> None:
    async with PrefixIndex(registry=served.address) as index, Publishing("P") as old, Publishing("P") as new:
        await old.store([1])
        await new.store([1, 2])
        await served.register(publishing(old.address))
        await until(lambda: [score.blocks for score in index.score([1, 2])] == [1])
        moved = publishing(new.address)
        await served.register(replace(moved, ref=RankRef(moved.ref.rank, 2)))
        await until(lambda: [score.blocks for score in index.score([1, 2])] == [2])


async def test_what_cannot_be_followed_is_said(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "_ANSWER_SECONDS", 2.0)
    async with Publishing("P") as engine:
        await served.register(
            publishing(engine.address, layout=Layout(dp=2)),
            replace(publishing(engine.address, dp=1, layout=Layout(dp=2)), serves_events=False),
        )
        await served.register(row("Q"))
        async with PrefixIndex(registry=served.address, sources=["127.0.0.1:1"]) as index:
            await until(lambda: len(index.not_followed()) == 3)
            address, partly, silent = index.not_followed()
            assert address.startswith("127.0.0.1:1: PEER_UNREACHABLE: nobody answered")
            assert partly == "P: dp ranks 1 serve no events, others of it do"
            assert silent == "Q: none of its 1 registered ranks serves events"
            assert "Q is not followed: none of its 1 registered ranks serves events" in caplog.text


async def test_the_next_registry_is_followed_where_one_dies(served: Served) -> None:
    other = (await Served().start()).grown_up()
    async with Publishing("P") as engine:
        await engine.store([1])
        for each in (served, other):
            await each.register(publishing(engine.address))
        async with PrefixIndex(registry=f"{served.address},{other.address}") as index:
            await until(lambda: len(index.score([1])) == 1)
            await served.server.stop(0)
            await until(lambda: any(served.address in line for line in index.not_followed()))
            await other.register(publishing(engine.address, "R"))
            await until(lambda: [source.engine for source in index.sources()] == ["P", "R"])
    await other.stop()


async def test_the_rows_of_other_ranks_than_the_publishing_one_are_no_caches(served: Served) -> None:
    async with Publishing("P") as engine:
        rows = [publishing(engine.address, tp=tp, layout=Layout(tp=4)) for tp in range(4)]
        await served.register(*rows)
        async with PrefixIndex(registry=served.address) as index:
            await until(lambda: len(index.sources()) == 1)
            await asyncio.sleep(0)
            assert [(source.engine, source.dp) for source in index.sources()] == [("P", 0)]
            assert rows[0].ref.rank == RankId("P")


async def test_a_restarted_index_answers_from_what_it_saved_and_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    async with Publishing("a") as first, Publishing("b") as second:
        await first.store([1, 2])
        await second.store([1, 2, 3], "CPU")
        sources = [first.address, second.address]
        async with PrefixIndex(sources=sources, saved=path) as index:
            await index.until_current(2)
            assert [score.blocks for score in index.score([1, 2, 3])] == [3, 2]
        await first.store([3, 4])
        await second.restart()
        await second.store([1])
        async with PrefixIndex(sources=sources, saved=path) as index:
            await index.until_current(2)
            assert [(score.engine, score.blocks) for score in index.score([1, 2, 3, 4])] == [("a", 4), ("b", 1)]
            a, b = index.sources()
            assert (a.counts.snapshots, b.counts.snapshots) == (0, 1), "the log of a went on, that of b did not"


async def test_a_saved_index_is_asked_before_its_engines_answer(served: Served, tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    async with Publishing("P") as engine:
        await engine.store([1, 2])
        await served.register(publishing(engine.address))
        async with PrefixIndex(registry=served.address, saved=path) as index:
            await index.until_current(1)
        await engine.hang_up()
        async with PrefixIndex(registry=served.address, saved=path) as index:
            await until(lambda: [score.blocks for score in index.score([1, 2])] == [2])
            assert index.sources()[0].freshness.state is FollowerState.CONNECTING
            await engine.serve()
            await index.until_current(1)
            assert index.sources()[0].counts.snapshots == 0


async def test_a_cache_that_takes_long_to_restore_is_followed_once(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look found it missing meanwhile and followed it too; that follower nobody ever closed."""
    path, made, restore = str(tmp_path / "index"), [], CacheContents.restore

    class Counted(EventFollower):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            made.append(self)

    def slow(contents: CacheContents, saved: SavedCache) -> Iterator[None]:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            yield
        yield from restore(contents, saved)

    async with Publishing("P") as engine:
        await engine.store([1, 2])
        await served.register(publishing(engine.address))
        async with PrefixIndex(registry=served.address, saved=path) as index:
            await index.until_current(1)
        monkeypatch.setattr(CacheContents, "restore", slow)
        monkeypatch.setattr(prefix_index, "EventFollower", Counted)
        monkeypatch.setattr(prefix_index, "LOOK_SECONDS", 0.02)
        async with PrefixIndex(registry=served.address, saved=path) as index:
            await index.until_current(1)
            await until(lambda: index.sources()[0].counts.snapshots == 0)
            assert len(made) == 1


async def test_an_index_that_ends_before_it_knows_all_again_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it knew already took the place of all that was saved: the next start read the other snapshots anew."""
    path, restore = tmp_path / "index", CacheContents.restore
    restoring: list[str] = []

    def second_never(contents: CacheContents, saved: SavedCache) -> Iterator[None]:
        restoring.append(saved.engine)
        while len(restoring) == 2:
            yield
        yield from restore(contents, saved)

    async with Publishing("a") as first, Publishing("b") as second:
        await first.store([1, 2])
        await second.store([1])
        sources = [first.address, second.address]
        async with PrefixIndex(sources=sources, saved=str(path)) as index:
            await index.until_current(2)
        before = path.read_bytes()
        monkeypatch.setattr(CacheContents, "restore", second_never)
        async with PrefixIndex(sources=sources, saved=str(path)) as index:
            await until(lambda: len(restoring) == 2 and len(index.sources()) == 1)
        assert path.read_bytes() == before


async def test_an_index_whose_registry_is_away_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    async with Publishing("a") as engine:
        await engine.store([1, 2])
        async with PrefixIndex(sources=[engine.address], saved=str(path)) as index:
            await index.until_current(1)
    before = path.read_bytes()
    gone = await Served().start()
    await gone.stop()
    monkeypatch.setattr(prefix_index, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(prefix_index, "SAVED_KEPT_SECONDS", 0.0)
    looks, worth = 0, PrefixIndex._is_worth_saving

    def counted(index: PrefixIndex) -> bool:
        nonlocal looks
        looks += 1
        return worth(index)

    monkeypatch.setattr(PrefixIndex, "_is_worth_saving", counted)
    async with PrefixIndex(registry=gone.address, saved=str(path)):
        await until(lambda: looks > 3)
    assert path.read_bytes() == before


async def test_a_cache_that_cannot_be_restored_is_followed_from_its_snapshot(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "index")

    def breaks(contents: CacheContents, saved: SavedCache) -> Iterator[None]:
        yield
        raise MemoryError("made up")

    async with Publishing("P") as engine:
        await engine.store([1, 2])
        await served.register(publishing(engine.address))
        async with PrefixIndex(registry=served.address, saved=path) as index:
            await index.until_current(1)
        monkeypatch.setattr(CacheContents, "restore", breaks)
        async with PrefixIndex(registry=served.address, saved=path) as index:
            await index.until_current(1)
            assert [score.blocks for score in index.score([1, 2])] == [2]
            assert index.healthy


async def test_a_damaged_file_costs_its_snapshots_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"nonsense")
    async with Publishing("a") as engine:
        await engine.store([1])
        async with PrefixIndex(sources=[engine.address], saved=str(path)) as index:
            await index.until_current(1)
            assert [score.blocks for score in index.score([1])] == [1]
            assert index.sources()[0].counts.snapshots == 1
    assert "is no saved index" in caplog.text


async def test_an_index_whose_file_hangs_starts_without_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "index"
    os.mkfifo(path)  # whoever reads it waits for a writer
    monkeypatch.setattr(prefix_index, "READ_SECONDS", 0.1)
    async with Publishing("a") as engine:
        await engine.store([1])
        index = PrefixIndex(sources=[engine.address], saved=str(path))
        await asyncio.wait_for(index.start(), 10)
        await index.until_current(1)
        assert [score.blocks for score in index.score([1])] == [1]
        assert "is not read after 0.1 s" in caplog.text
        path.write_bytes(b"")  # its thread goes
        path.unlink()
        await index.close()


async def test_an_index_is_ready_once_it_knows_most_of_what_it_follows(served: Served) -> None:
    """A router that is sent to one that begins would find nobody, and send every request to the wrong engine."""
    async with Publishing("P") as engine:
        await engine.store([1])
        await engine.hang_up()
        await served.register(publishing(engine.address))
        async with PrefixIndex(registry=served.address) as index:
            assert index.health() == "0 of 0 caches are current since the start"
            await until(lambda: index.standing() == (0, 1))
            assert index.health() == "0 of 1 caches are current since the start"
            await engine.serve()
            await until(lambda: index.health() is True)
            assert index.standing() == (1, 1)
            await engine.hang_up()
            await until(lambda: index.standing() == (0, 1))
            assert index.health() is True, "what it knew is of use while an engine is away"


async def test_an_index_that_cannot_reach_its_fleet_is_ready_after_a_while(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.register(publishing("127.0.0.1:1"))
    monkeypatch.setattr(prefix_index, "KNOWN_WITHIN_SECONDS", 0.5)
    async with PrefixIndex(registry=served.address) as index:
        await until(lambda: index.standing() == (0, 1))
        await until(lambda: index.health() is True)
