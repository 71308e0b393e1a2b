"""Whom a rank asks for pages, how often, and with how many words."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.prefetch.model import OperationState
from kvgrpc.pull.lending.exported import ExportedPages
from kvgrpc.pull.model import PullConfig
from kvgrpc.pull.staging import StagingPages
from kvgrpc.pull.taking import holders, silent
from kvgrpc.pull.taking.silent import FIRST_SECONDS, LONGEST_SECONDS, OWN_DELAY_SECONDS, SilentHolders
from kvgrpc.registry import wire
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server import IndexServer
from kvgrpc.server.cache import peer as cache_peer
from kvgrpc.v1 import prefetch_service_pb2
from tests.support.cache_serving import SHAPE, CacheRank, bytes_of, ended, hashes_of, prompt
from tests.support.pull_fleet import PULL, PullFleet, candidates_of, peer_of, planes_of_caches, pulled
from tests.support.waiting import wait_until

EVENTS = {"publisher": "null"}


def heard_by(rank: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the lender of a rank is asked from now on: how many hashes each time."""
    heard: list[int] = []
    servicer = peer_of(rank).servicer
    real = getattr(servicer, method)

    def hear(request: Any, *rest: Any) -> Any:
        heard.append(len(request.page_hashes))
        return real(request, *rest)

    monkeypatch.setattr(servicer, method, hear)
    return heard


def never_answers(rank: Any, monkeypatch: pytest.MonkeyPatch, stands_still: float = 0.0) -> list[object]:
    """The rank hangs when it is asked what it has, after the loop, which all ranks share, stood still; who asked."""
    asked: list[object] = []

    async def hang(work: object) -> None:
        asked.append(work)
        threading.Event().wait(stands_still)
        await asyncio.Event().wait()

    monkeypatch.setattr(peer_of(rank).servicer._blocking, "run", hang)
    return asked


