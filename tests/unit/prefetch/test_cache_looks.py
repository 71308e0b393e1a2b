"""What operators and routers ask of a large cache, while its engine goes on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Tier
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import as_pages
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.tree.cache import TieredCache
from kvgrpc.prefetch.tree.looks import NODES_AT_ONCE
from kvgrpc.prefetch.tree.prefix_tree import EvictionQueue, PrefixTree

PROMPTS = 3 * NODES_AT_ONCE
PAGES = 2 * PROMPTS


def prompt(number: int) -> list[str]:
    return [f"{number:063d}{page}" for page in range(2)]


@pytest.fixture
def cache() -> Iterator[TieredCache]:
    """Many prompts, every third of an extra key."""
    host = HostPool(PageShape.mha(1, 4, 1, 8, "float16"), PAGES)
    cache = TieredCache(host)
    for number in range(PROMPTS):
        pages = host.table.take(2)
        assert not isinstance(pages, NotEnoughPages)
        host.table.commit(pages)
        cache.keep(prompt(number), 0, pages, key_of(number))
    yield cache
    cache.clear()
    assert host.table.free_count == PAGES and host.close()


def key_of(number: int) -> str:
    return "lora" if number % 3 == 0 else ""


def pinned(cache: TieredCache) -> int:
    return cache.use()[0].details["pinned"]


def test_how_full_it_is_is_known_without_a_look_at_every_node(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.pin(prompt(1), 60.0) == cache.pin(prompt(2), 60.0) == 2
    with monkeypatch.context() as patched:
        patched.setattr(PrefixTree, "nodes", None)
        assert (cache.use()[0].used, pinned(cache)) == (PAGES, 4)
        cache.match(prompt(1)[:1])  # which splits it
        assert pinned(cache) == 4
        with pytest.raises(InvalidRequest, match="seconds"):
            cache.pin(prompt(1), math.nan)
        assert pinned(cache) == 4
        cache.pin(prompt(1), 0.0)
        assert pinned(cache) == 2


def test_room_that_cannot_be_had_is_refused_without_a_look_at_what_is_there(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = cache.match(prompt(0)[:1])
    cache.pin(prompt(3), 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(EvictionQueue, "victims", None)
        assert cache.reserve(PAGES, ()) == NotEnoughPages(3)
        assert cache.reserve(PAGES, prompt(1)) == NotEnoughPages(5)
        read = [cache.pages_of(prompt(number)) for number in range(10, PROMPTS)]
        assert cache.reserve(21, ()) == NotEnoughPages(1)
    assert cache.reserve(20, ()) == NotEnoughPages(3)
    for pages in read:
        cache.host.table.end_read(pages)
    cache.release(held)
    cache.pin(prompt(3), 0.0)
    room = cache.reserve(PAGES, ())
    assert not isinstance(room, NotEnoughPages)
    cache.host.table.release(room)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_purge_takes_what_nobody_uses_and_counts_the_rest(cache: TieredCache, dry_run: bool) -> None:
    held = cache.match(prompt(0)[:1])
    cache.pin(prompt(3), 60.0)
    read = cache.pages_of(prompt(6))
    gone, stay = cache.purge(Tier.HOST, "lora", dry_run=dry_run)
    keyed = [number for number in range(PROMPTS) if key_of(number)]
    # Of the first prompt the second page goes: what is held is the first one.
    expected = [prompt(0)[1]] + [each for number in keyed if number not in (0, 3, 6) for each in prompt(number)]
    assert sorted(gone) == sorted(expected) and stay == 5
    assert cache.leading(prompt(9)) == (2 if dry_run else 0) and cache.leading(prompt(1)) == 2
    cache.host.table.end_read(read)
    cache.release(held)


def test_the_engines_calls_come_between_the_parts_of_a_purge(cache: TieredCache) -> None:
    lock = CountingLock(cache._lock)
    cache._lock = lock  # type: ignore[assignment]
    gone, stay = cache.purge(Tier.HOST)
    assert (len(gone), stay) == (PAGES, 0)
    assert lock.times >= 2 * PROMPTS // NODES_AT_ONCE


SPLITS = range(2 * PROMPTS // NODES_AT_ONCE + 1)
"""After which part of a look at all nodes other calls split them."""


@pytest.mark.parametrize("after", SPLITS)
def test_prompts_that_are_split_during_a_look_are_told_whole(cache: TieredCache, after: int) -> None:
    every = [each for number in range(PROMPTS) for each in prompt(number)]
    split_during(cache, after)
    assert sorted(cache.hashes(Tier.HOST)) == sorted(every)


@pytest.mark.parametrize("after", SPLITS)
@pytest.mark.parametrize("dry_run", [True, False])
def test_prompts_that_are_split_during_a_purge_go_whole(cache: TieredCache, dry_run: bool, after: int) -> None:
    keyed = [each for number in range(0, PROMPTS, 3) for each in prompt(number)]
    split_during(cache, after)
    gone, stay = cache.purge(Tier.HOST, "lora", dry_run=dry_run)
    assert (sorted(gone), stay) == (sorted(keyed), 0)


def split_during(cache: TieredCache, after: int) -> None:
    """Matches the first page of every prompt once the cache's lock was let go of so often."""

    def split() -> None:
        for number in range(PROMPTS):
            cache.release(cache.match(prompt(number)[:1]))

    cache._lock = CountingLock(cache._lock, after, split)  # type: ignore[assignment]


