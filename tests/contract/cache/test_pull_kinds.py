"""Pulls between caches of different kinds: pages in other orders of bytes, under other names, or refused by a field."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.prefetch.model import OperationKind, OperationState
from kvgrpc.prefetch.pools.host import Bytes
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.pull.common import CommonPages
from kvgrpc.server.cache import lent
from kvgrpc.v1 import index_service_pb2 as index_pb
from tests.support.cache_serving import CacheRank, hashes_of, prompt
from tests.support.pull_fleet import PULL, PullFleet, candidates_of, forms_of, nothing_is_lent, peer_of, pulled
from tests.support.waiting import wait_until

ONE_PIECE, TOKENS_FIRST = HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST
LAYERS, TOKENS, HEADS, HEAD_BYTES = 3, 4, 2, 16
EVENTS: dict[str, Any] = {"events": {"publisher": "null"}}


def pair(
    fleet: PullFleet, holder: HostLayout, taker: HostLayout, *, of_taker: Any = None, **of_holder: Any
) -> tuple[CacheRank, CacheRank]:
    found = (
        fleet.open("holder", host_layout=holder, **of_holder),
        fleet.open("taker", host_layout=taker, **(of_taker or {})),
    )
    wait_until(lambda: bool(candidates_of(found[1])), 10.0)
    return found


def page_in(page_hash: str, layout: HostLayout) -> Bytes:
    """Keys and values of a page as a cache of this layout has them."""
    random = np.random.default_rng(int(page_hash[:16], 16))
    page = random.integers(0, 256, (2, LAYERS, TOKENS, HEADS, HEAD_BYTES), dtype=np.uint8)
    return np.ascontiguousarray(page.transpose(0, 2, 1, 3, 4) if layout is TOKENS_FIRST else page).reshape(-1)


def fill(rank: CacheRank, hashes: Sequence[str], named: Sequence[str] | None = None) -> None:
    """The rank's host has these pages, under the names that it gives them."""
    manager = rank.manager
    pages: Any = manager.host.table.take(len(hashes))
    for page, each in zip(pages, hashes, strict=True):
        manager.host.set_flat(int(page), page_in(each, manager.host.layout))
    manager.host.table.commit(pages)
    manager.known_cache().keep(named or hashes, 0, pages, "")


def assert_has(rank: CacheRank, hashes: Sequence[str], named: Sequence[str] | None = None) -> None:
    host = rank.manager.host
    pages = rank.manager.known_cache().pages_of(named or hashes)
    try:
        assert len(pages) == len(hashes)
        for page, each in zip(pages, hashes, strict=True):
            assert (host.flat(int(page)) == page_in(each, host.layout)).all()
    finally:
        host.table.end_read(pages)


@pytest.mark.parametrize(("holder", "taker"), [(ONE_PIECE, TOKENS_FIRST), (TOKENS_FIRST, ONE_PIECE)])
def test_pages_of_another_order_arrive_in_ours(fleet: PullFleet, holder: HostLayout, taker: HostLayout) -> None:
    """More of them than may be lent at a time, and with what the taker has already."""
    has, takes = pair(fleet, holder, taker)
    hashes = hashes_of(prompt(14))
    fill(has, hashes)
    fill(takes, hashes[:3])
    assert len(forms_of(has) & forms_of(takes)) == 1
    assert pulled(takes, hashes).completed == 14
    assert_has(takes, hashes)
    wait_until(lambda: nothing_is_lent(has), 10.0)
    assert not any(row.failure for row in peer_of(takes).book.rows())


class OtherNames:
    """Of an engine that hashes tokens in a way of its own, and has met some prompts."""

    def __init__(self, prompts: Sequence[Sequence[str]]) -> None:
        self._own = {each: hashlib.sha256(each.encode()).hexdigest() for hashes in prompts for each in hashes}
        self._common = {own: common for common, own in self._own.items()}

    def own(self, common: Sequence[str]) -> list[str]:
        return _leading(self._own, common)

    def common(self, own: Sequence[str]) -> list[str]:
        return _leading(self._common, own)


def _leading(names: dict[str, str], asked: Sequence[str]) -> list[str]:
    end = next((n for n, each in enumerate(asked) if each not in names), len(asked))
    return [names[each] for each in asked[:end]]


@pytest.fixture
def other_names(monkeypatch: pytest.MonkeyPatch) -> Callable[[OtherNames], None]:
    """From now on caches whose tokens come first name pages in their own way."""

    def give(names: OtherNames) -> None:
        real = lent._common_of

        def named(shape: PageShape, layout: HostLayout) -> CommonPages | None:
            found = real(shape, layout)
            return replace(found, names=names) if found is not None and layout is TOKENS_FIRST else found

        monkeypatch.setattr(lent, "_common_of", named)

    return give


