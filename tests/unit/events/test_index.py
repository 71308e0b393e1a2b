"""Who holds how much of a request, held against a dictionary of sets for each cache."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc import hashing
from kvgrpc.client import sglang_hashes, vllm_hashes
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following import index as indexes
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import MAX_MEDIA, BlockIndex, BlockSet, Match
from kvgrpc.events.log.digest import hash_key
from kvgrpc.events.log.snapshot import CacheState
from kvgrpc.events.model import BlockRemoved, BlockStored

DEVICE, HOST, STORAGE = "GPU", "CPU", "DISK"
MEDIA = [DEVICE, HOST, "CPU_PINNED", STORAGE, "EXTERNAL"]
TIERS = [[DEVICE], MEDIA[:3], MEDIA[:4], MEDIA]


def shown(
    index: BlockIndex, gpu: list[int] | None = None, cpu: list[int] | None = None, disk: list[int] | None = None
) -> BlockSet:
    cache = index.cache()
    cache.stored(DEVICE, gpu or [])
    cache.stored(HOST, cpu or [])
    cache.stored(STORAGE, disk or [])
    cache.show()
    return cache


def test_every_cache_that_holds_the_beginning_is_told_with_its_tiers() -> None:
    index = BlockIndex()
    fast = shown(index, gpu=[1, 2, 3])
    mixed = shown(index, gpu=[1, 3], cpu=[2], disk=[4])
    shown(index, gpu=[2, 3])
    assert index.score([1, 2, 3, 4, 5]) == {fast: Match(3, 3, 3, 3), mixed: Match(1, 3, 4, 4)}


def test_a_request_of_nothing_and_a_request_nobody_has_match_nobody() -> None:
    index = BlockIndex()
    shown(index, gpu=[1])
    assert index.score([]) == {}
    assert index.score([7, 1]) == {}


def test_a_hole_ends_the_match() -> None:
    index = BlockIndex()
    cache = shown(index, gpu=[1, 2, 4])
    assert index.score([1, 2, 3, 4]) == {cache: Match(2, 2, 2, 2)}


def test_a_block_that_is_stored_twice_is_there_until_it_is_removed_twice() -> None:
    index = BlockIndex()
    cache = shown(index, gpu=[1, 1, 1])
    for left in (True, True, False):
        cache.removed(DEVICE, [1])
        assert bool(index.score([1])) is left


def test_what_is_removed_and_was_not_there_is_left_alone() -> None:
    index = BlockIndex()
    cache = shown(index, cpu=[1])
    cache.removed(DEVICE, [1, 2])
    assert index.score([1]) == {cache: Match(0, 1, 1, 1)}
    assert len(cache) == 1


def test_nobody_sees_a_cache_before_it_is_shown() -> None:
    index = BlockIndex()
    index.cache().stored(DEVICE, [1])
    assert index.score([1]) == {}


def test_a_rebuilt_cache_takes_the_place_of_the_old_one_in_one_step() -> None:
    index = BlockIndex()
    old = shown(index, gpu=[1, 2])
    other = shown(index, gpu=[2])
    new = index.cache()
    new.stored(DEVICE, [2, 3])
    assert index.score([1]) == {old: Match(1, 1, 1, 1)}
    new.show(instead_of=old)
    assert index.score([1]) == {}
    assert index.score([2, 3]) == {new: Match(2, 2, 2, 2), other: Match(1, 1, 1, 1)}


def test_a_cleared_cache_holds_nothing_and_can_be_filled_again() -> None:
    index = BlockIndex()
    cache = shown(index, gpu=[1, 1], cpu=[2])
    other = shown(index, gpu=[1])
    cache.cleared()
    assert len(cache) == 0
    assert index.score([1]) == {other: Match(1, 1, 1, 1)}
    cache.stored(DEVICE, [1])
    cache.removed(DEVICE, [1])
    assert index.score([1]) == {other: Match(1, 1, 1, 1)}


def test_only_changes_are_called_changes() -> None:
    cache = BlockIndex().cache()
    assert cache.stored(DEVICE, [1, 2, 1]) == 2
    assert cache.stored(HOST, [1]) == 1
    assert cache.removed(DEVICE, [1, 3]) == ([1], 0)
    assert cache.removed(DEVICE, [1]) == ([1], 1)
    assert cache.media_of(1) == {HOST}


def test_tiers_beyond_what_the_index_tells_apart_count_for_no_prefix_and_for_the_digest() -> None:
    index = BlockIndex()
    contents, state = CacheContents(index), CacheState()
    contents.blocks.show()
    for number in range(2 * MAX_MEDIA):
        events = [BlockStored([1, number], None, [], 1, medium=f"MEDIUM{number}")]
        contents.apply(events)
        state.apply(events)
        assert contents.digest().tiers == state.digest().tiers
    assert index.score([1]) == {contents.blocks: Match(0, 0, 0, 1)}
    contents.apply([BlockStored([2**40], None, [], 1, medium="CPU")])  # those of today's engines are always told apart
    assert index.score([2**40]) == {contents.blocks: Match(0, 1, 1, 1)}
    for number in range(2 * MAX_MEDIA):
        contents.apply([BlockRemoved([1, number], f"MEDIUM{number}")])
    assert contents.blocks.counts() == {"CPU": 1} and len(contents.digest().tiers) == 1


def test_so_many_media_are_told_apart() -> None:
    cache = BlockIndex().cache()
    known = [cache.tells(medium) for medium in ("GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")]
    assert [*known, *(cache.tells(f"MEDIUM{number}") for number in range(MAX_MEDIA))] == [True] * MAX_MEDIA + [
        False
    ] * 6
    assert cache.tells("GPU") and cache.tells("MEDIUM0")
    with pytest.raises(ValueError, match="MEDIUM31"):
        cache.stored("MEDIUM31", [1])


def test_a_cache_answers_for_itself_whether_shown_or_not() -> None:
    index = BlockIndex()
    shown(index, gpu=[9])
    cache = index.cache()
    cache.stored(DEVICE, [1, 2])
    cache.stored(HOST, [3])
    assert cache.match([1, 2, 3, 4]) == Match(2, 3, 3, 3)
    assert cache.match([9]) == Match(0, 0, 0, 0)
    assert (cache.count(DEVICE), cache.count(STORAGE), cache.counts()) == (2, 0, {DEVICE: 2, HOST: 1})


def test_the_room_of_a_cache_that_left_is_for_the_next_which_nobody_sees_before_it_is_shown() -> None:
    index = BlockIndex()
    for _ in range(10):
        shown(index, gpu=[1]).drop()
        cache = index.cache()
        cache.stored(DEVICE, [2])
        assert index.score([2]) == {}
        cache.drop()
    assert len(index._caches) == 2  # the old one's is free once its blocks are


def test_a_large_cache_that_empties_is_swept_at_once_and_a_small_one_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(indexes, "LEAST_GARBAGE", 8)
    index = BlockIndex()
    shown(index, gpu=list(range(20))).drop()
    assert index.blocks == 0
    small = shown(index, gpu=list(range(5)))
    small.drop()
    assert index.blocks == 5


def test_a_block_goes_with_its_last_holder_though_another_emptied_before() -> None:
    index = BlockIndex()
    ours, other = shown(index), shown(index, gpu=[1, 2])
    ours.stored(DEVICE, [1, 2])
    ours.removed(DEVICE, [1])
    other.cleared()
    assert ours.removed(DEVICE, [2]) == ([2], 1)
    assert index.blocks == 1, "the other one's, until it is swept"


def test_sets_that_became_the_same_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    index = BlockIndex()
    ours, other = shown(index, gpu=[1]), shown(index, gpu=[2])
    for _ in range(100):
        other.cleared()
        other.stored(DEVICE, [2])
        ours.stored(DEVICE, [3])
        ours.removed(DEVICE, [3])
    assert len(index.tables()[1]) < 110


@pytest.mark.parametrize("caches", [1, 70])
def test_emptied_caches_leave_no_blocks_behind_for_long(monkeypatch: pytest.MonkeyPatch, caches: int) -> None:
    monkeypatch.setattr(indexes, "LEAST_GARBAGE", 8)
    index = BlockIndex()
    for round_ in range(20):
        for number in range(caches):
            cache = shown(index, gpu=list(range(round_ * 1000 + number, round_ * 1000 + number + 10)))
            cache.drop()
    assert index.blocks <= 30


def test_sets_of_holders_that_no_block_has_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "LEAST_GARBAGE", 8)
    index = BlockIndex()
    caches = [shown(index) for _ in range(12)]
    for pattern in range(1, 2**12):
        holders = [cache for number, cache in enumerate(caches) if pattern >> number & 1]
        for cache in holders:
            cache.stored(DEVICE, [1])
        assert set(index.score([1])) == set(holders)
        for cache in holders:
            cache.removed(DEVICE, [1])
    assert len(index.tables()[1]) < 100


@pytest.mark.parametrize("what", ["stored", "removed"])
def test_sets_are_forgotten_though_only_one_kind_of_event_comes(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(indexes, "LEAST_GARBAGE", 8)
    index, rng = BlockIndex(), random.Random(1)
    caches = [shown(index) for _ in range(10)]
    if what == "removed":
        for cache in caches:
            cache.stored(DEVICE, range(60))
    for block in range(60):
        for cache in rng.sample(caches, len(caches)):
            getattr(cache, what)(DEVICE, [block])
    assert len(index.tables()[1]) < 150


def test_a_cache_that_is_cleared_again_and_again_costs_the_others_sets_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch may say it a hundred thousand times, and each looked through all sets: 4 ms in an ordinary fleet."""
    index = BlockIndex()
    caches = [shown(index) for _ in range(10)]
    for block in range(1, 1024):
        for bit, cache in enumerate(caches):
            if block >> bit & 1:
                cache.stored(DEVICE, [block])
    looked, reach = 0, BlockIndex._reach_of

    def counted(self: BlockIndex, holders: indexes.Holders) -> indexes.Reach:
        nonlocal looked
        looked += 1
        return reach(self, holders)

    monkeypatch.setattr(BlockIndex, "_reach_of", counted)
    cache = shown(index)
    for _ in range(200):
        cache.stored(DEVICE, [5])
        assert index.score([5])[cache].device == 1
        cache.cleared()
        assert cache not in index.score([5])
    assert looked <= 200 * (indexes.SETS_OF_A_CLEAR + 10)


