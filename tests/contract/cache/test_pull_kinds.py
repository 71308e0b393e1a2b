"""Pulls between caches of different kinds: pages in other orders of bytes, under other names, or refused by a field."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.prefetch.model import OperationState
from kvgrpc.prefetch.pools.host import Bytes
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.pull.common import CommonPages
from kvgrpc.server.cache import lent
from tests.support.cache_serving import CacheRank, hashes_of, prompt
from tests.support.pull_fleet import PullFleet, candidates_of, nothing_is_lent, peer_of, pulled
from tests.support.waiting import wait_until

ONE_PIECE, TOKENS_FIRST = HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST
LAYERS, TOKENS, HEADS, HEAD_BYTES = 3, 4, 2, 16


def pair(fleet: PullFleet, holder: HostLayout, taker: HostLayout, **of_holder: Any) -> tuple[CacheRank, CacheRank]:
    found = fleet.open("holder", host_layout=holder, **of_holder), fleet.open("taker", host_layout=taker)
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