@pytest.mark.parametrize(("holder", "taker"), [(ONE_PIECE, TOKENS_FIRST), (TOKENS_FIRST, ONE_PIECE)])
def test_pages_of_another_name_are_taken_as_far_as_it_is_known(
    fleet: PullFleet, other_names: Callable[[OtherNames], None], holder: HostLayout, taker: HostLayout
) -> None:
    hashes = hashes_of(prompt(12))
    names = OtherNames([hashes[:9]])
    other_names(names)
    has, takes = pair(fleet, holder, taker)
    own = [hashlib.sha256(each.encode()).hexdigest() for each in hashes]
    of_holder, of_taker = (own if each is TOKENS_FIRST else hashes for each in (holder, taker))
    fill(has, hashes, of_holder)
    row = pulled(takes, of_taker)
    assert (row.state, row.completed) == (OperationState.DONE, 9)
    assert_has(takes, hashes[:9], of_taker[:9])


@pytest.fixture
def index(fleet: PullFleet) -> Iterator[SyncClient]:
    with fleet.index() as client:
        yield client


def events_of(hashes: Sequence[str]) -> index_pb.ScorePrompt:
    values = [hash_key(sglang_event_hash(bytes.fromhex(each))) for each in hashes]
    return index_pb.ScorePrompt(block_hashes=index_pb.BlockHashes(values=values))


def test_a_plan_that_is_asked_for_in_the_words_of_both_kinds_is_done(
    fleet: PullFleet, other_names: Callable[[OtherNames], None], index: SyncClient
) -> None:
    """The holder is busy and names pages in its own way; the taker has the first of them by the common names."""
    tokens = prompt(12)
    hashes = hashes_of(tokens)
    other_names(OtherNames([hashes]))
    has, takes = pair(fleet, TOKENS_FIRST, ONE_PIECE, **EVENTS, of_taker=EVENTS)
    own = [hashlib.sha256(each.encode()).hexdigest() for each in hashes]
    fill(has, hashes, own)
    fill(takes, hashes[:3])
    has.rank.load.say(prefill_tokens_per_second=1.0, waiting_tokens=1_000)
    takes.rank.load.say(prefill_tokens_per_second=1.0)
    request = index_pb.PlanRequest(max_placements=2)
    by_tokens = index_pb.ScorePrompt(sglang=index_pb.SglangPrompt(token_ids=tokens))
    asked = request.prompts.add(prompt=by_tokens, other_kinds=[events_of(own)])

    def blocks() -> list[tuple[str, int, int]]:
        (plan,) = index.plan(request).plans
        return [(each.engine, each.host_blocks, each.pull.blocks) for each in plan.placements]

    wait_until(lambda: blocks() == [("taker", 3, 9), ("holder", 12, 0)], 20.0)
    del asked.other_kinds[:]
    assert blocks() == [("taker", 3, 0), ("holder", 0, 3)], "asked in the words of one kind"
    row = takes.start(OperationKind.PREFETCH, hashes)
    assert row.wait(30.0)
    assert_has(takes, hashes)


def test_an_index_knows_nothing_of_a_kind_that_it_was_not_asked_about(
    fleet: PullFleet, other_names: Callable[[OtherNames], None], index: SyncClient
) -> None:
    """The taker cannot compute the holder's own hashes: that the index finds none of its own there proves nothing."""
    hashes = hashes_of(prompt(12))
    other_names(OtherNames([hashes]))
    settings = {"pull": replace(PULL, index=index.address), **EVENTS}
    has, takes = pair(fleet, TOKENS_FIRST, ONE_PIECE, **EVENTS, of_taker=settings)
    fill(has, hashes, [hashlib.sha256(each.encode()).hexdigest() for each in hashes])
    wait_until(lambda: sum(block.blocks for each in index.list_sources() for block in each.blocks) == 12, 20.0)
    assert pulled(takes, hashes).completed == 12


