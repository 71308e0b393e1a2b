"""Pulls between engines of unequal tensor-parallel sizes: a page has all of its heads, or does not count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import InvalidRequest, ServerDraining
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.prefetch.model import OperationKind, OperationState
from kvgrpc.prefetch.pools.host import Bytes
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.pull.model import PullConfig
from kvgrpc.rpc.loop import LoopThread
from tests.support.cache_serving import LIMITS, REPLICATED, CacheRank, bytes_of, hashes_of, prompt
from tests.support.pull_fleet import PullFleet, candidates_of, forms_of, lend, nothing_is_lent, peer_of
from tests.support.waiting import wait_until

HEADS, PAGE_TOKENS, LAYERS = 4, 4, 3
ONE_PIECE = HostLayout.PAGE_FIRST_DIRECT


def shape_of(tp_size: int) -> PageShape:
    return PageShape.mha(LAYERS, PAGE_TOKENS, HEADS // tp_size, 8, "float16", HEADS)


def page_of(page_hash: str, tp_size: int, tp: int, layout: HostLayout) -> Bytes:
    """What a rank has of a page of the model: its heads of each token of each layer of keys and of values."""
    random = np.random.default_rng(int(page_hash[:16], 16))
    model = random.integers(0, 256, (2, LAYERS, PAGE_TOKENS, HEADS, 16), dtype=np.uint8)
    own = HEADS // tp_size
    page = model[..., tp * own : (tp + 1) * own, :]
    return np.ascontiguousarray(page.swapaxes(1, 2) if layout is HostLayout.PAGE_FIRST else page).reshape(-1)


@dataclass
class Engine:
    """Its ranks by tp. ``replicated``: each holds the same page."""

    ranks: list[CacheRank]
    replicated: bool = False

    @property
    def leader(self) -> CacheRank:
        return self.ranks[0]

    def page(self, page_hash: str, tp: int) -> Bytes:
        layout = self.ranks[tp].manager.host.layout
        return bytes_of(page_hash) if self.replicated else page_of(page_hash, len(self.ranks), tp, layout)

    def fill(self, hashes: Sequence[str]) -> None:
        for tp in range(len(self.ranks)):
            self.fill_rank(tp, hashes)

    def fill_rank(self, tp: int, hashes: Sequence[str]) -> None:
        manager = self.ranks[tp].manager
        pages: Any = manager.host.table.take(len(hashes))
        for page, each in zip(pages, hashes, strict=True):
            manager.host.set_flat(int(page), self.page(each, tp))
        manager.host.table.commit(pages)
        manager.known_cache().keep(hashes, 0, pages, "")

    def pull(self, hashes: Sequence[str]) -> tuple[OperationState, int]:
        """What became of a prefetch at the leading rank, once it has ended at all of them."""
        operation = self.leader.start(OperationKind.PREFETCH, hashes)
        for rank in self.ranks:
            assert rank.manager.controller.book.get(operation.operation_id).wait(30.0)
        return operation.state, operation.completed

    def has(self, hashes: Sequence[str]) -> None:
        """Every rank, with the right bytes."""
        for tp, rank in enumerate(self.ranks):
            pages = rank.manager.known_cache().pages_of(hashes)
            try:
                assert len(pages) == len(hashes)
                for page, each in zip(pages, hashes, strict=True):
                    assert (rank.manager.host.flat(int(page)) == self.page(each, tp)).all()
            finally:
                rank.manager.host.table.end_read(pages)

    def is_quiet(self) -> bool:
        """Nothing is lent, taken or locked."""
        slots = [landing.memory.slots for rank in self.ranks for landing in peer_of(rank)._landings._of_size.values()]
        return all(map(nothing_is_lent, self.ranks)) and not any(each.taken for each in slots)


class Engines(PullFleet):
    """Engines of several ranks."""

    def engine(self, name: str, tp_size: int, shape: PageShape | None = None, **changes: Any) -> Engine:
        settings: dict[str, Any] = {"shape": shape or shape_of(tp_size), "layout": Layout(tp=tp_size), **changes}
        ranks = [self.open(name, **settings)]
        for tp in range(1, tp_size):
            ranks.append(self.open(name, tp=tp, leader=ranks[0].address, **settings))
        wait_until(lambda: all(rank.manager.agreeing_ranks() == tp_size for rank in ranks))
        return Engine(ranks, settings["shape"].kind == "mla")

    def pair(self, holders: int, takers: int, **changes: Any) -> tuple[Engine, Engine]:  # type: ignore[override]
        holder, taker = self.engine("holder", holders, **changes), self.engine("taker", takers, **changes)
        wait_until(lambda: all(candidates_of(rank) for rank in taker.ranks))
        return holder, taker


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with closing(Engines(tmp_path)) as opened:
        yield opened


@pytest.mark.parametrize(("holders", "takers"), [(2, 1), (1, 2)])
def test_where_all_ranks_have_the_same_bytes_sizes_do_not_matter(engines: Engines, holders: int, takers: int) -> None:
    holder, taker = engines.pair(holders, takers, shape=REPLICATED)
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    assert taker.pull(hashes) == (OperationState.DONE, 12)
    taker.has(hashes)
    wait_until(holder.is_quiet, 10.0)


@pytest.mark.parametrize(
    ("holders", "takers", "layout"),
    [*((2, 1, layout) for layout in HostLayout), (1, 2, ONE_PIECE), (4, 2, ONE_PIECE), (2, 4, HostLayout.LAYER_FIRST)],
)
def test_pages_of_another_size_arrive_with_all_heads_in_their_place(
    engines: Engines, holders: int, takers: int, layout: HostLayout
) -> None:
    """More of them than may be lent at a time, so in several rooms; and with what the taker has already."""
    holder, taker = engines.pair(holders, takers, host_layout=layout)
    hashes = hashes_of(prompt(14))
    holder.fill(hashes)
    taker.fill(hashes[:3])
    assert {forms_of(rank) for rank in (*holder.ranks, *taker.ranks)} == {forms_of(taker.leader)}, "each can be planned"
    assert taker.pull(hashes) == (OperationState.DONE, 14)
    taker.has(hashes)
    wait_until(lambda: holder.is_quiet() and taker.is_quiet(), 10.0)
    rooms = [row for rank in taker.ranks for row in peer_of(rank).book.rows()]
    assert not any(row.failure for row in rooms)
    shares = max(1, holders // takers)
    # A share is lent anew where its fellow does not come in time.
    assert sum(row.done for row in rooms) >= 11 * shares * takers
    assert {row.nbytes // row.done for row in rooms if row.done} == {shape_of(holders).page_bytes}


@pytest.mark.parametrize(("holders", "takers"), [(2, 1), (1, 2), (2, 2)])
def test_pages_of_another_size_and_another_order_arrive_in_ours(engines: Engines, holders: int, takers: int) -> None:
    """More of them than may be lent at a time."""
    holder = engines.engine("holder", holders, host_layout=HostLayout.PAGE_FIRST)
    taker = engines.engine("taker", takers, host_layout=ONE_PIECE)
    wait_until(lambda: all(candidates_of(rank) for rank in taker.ranks))
    assert len(forms_of(holder.leader) & forms_of(taker.leader)) == 1
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    assert taker.pull(hashes) == (OperationState.DONE, 12)
    taker.has(hashes)
    wait_until(lambda: holder.is_quiet() and taker.is_quiet(), 10.0)


def test_a_page_comes_in_one_order_where_one_rank_of_two_is_known_to_be_of_another_kind(engines: Engines) -> None:
    """The other one had not answered yet."""
    holder = engines.engine("holder", 2, host_layout=HostLayout.PAGE_FIRST)
    taker = engines.engine("taker", 1, host_layout=ONE_PIECE)
    holders = peer_of(taker.leader)._holders
    wait_until(lambda: bool(holders.candidates()))
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    holders._of_other_kind.add(holder.ranks[0].address)
    assert taker.pull(hashes) == (OperationState.DONE, 4)
    taker.has(hashes)


def test_pages_that_one_of_two_ranks_lacks_do_not_count(engines: Engines) -> None:
    holder, taker = engines.pair(2, 1)
    hashes = hashes_of(prompt(8))
    holder.fill_rank(0, hashes)
    holder.fill_rank(1, hashes[:5])
    assert taker.pull(hashes) == (OperationState.DONE, 5)
    taker.has(hashes[:5])


@pytest.mark.parametrize("left", [0, 2])
def test_pages_that_one_of_two_ranks_evicts_between_question_and_answer_do_not_count(
    engines: Engines, left: int
) -> None:
    holder, taker = engines.pair(2, 1)
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    backend: Any = taker.leader.rank._parts.peers
    keys, real, count = backend._connected

    def count_then_evict(*question: Any, **more: Any) -> Any:
        answer = count(*question, **more)
        holder.ranks[1].evict()
        holder.fill_rank(1, hashes[:left])
        return answer

    backend.connect(keys, real, count_then_evict)
    state, completed = taker.pull(hashes)
    assert (state, completed) in [(OperationState.FAILED, 0), (OperationState.PARTIAL, 2)] and completed == left
    taker.has(hashes[:left])
    wait_until(lambda: holder.is_quiet() and taker.is_quiet(), 10.0)
    assert taker.leader.manager.host.table.counts()["reserved"] == 0


def test_a_share_on_its_way_is_not_lent_anew_while_its_fellow_waits(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank lends all that it may to others when it is asked, and again when it is asked once more."""
    patient = PullConfig(staging_pages=16, answer_timeout=5.0, stall_timeout=30.0)
    holder, taker = engines.pair(2, 1, pull=patient, limits=replace(LIMITS, storage_timeout=30.0))
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    lender, refused = peer_of(holder.ranks[1])._lender, list[int]()
    lending, real = lender._staging.lending, lender._all_is_lent

    def all_is_lent(ref: RankRef, most: int) -> Exception:
        refused.append(most)
        return real(ref, most)  # type: ignore[no-any-return]

    monkeypatch.setattr(lender, "_all_is_lent", all_is_lent)
    others = lending.take(lending.size)
    operation = taker.leader.start(OperationKind.PREFETCH, hashes)
    wait_until(lambda: len(refused) > 1, 20.0)
    lending.give_back(others)
    assert operation.wait(30.0)
    assert (operation.state, operation.completed) == (OperationState.DONE, 4)
    taker.has(hashes)
    assert [row.done for row in peer_of(holder.ranks[0]).book.rows()] == [4]