class CountingLock:
    """How often it was let go; ``then`` is called once, after so many times."""

    def __init__(self, lock: Any, after: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self._lock = lock
        self._after, self._then = after + 1, then
        self.times = 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.times += 1
        if self.times == self._after:
            self._then()


def test_matches_go_on_while_all_of_it_is_purged(cache: TieredCache) -> None:
    over, wrong = threading.Event(), []

    def match() -> None:
        number = 0
        while not over.is_set():
            held = cache.match(prompt(number % PROMPTS))
            if held.pages not in (0, 1, 2) or len(set(held.host)) != held.pages:
                wrong.append(held)
            cache.release(held)
            number += 7

    threads = [threading.Thread(target=match) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        cache.purge(Tier.HOST)
    over.set()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert cache.purge(Tier.HOST)[1] == 0 and cache.host.table.free_count == PAGES


@pytest.mark.parametrize("first", range(12))
def test_what_comes_behind_the_beginning_of_a_prompt_is_read_without_it(first: int) -> None:
    """Whatever nodes it is made of."""
    host = HostPool(PageShape.mha(1, 4, 1, 8, "float16"), 16)
    cache = TieredCache(host)
    whole = [f"{page:064d}" for page in range(11)]
    pages = host.table.take(10)
    assert not isinstance(pages, NotEnoughPages)
    host.table.commit(pages)
    cache.keep(whole[:10], 0, pages, "")
    for cut in (3, 7):
        cache.release(cache.match(whole[:cut]))  # a node ends there
    for last in {max(first, 8), max(first, 10), 11}:
        found = cache.pages_behind(whole[:last], first)
        assert found.tolist() == pages[first : min(last, 10)].tolist()
        assert host.table.counts()["read"] == len(found)
        host.table.end_read(found)
    cache.clear()
    assert host.close()


def test_a_prompt_that_is_lent_in_parts_stays_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: each split copies what is behind it, and nobody joins them."""
    host = HostPool(PageShape.mha(1, 4, 1, 8, "float16"), 12)
    cache = TieredCache(host)
    whole = [f"{page:064d}" for page in range(10)]
    for hashes, count in ((whole, 10), (["f" * 64], 1)):
        pages = host.table.take(count)
        assert not isinstance(pages, NotEnoughPages)
        host.table.commit(pages)
        cache.keep(hashes, 0, pages, "")
    with monkeypatch.context() as patched:
        patched.setattr(PrefixTree, "_split", None)
        parts = [cache.pages_behind(whole[: first + 2], first).tolist() for first in range(0, 10, 2)]
        parts.append(cache.pages_behind([*whole[:3], "e" * 64], 2).tolist())
    assert [len(part) for part in parts] == [2, 2, 2, 2, 2, 1]
    assert cache.evict_host(11) == 1, "it is read"
    for part in parts:
        host.table.end_read(as_pages(part))
    assert cache.evict_host(4) == 4 and cache.leading(whole) == 6
    cache.clear()
    assert host.close()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_no_bytes_are_given_under_a_name_that_is_not_theirs(first: int) -> None:
    """Whoever lends or writes what a stranger names: wrong bytes would be everybody's under that name."""
    host = HostPool(PageShape.mha(1, 4, 1, 8, "float16"), 4)
    cache = TieredCache(host)
    pages = host.table.take(4)
    assert not isinstance(pages, NotEnoughPages)
    host.table.commit(pages)
    chain = [f"{page:064x}" for page in range(4)]
    cache.keep(chain, 0, pages, "")
    foreign = [chain[0], "f" * 64, *chain[2:]]
    found = cache.pages_behind(foreign, first)
    assert found.tolist() == {0: [pages[0]], 1: [], 2: pages[2:].tolist()}[first]
    host.table.end_read(found)
    assert host.table.counts()["read"] == 0