def test_an_index_is_asked_by_the_common_names_too(
    fleet: PullFleet,
    other_names: Callable[[OtherNames], None],
    index: SyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A taker that has a prompt's common names finds holders of the other kind in the index, and asks no others."""
    hashes = hashes_of(prompt(12))
    other_names(OtherNames([hashes]))
    settings = {"pull": replace(PULL, index=index.address), **EVENTS}
    has, takes = pair(fleet, ONE_PIECE, TOKENS_FIRST, **EVENTS, of_taker=settings)
    lacks = fleet.open("lacks", host_layout=ONE_PIECE, **EVENTS)
    wait_until(lambda: len(candidates_of(takes)) == 2)
    fill(has, hashes)
    wait_until(lambda: sum(block.blocks for each in index.list_sources() for block in each.blocks) == 12, 20.0)
    counted = list[Any]()

    def count(request: Any, common: bool) -> int:
        counted.append(request)
        return 0

    monkeypatch.setattr(peer_of(lacks).servicer, "_count_leading", count)
    own = [hashlib.sha256(each.encode()).hexdigest() for each in hashes]
    assert pulled(takes, own).completed == 12
    assert_has(takes, hashes, own)
    assert not counted


def test_a_prompt_whose_common_names_nobody_knows_is_not_asked_for(
    fleet: PullFleet, other_names: Callable[[OtherNames], None]
) -> None:
    other_names(OtherNames([]))
    has, takes = pair(fleet, ONE_PIECE, TOKENS_FIRST)
    hashes = hashes_of(prompt(6))
    fill(has, hashes)
    assert pulled(takes, hashes).state is OperationState.DECLINED


def test_a_holder_that_forgot_a_prompt_is_told_its_common_names(
    fleet: PullFleet, other_names: Callable[[OtherNames], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = hashes_of(prompt(12))
    other_names(OtherNames([hashes]))
    has, takes = pair(fleet, ONE_PIECE, TOKENS_FIRST)
    monkeypatch.setattr(peer_of(has).servicer._counted, "get", lambda name: None)
    fill(has, hashes)
    own = [hashlib.sha256(each.encode()).hexdigest() for each in hashes]
    assert pulled(takes, own).completed == 12
    assert_has(takes, hashes, own)


MLA = PageShape.mla(LAYERS, TOKENS, HEADS * HEAD_BYTES, "float16")


@pytest.mark.parametrize(
    ("field", "of_holder"),
    [
        ("page_tokens", {"shape": PageShape.mha(LAYERS, 2 * TOKENS, HEADS, HEAD_BYTES // 2, "float16")}),
        ("layout", {"shape": PageShape.mha(LAYERS, TOKENS, 2 * HEADS, HEAD_BYTES // 4, "float16")}),
        ("layout", {"shape": MLA}),
        ("dtype", {"shape": PageShape.mha(LAYERS, TOKENS, HEADS, HEAD_BYTES // 2, "bfloat16")}),
        ("model", {"model": "another/model"}),
        ("revision", {"revision": "another"}),
    ],
    ids=["tokens of a page", "heads", "latent", "type", "model", "revision"],
)
def test_what_cannot_be_had_is_refused_by_its_field(
    fleet: PullFleet, caplog: pytest.LogCaptureFixture, field: str, of_holder: dict[str, Any]
) -> None:
    has, takes = pair(fleet, ONE_PIECE, TOKENS_FIRST, **of_holder)
    for asked in (1, 2):
        assert pulled(takes, hashes_of(prompt(6, asked))).state is OperationState.DECLINED
    assert f"does not say what it has: INVALID_REQUEST: identity.{field}: must be" in caplog.text
    assert nothing_is_lent(has)
    assert forms_of(has).isdisjoint(forms_of(takes)), "and nobody plans it"


def test_another_kind_is_asked_in_its_own_words_once(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    has, takes = pair(fleet, ONE_PIECE, TOKENS_FIRST)
    calls = peer_of(takes)._holders
    heard, call = list[str](), calls._call

    async def hear(holder: Any, method: str, request: Any, seconds: float) -> Any:
        heard.append(f"{method} {request.identity.layout.partition(' ')[0]}")
        return await call(holder, method, request, seconds)

    monkeypatch.setattr(calls, "_call", hear)
    for first in (1, 2, 3):
        hashes = hashes_of(prompt(2, first))
        fill(has, hashes)
        assert pulled(takes, hashes).completed == 2
        wait_until(lambda: nothing_is_lent(has))  # else it may be busy, and asked once more
    refused, *rest = heard
    assert "kvgrpc-common" not in refused
    assert rest == ["CountPages kvgrpc-common-1", "LendPages kvgrpc-common-1"] * 3


def test_who_was_of_another_kind_is_forgotten_when_it_is_gone(fleet: PullFleet) -> None:
    """Else each engine that ever was would be remembered by its address."""
    has, takes = pair(fleet, ONE_PIECE, TOKENS_FIRST)
    hashes = hashes_of(prompt(2))
    fill(has, hashes)
    assert pulled(takes, hashes).completed == 2
    holders = peer_of(takes)._holders
    assert holders._of_other_kind == {has.address}
    has.close()
    fleet.ranks.remove(has)
    wait_until(lambda: not holders._of_other_kind)