def test_a_rank_that_is_closed_costs_the_pages_of_both(engines: Engines) -> None:
    holder, taker = engines.pair(2, 1)
    hashes = hashes_of(prompt(8))
    holder.fill(hashes)
    assert taker.pull(hashes[:4]) == (OperationState.DONE, 4)
    holder.ranks[1].close()
    engines.ranks.remove(holder.ranks[1])
    state, completed = taker.pull(hashes)
    assert state is not OperationState.DONE and completed < 8
    taker.has(hashes[:4])
    wait_until(taker.is_quiet, 10.0)
    wait_until(lambda: nothing_is_lent(holder.ranks[0]), 15.0)


def test_an_engine_whose_heads_nobody_told_is_not_asked(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    shapes = [replace(shape_of(size), heads_total=0) for size in (1, 2)]
    engines.engine("two", 2, shape=shapes[1])
    taker = engines.engine("one", 1, shape=shapes[0])
    wait_until(lambda: "pages of two are not taken: INVALID_REQUEST: identity.tp_size" in caplog.text, 10.0)
    assert not candidates_of(taker.leader)


def test_heads_that_are_not_the_share_of_their_rank_are_refused(engines: Engines) -> None:
    with pytest.raises(InvalidRequest) as error:
        engines.open("wrong", layout=Layout(tp=2), shape=shape_of(1))
    assert "prefetch.shape.heads" in str(error.value)


def wakers() -> int:
    """How many of the loop's readers wake a manager of rooms."""

    async def count() -> int:
        readers: Any = LoopThread.shared().loop
        return sum("Waker" in repr(key.data) for key in readers._selector.get_map().values())

    return LoopThread.shared().run(count(), 10.0)


def test_no_place_for_pages_of_another_size_opens_while_the_cache_drains(engines: Engines) -> None:
    """A drain knows the places that there are when it begins; and one that was refused left its waker on the loop."""
    holder, taker = engines.pair(2, 1)
    hashes, peer, loop = hashes_of(prompt(14)), peer_of(taker.leader), LoopThread.shared()
    holder.fill(hashes)
    (other_size,) = peer._holders.candidates()

    async def nothing_is_lent_any_more() -> None:
        peer._sending._fail_all(peer._sending.core.rooms)

    with ThreadPoolExecutor(1) as aside:
        taker.fill(hashes[:1])
        assert lend(taker.leader, hashes[:1], RankRef(RankId("somebody"), 1)) == 1
        before = wakers()
        draining = aside.submit(loop.run, peer.drain(20.0), 30.0)
        wait_until(lambda: peer._listener.draining)
        for _ in range(3):
            with pytest.raises(ServerDraining):
                peer._landings.of(other_size)
        assert not draining.done() and len(peer._landings.managers) == 1 and wakers() == before
        loop.run(nothing_is_lent_any_more(), 10.0)
        draining.result(30.0)
    with pytest.raises(ServerDraining):
        peer._landings.of(other_size)
    assert wakers() == before

    async def take_back() -> None:
        peer.undrain_now()

    loop.run(take_back(), 10.0)
    assert taker.pull(hashes) == (OperationState.DONE, 14)
    assert len(peer._landings.managers) == 2