def test_a_long_prompt_is_named_once_and_not_with_each_batch(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms of four pages at most: with all that lies before them they would name 60 hashes and more."""
    holder, taker = fleet.pair()
    counted = heard_by(holder, "_count_leading", monkeypatch)
    lent = heard_by(holder, "_lend", monkeypatch)
    hashes = hashes_of(prompt(20))
    holder.fill(hashes)
    assert pulled(taker, hashes).completed == 20
    taker.assert_bytes(hashes)
    assert counted == [20]
    assert len(lent) >= 5 and not any(lent)


def test_a_holder_that_forgot_a_prompt_is_told_all_of_it(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(20))
    holder.fill(hashes)
    monkeypatch.setattr(peer_of(holder).servicer._counted, "get", lambda last: None)
    assert pulled(taker, hashes).completed == 20
    taker.assert_bytes(hashes)


def test_questions_that_end_with_one_page_and_begin_with_different_ones_get_their_own(fleet: PullFleet) -> None:
    """Of a cache that knows pages by hash alone, as an engine's does: a second request has a part of the prompt."""
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    exported = ExportedPages(16, SHAPE.page_bytes)
    exported.offer(hashes, [holder.manager.host.page_buffers(page) for page in range(12)])
    peer_of(holder)._lender._cache = exported
    backend, keys = taker.rank._parts.peers, taker.manager.keys
    assert backend is not None
    for first in (0, 5, 0, 7):
        wanted = hashes[first:]
        landed = np.zeros((len(wanted), SHAPE.page_bytes), np.uint8)
        buffers = [((int(page.ctypes.data), SHAPE.page_bytes),) for page in landed]
        assert all(result.ok for result in backend.read(keys.of_all(wanted), buffers, 10.0))
        for page, each in zip(landed, wanted, strict=True):
            assert (page == bytes_of(each)).all(), f"page {hashes.index(each)}, asked from {first} on"


def test_what_one_holder_does_not_bring_comes_from_the_next_one(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first says that it has all, and lends nothing."""
    liar, honest, taker = fleet.open("liar"), fleet.open("honest"), fleet.open("taker")
    wait_until(lambda: len(candidates_of(taker)) == 2)
    hashes = hashes_of(prompt(6))
    liar.fill(hashes)
    honest.fill(hashes[:5])
    monkeypatch.setattr(peer_of(liar)._lender, "lend", lambda *_: None)
    assert pulled(taker, hashes).completed == 5
    taker.assert_bytes(hashes[:5])


def test_a_holder_that_does_not_answer_is_not_asked_for_each_prompt(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is called by its own name: it was "the registry"."""
    monkeypatch.setattr(silent, "FIRST_SECONDS", LONGEST_SECONDS)  # longer than a busy machine takes for five prompts
    holder = fleet.open("holder")
    taker = fleet.open("taker", pull=PullConfig(staging_pages=16, answer_timeout=0.3))
    wait_until(lambda: bool(candidates_of(taker)))
    asked = never_answers(holder, monkeypatch)
    for first in range(1, 6):
        assert pulled(taker, hashes_of(prompt(4, first))).state is OperationState.DECLINED
    assert len(asked) == 1
    (line,) = [each.getMessage() for each in caplog.records if each.name == "kvgrpc.pull.taking.holders"]
    assert f"holder at {holder.address}" in line and "registry" not in line


def test_a_holder_is_not_silent_because_the_taker_stood_still(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent, "FIRST_SECONDS", LONGEST_SECONDS)
    holder = fleet.open("holder")
    taker = fleet.open("taker", pull=PullConfig(staging_pages=16, answer_timeout=0.3))
    wait_until(lambda: bool(candidates_of(taker)))
    asked = never_answers(holder, monkeypatch, 0.3 + OWN_DELAY_SECONDS + 0.2)
    for first in (1, 2):
        assert pulled(taker, hashes_of(prompt(4, first))).state is OperationState.DECLINED
        wait_until(lambda: not LoopThread.shared().lag > 0.1)
    assert len(asked) == 2


def test_an_engine_whose_rows_cannot_be_read_hides_no_other(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be of a newer version. Whatever it is, the others are heard of."""
    read = wire.engine_of

    def refuse(engine: Any, *rest: Any) -> Any:
        if engine.name == "newer":
            raise InvalidRequest.of("role", 99, "a role that this version knows")
        if engine.name == "odd":
            raise ZeroDivisionError
        return read(engine, *rest)

    monkeypatch.setattr(wire, "engine_of", refuse)
    for name in ("newer", "odd", "plain"):
        fleet.open(name)
    taker = fleet.open("taker")
    wait_until(lambda: [each.engine for each in candidates_of(taker)] == ["plain"])
    hashes = hashes_of(prompt(4))
    fleet.ranks[2].fill(hashes)
    assert pulled(taker, hashes).completed == 4
    said = [each.getMessage() for each in caplog.records if "cannot be read" in each.getMessage()]
    assert any("pages of newer" in each and "role" in each for each in said) and len(said) < 20
    assert LoopThread.shared().healthy


def test_a_holder_that_cannot_be_asked_at_all_does_not_keep_others_from_being_asked(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that fails there."""
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    found = candidates_of(taker)
    wrong = replace(found[0], engine="wrong", tp=9, tp_size=3)  # of a size that nobody has pages of
    monkeypatch.setattr(holders.Holders, "candidates", lambda *_: [wrong, *found])
    assert pulled(taker, hashes).completed == 4


def test_silence_doubles_until_pages_come() -> None:
    now = 100.0
    silent = SilentHolders(lambda: now)
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        silent.failed("a")
        silent.failed("a")  # of another prompt that asked at the same time
        now += seconds - 0.01
        assert "a" in silent
        now += 0.02
        assert "a" not in silent
    silent.forget("a")
    silent.failed("a")
    now += FIRST_SECONDS
    assert "a" not in silent
    now += LONGEST_SECONDS + 1
    silent.failed("a")
    now += FIRST_SECONDS
    assert "a" not in silent, "what was long ago does not count"


def test_a_pull_leaves_landing_pages_for_the_next_one() -> None:
    pages = StagingPages(range(8))
    taken = [pages.take(8, leaving_half=True) for _ in range(4)]
    assert [len(each) for each in taken] == [4, 2, 1, 1]


def test_a_cache_that_does_not_open_closes_its_data_plane(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError("no staging memory")

    monkeypatch.setattr(cache_peer, "Staging", no_memory)
    with planes_of_caches(lambda plane: plane) as planes, pytest.raises(MemoryError):
        fleet.open("holder", pull=PULL)
    assert planes and all(plane.closed for plane in planes)


@pytest.fixture
def index(fleet: PullFleet) -> Iterator[IndexServer]:
    server = IndexServer(["127.0.0.1:0"], registry=fleet.registry).open()
    yield server
    server.close()


def asked_of(*ranks: CacheRank, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return [heard_by(rank, "_count_leading", monkeypatch) for rank in ranks]


def taker_of_two(
    fleet: PullFleet, hashes: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[CacheRank, list[int], list[int]]:
    """Who knows "one", which has all pages, and "other", which has four; and what is asked of either."""
    one, other, taker = fleet.open("one"), fleet.open("other"), fleet.open("taker")
    wait_until(lambda: len(candidates_of(taker)) == 2)
    one.fill(hashes)
    other.fill(hashes[:4])
    of_one, of_other = asked_of(one, other, monkeypatch=monkeypatch)
    return taker, of_one, of_other


def knows_through(index: IndexServer, fleet: PullFleet, hashes: list[str]) -> tuple[CacheRank, CacheRank, CacheRank]:
    """One that has the prompt and one that has not, both told by events, and a taker that asks the index."""
    has, lacks = fleet.open("has", events=EVENTS), fleet.open("lacks", events=EVENTS)
    taker = fleet.open("taker", pull=replace(PULL, index=index.address))
    wait_until(lambda: len(candidates_of(taker)) == 2)
    has.fill(hashes)
    with SyncClient(index.address) as client:
        wait_until(lambda: [sum(each.blocks for each in source.blocks) for source in client.list_sources()] == [6, 0])
    return has, lacks, taker


def test_an_index_says_who_is_asked(fleet: PullFleet, index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = hashes_of(prompt(6))
    has, lacks, taker = knows_through(index, fleet, hashes)
    of_has, of_lacks = asked_of(has, lacks, monkeypatch=monkeypatch)
    assert pulled(taker, hashes).completed == 6
    taker.assert_bytes(hashes)
    assert (len(of_has), len(of_lacks)) == (1, 0)


def test_a_wrong_index_costs_one_miss(fleet: PullFleet, index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages went without a word."""
    hashes = hashes_of(prompt(6))
    has, lacks, taker = knows_through(index, fleet, hashes)
    monkeypatch.setattr(type(has.rank.events), "publish", lambda *_: True)
    has.evict()
    of_has, of_lacks = asked_of(has, lacks, monkeypatch=monkeypatch)
    assert pulled(taker, hashes).state is OperationState.DECLINED
    assert (len(of_has), len(of_lacks)) == (1, 0)


def test_engines_that_publish_nothing_are_asked_whatever_the_index_says(fleet: PullFleet, index: IndexServer) -> None:
    holder = fleet.open("holder", events=None)
    taker = fleet.open("taker", pull=replace(PULL, index=index.address))
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(6))
    holder.fill(hashes)
    assert pulled(taker, hashes).completed == 6


def test_an_index_that_is_gone_leaves_the_registry(fleet: PullFleet, index: IndexServer) -> None:
    hashes = hashes_of(prompt(6))
    _, _, taker = knows_through(index, fleet, hashes)
    index.close()
    assert pulled(taker, hashes).completed == 6
    taker.assert_bytes(hashes)


def test_whoever_starts_a_prefetch_may_name_the_engines(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = hashes_of(prompt(6))
    taker, of_one, of_other = taker_of_two(fleet, hashes, monkeypatch)
    pages = prefetch_service_pb2.PromptPages(page_hashes=[bytes.fromhex(each) for each in hashes])
    with SyncClient(taker.address) as client:
        operation = client.start_prefetch(pages, engines=["other"])
        for message in client.watch_operations([operation.operation_id]):
            operation = next(iter(message.operations), operation)
    assert operation.completed_pages == 4 and not of_one and of_other


def test_engines_that_nobody_knows_are_named_in_the_log(fleet: PullFleet, caplog: pytest.LogCaptureFixture) -> None:
    """A port that differs from the registry's row asks nobody, which looks like a cache that has nothing."""
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(6))
    holder.fill(hashes)
    pages = prefetch_service_pb2.PromptPages(page_hashes=[bytes.fromhex(each) for each in hashes])
    with caplog.at_level(logging.WARNING, "kvgrpc.pull"), SyncClient(taker.address) as client:
        for _ in range(20):
            assert ended(client, client.start_prefetch(pages, engines=["10.0.0.1:7777"])).completed_pages == 0
        said = [each.getMessage() for each in caplog.records if "10.0.0.1:7777" in each.getMessage()]
        assert 1 <= len(said) <= 5 and all(f"holder at {holder.address}" in each for each in said)
        caplog.clear()
        assert ended(client, client.start_prefetch(pages, engines=[holder.address])).completed_pages == 6
    assert not caplog.records


def test_an_order_in_process_may_name_the_engines(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = hashes_of(prompt(6))
    taker, of_one, of_other = taker_of_two(fleet, hashes, monkeypatch)
    operation = taker.manager.controller.prefetch(hashes, engines=["other"])
    assert operation.wait(30.0)
    row = taker.manager.controller.book.row(operation)
    assert row.completed == 4 and not of_one and of_other


def test_a_rank_that_takes_no_pages_says_so(fleet: PullFleet) -> None:
    rank = fleet.open("alone", "file", pull=None)
    pages = prefetch_service_pb2.PromptPages(page_hashes=[bytes.fromhex(each) for each in hashes_of(prompt(6))])
    with SyncClient(rank.address) as client, pytest.raises(FeatureDisabled):
        client.start_prefetch(pages, engines=["other"])
    with pytest.raises(FeatureDisabled):
        rank.manager.controller.prefetch(hashes_of(prompt(6)), engines=["other"])
    with SyncClient(fleet.open("taker").address) as client, pytest.raises(InvalidRequest) as refused:
        client.start_prefetch(pages, engines=["e"] * 65)
    assert refused.value.metadata["field"] == "engines"