blocks = st.lists(st.integers(0, 12), max_size=6)
steps = st.tuples(
    st.sampled_from(["stored", "stored", "removed", "cleared", "rebuild", "drop"]),
    st.integers(0, 3),
    st.sampled_from(MEDIA),
    blocks,
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60), st.lists(blocks, min_size=1, max_size=4), st.sampled_from([0, 2, 64]))
def test_the_index_answers_like_a_set_for_each_cache_and_tier(
    history: list[tuple[str, int, str, list[int]]], requests: list[list[int]], sets_of_a_clear: int
) -> None:
    with pytest.MonkeyPatch.context() as bounds:
        bounds.setattr(indexes, "LEAST_GARBAGE", 3)
        bounds.setattr(indexes, "SETS_OF_A_CLEAR", sets_of_a_clear)
        bounds.setattr(indexes, "MOST_STALE", 3)
        index = BlockIndex()
        caches = {number: shown(index) for number in range(4)}
        naive: dict[int, dict[str, Counter[int]]] = {number: empty() for number in range(4)}
        for what, number, medium, changed in history:
            act(index, caches, naive, what, number, medium, changed)
            for request in requests:
                expected = {caches[one]: match for one in caches if (match := naive_match(naive[one], request)).storage}
                assert index.score(request) == expected
            for one, cache in caches.items():
                for each in MEDIA:
                    assert cache.count(each) == len(+naive[one][each])


