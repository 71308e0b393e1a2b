"""Who holds how much of a request, held against a dictionary of sets for each cache."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.events import index as indexes
from kvgrpc.events.index import CachedBlocks, Match, PrefixIndex, Tier

DEVICE, HOST, STORAGE = Tier


def shown(index: PrefixIndex, **tiers: list[int]) -> CachedBlocks:
    cache = index.cache()
    for name, blocks in tiers.items():
        cache.stored(Tier[name.upper()], blocks)
    cache.show()
    return cache


def test_every_cache_that_holds_the_beginning_is_told_with_its_tiers() -> None:
    index = PrefixIndex()
    fast = shown(index, device=[1, 2, 3])
    mixed = shown(index, device=[1, 3], host=[2], storage=[4])
    shown(index, device=[2, 3])
    assert index.score([1, 2, 3, 4, 5]) == {fast: Match(3, 3, 3), mixed: Match(1, 3, 4)}


def test_a_request_of_nothing_and_a_request_nobody_has_match_nobody() -> None:
    index = PrefixIndex()
    shown(index, device=[1])
    assert index.score([]) == {}
    assert index.score([7, 1]) == {}


def test_a_hole_ends_the_match() -> None:
    index = PrefixIndex()
    cache = shown(index, device=[1, 2, 4])
    assert index.score([1, 2, 3, 4]) == {cache: Match(2, 2, 2)}


def test_a_block_that_is_stored_twice_is_there_until_it_is_removed_twice() -> None:
    index = PrefixIndex()
    cache = shown(index, device=[1, 1, 1])
    for left in (True, True, False):
        cache.removed(DEVICE, [1])
        assert bool(index.score([1])) is left


def test_what_is_removed_and_was_not_there_is_left_alone() -> None:
    index = PrefixIndex()
    cache = shown(index, host=[1])
    cache.removed(DEVICE, [1, 2])
    assert index.score([1]) == {cache: Match(0, 1, 1)}
    assert len(cache) == 1


def test_nobody_sees_a_cache_before_it_is_shown() -> None:
    index = PrefixIndex()
    index.cache().stored(DEVICE, [1])
    assert index.score([1]) == {}


def test_a_rebuilt_cache_takes_the_place_of_the_old_one_in_one_step() -> None:
    index = PrefixIndex()
    old = shown(index, device=[1, 2])
    other = shown(index, device=[2])
    new = index.cache()
    new.stored(DEVICE, [2, 3])
    assert index.score([1]) == {old: Match(1, 1, 1)}
    new.show(instead_of=old)
    assert index.score([1]) == {}
    assert index.score([2, 3]) == {new: Match(2, 2, 2), other: Match(1, 1, 1)}


def test_a_cleared_cache_holds_nothing_and_can_be_filled_again() -> None:
    index = PrefixIndex()
    cache = shown(index, device=[1, 1], host=[2])
    other = shown(index, device=[1])
    cache.cleared()
    assert len(cache) == 0
    assert index.score([1]) == {other: Match(1, 1, 1)}
    cache.stored(DEVICE, [1])
    cache.removed(DEVICE, [1])
    assert index.score([1]) == {other: Match(1, 1, 1)}


def test_only_changes_are_called_changes() -> None:
    cache = PrefixIndex().cache()
    appeared: list[int] = []
    vanished: list[int] = []
    cache.stored(DEVICE, [1, 2, 1], appeared.append)
    cache.removed(DEVICE, [1, 3], vanished.append)
    assert (appeared, vanished) == ([1, 2], [])
    cache.removed(DEVICE, [1], vanished.append)
    assert vanished == [1]


@pytest.mark.parametrize("caches", [1, 70])
def test_emptied_caches_leave_no_blocks_behind_for_long(monkeypatch: pytest.MonkeyPatch, caches: int) -> None:
    monkeypatch.setattr(indexes, "LEAST_GARBAGE", 8)
    index = PrefixIndex()
    for round_ in range(20):
        for number in range(caches):
            cache = shown(index, device=list(range(round_ * 1000 + number, round_ * 1000 + number + 10)))
            cache.drop()
    assert index.blocks <= 30


def test_sets_of_holders_that_no_block_has_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "LEAST_GARBAGE", 8)
    index = PrefixIndex()
    caches = [shown(index) for _ in range(12)]
    for pattern in range(1, 2**12):
        holders = [cache for number, cache in enumerate(caches) if pattern >> number & 1]
        for cache in holders:
            cache.stored(DEVICE, [1])
        assert set(index.score([1])) == set(holders)
        for cache in holders:
            cache.removed(DEVICE, [1])
    assert len(index.tables()[1]) < 100


blocks = st.lists(st.integers(0, 12), max_size=6)
steps = st.tuples(
    st.sampled_from(["stored", "stored", "removed", "cleared", "rebuild", "drop"]),
    st.integers(0, 3),
    st.sampled_from(list(Tier)),
    blocks,
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60), st.lists(blocks, min_size=1, max_size=4))
def test_the_index_answers_like_a_set_for_each_cache_and_tier(
    history: list[tuple[str, int, Tier, list[int]]], requests: list[list[int]]
) -> None:
    indexes.LEAST_GARBAGE, before = 3, indexes.LEAST_GARBAGE
    try:
        index = PrefixIndex()
        caches = {number: shown(index) for number in range(4)}
        naive: dict[int, dict[Tier, Counter[int]]] = {number: empty() for number in range(4)}
        for what, number, tier, changed in history:
            act(index, caches, naive, what, number, tier, changed)
            for request in requests:
                expected = {caches[one]: match for one in caches if (match := naive_match(naive[one], request)).storage}
                assert index.score(request) == expected
            for one, cache in caches.items():
                for each in Tier:
                    assert cache.count(each) == len(+naive[one][each])
    finally:
        indexes.LEAST_GARBAGE = before


def act(
    index: PrefixIndex,
    caches: dict[int, CachedBlocks],
    naive: dict[int, dict[Tier, Counter[int]]],
    what: str,
    number: int,
    tier: Tier,
    changed: list[int],
) -> None:
    if what == "stored":
        caches[number].stored(tier, changed)
        naive[number][tier].update(changed)
    elif what == "removed":
        caches[number].removed(tier, changed)
        for block in changed:
            naive[number][tier][block] = max(0, naive[number][tier][block] - 1)
    else:
        naive[number] = empty()
        if what == "cleared":
            caches[number].cleared()
        elif what == "drop":
            caches[number].drop()
            caches[number] = shown(index)
        else:
            rebuilt = index.cache()
            rebuilt.stored(tier, changed)
            rebuilt.show(instead_of=caches[number])
            caches[number] = rebuilt
            naive[number][tier].update(changed)


def empty() -> dict[Tier, Counter[int]]:
    return {tier: Counter() for tier in Tier}


def naive_match(tiers: dict[Tier, Counter[int]], request: list[int]) -> Match:
    held: set[int] = set()
    lengths = []
    for tier in Tier:
        held |= set(+tiers[tier])
        lengths.append(next((at for at, block in enumerate(request) if block not in held), len(request)))
    return Match(*lengths)