def act(
    index: BlockIndex,
    caches: dict[int, BlockSet],
    naive: dict[int, dict[str, Counter[int]]],
    what: str,
    number: int,
    medium: str,
    changed: list[int],
) -> None:
    if what == "stored":
        caches[number].stored(medium, changed)
        naive[number][medium].update(changed)
    elif what == "removed":
        caches[number].removed(medium, changed)
        for block in changed:
            naive[number][medium][block] = max(0, naive[number][medium][block] - 1)
    else:
        naive[number] = empty()
        if what == "cleared":
            caches[number].cleared()
        elif what == "drop":
            caches[number].drop()
            caches[number] = shown(index)
        else:
            rebuilt = index.cache()
            rebuilt.stored(medium, changed)
            rebuilt.show(instead_of=caches[number])
            caches[number] = rebuilt
            naive[number][medium].update(changed)


def empty() -> dict[str, Counter[int]]:
    return {medium: Counter() for medium in MEDIA}


def naive_match(tiers: dict[str, Counter[int]], request: list[int]) -> Match:
    lengths = []
    for media in TIERS:
        held = {block for medium in media for block in +tiers[medium]}
        lengths.append(next((at for at, block in enumerate(request) if block not in held), len(request)))
    return Match(*lengths)


@pytest.mark.parametrize("seed", range(20))
def test_long_requests_are_matched_where_runs_of_blocks_with_the_same_holders_end(seed: int) -> None:
    rng, index = random.Random(seed), BlockIndex()
    naive = {shown(index): empty() for _ in range(6)}
    for cache, tiers in naive.items():
        for medium in rng.sample(MEDIA, 2):
            held = [*range(rng.choice([0, 31, 32, 33, 64, 65, 200])), *rng.sample(range(200), 5)]
            cache.stored(medium, held)
            tiers[medium].update(held)
    for length in (1, 32, 33, 34, 65, 200, 230):
        request = list(range(length))
        if rng.random() < 0.5:
            request[rng.randrange(length)] = rng.randrange(300)
        expected = {cache: match for cache, tiers in naive.items() if (match := naive_match(tiers, request)).storage}
        assert index.score(request) == expected
        order = [blocks for blocks, caches in index.leading(request) for _ in caches]
        assert order == sorted((match.storage for match in expected.values()), reverse=True)


def test_tokens_are_asked_for_by_the_hashes_of_their_whole_pages() -> None:
    tokens = list(range(100, 110))
    names = [hash_key(hashing.sglang_event_hash(page)) for page in hashing.page_hashes(tokens[:8], 4)]
    assert sglang_hashes(tokens, 4) == names and all(0 <= name < 2**64 for name in names)
    assert sglang_hashes(tokens, 4, cache_salt="s") != names
    assert len(sglang_hashes(tokens[:8], 4, bigram=True)) == 1  # a pair needs one more token
    five = sglang_hashes(tokens[:5], 4, bigram=True)
    assert sglang_hashes(tokens[:8], 4, bigram=True) == five != sglang_hashes([*tokens[:4], 7], 4, bigram=True)
    assert len(sglang_hashes(tokens, 1)) == 10
    assert sglang_hashes([], 4) == sglang_hashes(tokens[:3], 4) == []
    seeded = list(hashing.each_block_hash(tokens, 4, hash_seed="0"))
    assert vllm_hashes(tokens, 4, hash_seed="0") == [hashing.vllm_event_hash(block) for block in seeded]
    with pytest.raises(InvalidRequest):
        sglang_hashes(tokens, 0)
    with pytest.raises(InvalidRequest):
        vllm_hashes(tokens, 0, hash_seed="0")
