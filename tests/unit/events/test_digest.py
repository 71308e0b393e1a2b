"""The digest of a state: the formula of docs/events.md, with its vectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.events.codec import decode_batch
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.log.digest import (
    MAX_MEDIUM_BYTES,
    MAX_PLACES,
    DigestCounter,
    StateDigest,
    TierDigest,
    hash_key,
    medium_key,
    mix,
    mix_all,
)
from kvgrpc.events.log.snapshot import CacheState
from kvgrpc.events.wire import digest_to_pb

GOLDEN = Path(__file__).parents[2] / "conformance" / "events"
VECTORS = json.loads((GOLDEN / "digests.json").read_text())
PLACES = json.loads((GOLDEN / "places.json").read_text())
CHECKPOINTS = json.loads((GOLDEN / "checkpoints.json").read_text())
keys = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("vector", VECTORS["hashes"], ids=str)
def test_a_hash_has_its_key_and_its_mix(vector: dict[str, str]) -> None:
    block_hash = bytes.fromhex(vector["hash"][4:]) if vector["hash"].startswith("hex:") else int(vector["hash"])
    assert hash_key(block_hash) == int(vector["key"])
    assert mix(hash_key(block_hash)) == int(vector["mix"])


@pytest.mark.parametrize("vector", VECTORS["states"], ids=lambda vector: vector["name"])
def test_a_state_has_its_digest(vector: dict[str, object]) -> None:
    counter, there = DigestCounter(), set()
    for medium, group, block_hash in vector["blocks"]:  # type: ignore[attr-defined]  # of JSON
        block = medium_key(medium), group or 0, hash_key(int(block_hash))
        counter.add(*block[:2], [block[2]], block not in there)
        there.add(block)
    expected = [TierDigest(t["medium"], t["group"], t["blocks"], int(t["mixed_hashes"])) for t in vector["digest"]]  # type: ignore[attr-defined]
    assert counter.digest(7) == StateDigest(7, tuple(expected))


@given(st.lists(keys, max_size=50))
def test_many_are_mixed_as_one_by_one(several: list[int]) -> None:
    assert mix_all(several) == sum(map(mix, several)) % 2**64


@given(st.sets(keys, max_size=50), st.data())
def test_the_order_and_what_came_and_went_do_not_matter(present: set[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(sorted(present)))
    gone = data.draw(st.sets(keys)) - present
    straight, roundabout = DigestCounter(), DigestCounter()
    straight.add("GPU", 0, sorted(present), len(present))
    for key in (*order, *gone):
        roundabout.add("GPU", 0, [key], 1)
    roundabout.remove("GPU", 0, sorted(gone), len(gone))
    assert straight.digest(0) == roundabout.digest(0)


def test_a_second_copy_is_another_state_and_the_same_block() -> None:
    counter = DigestCounter()
    counter.add("GPU", 0, [5], 1)
    once = counter.digest(0)
    counter.add("GPU", 0, [5], 0)
    twice = counter.digest(0)
    assert once != twice and twice.tiers[0].blocks == 1
    counter.remove("GPU", 0, [5], 0)
    assert counter.digest(0) == once


def test_signed_and_unsigned_hashes_are_one_block_and_digests_end_in_it() -> None:
    assert hash_key(-2) == hash_key(2**64 - 2) == hash_key(b"\x01" * 24 + (2**64 - 2).to_bytes(8, "big"))
    assert hash_key(b"\x05") == 5


def test_a_tier_is_named_in_capitals_of_ascii_alone() -> None:
    assert [medium_key(medium) for medium in (None, "", "gpu", "Cpu_Pinned", "straße")] == [
        "GPU", "GPU", "GPU", "CPU_PINNED", "STRAßE",
    ]  # fmt: skip


def test_the_golden_log_has_its_digests_at_its_checkpoints() -> None:
    """A publisher's state, and a follower's contents that are compared with the past; so do clients in any language."""
    state, contents = CacheState(), CacheContents(BlockIndex())
    told: dict[int, StateDigest] = {}
    for sequence, payload in enumerate(CHECKPOINTS["payloads"], 1):
        events = decode_batch(bytes.fromhex(payload)).events
        state.apply(events)
        state.next_sequence = sequence
        contents.apply(events)
        contents.advance(sequence)
        if str(sequence) in CHECKPOINTS["digests"]:
            expected = [
                TierDigest(t["medium"], t["group"], t["blocks"], int(t["mixed_hashes"]))
                for t in CHECKPOINTS["digests"][str(sequence)]
            ]
            told[sequence] = StateDigest(sequence, tuple(expected))
            assert state.digest() == told[sequence]
    for sequence in CHECKPOINTS["digests"]:
        assert contents.digest_at(int(sequence)) == told[int(sequence)]
    assert [contents.digest_at(other) for other in (0, 63, 65, 199, 256)] == [None] * 5


def test_tiers_and_groups_beyond_the_bound_are_passed_over_by_all_readers_alike() -> None:
    """A publisher's state and a follower's contents; so do clients in any language."""
    state, contents = CacheState(), CacheContents(BlockIndex())
    passed_over = []
    for payload, expected in zip(PLACES["payloads"], PLACES["states"], strict=True):
        events = decode_batch(bytes.fromhex(payload)).events
        passed_over.append(state.apply(events))
        assert contents.apply(events) == passed_over[-1]
        tiers = state.digest().tiers
        assert contents.digest().tiers == tiers
        mixed = sum(tier.mixed_hashes for tier in tiers) % 2**64
        assert (len(tiers), sum(tier.blocks for tier in tiers), mixed) == (
            expected["places"],
            expected["blocks"],
            int(expected["mixed_hashes"]),
        )
    assert passed_over == [0, 0, 1, 0, 1, 1, 2, 0, 0]
    assert not len(contents.blocks)


def test_the_digest_of_the_most_places_fits_into_a_message() -> None:
    counter = DigestCounter()
    for group in range(MAX_PLACES):
        assert counter.admits("\U0001f600" * (MAX_MEDIUM_BYTES // 4), 2**32 - 1 - group)
        counter.add("\U0001f600" * (MAX_MEDIUM_BYTES // 4), 2**32 - 1 - group, [group], 1)
    assert not counter.admits("GPU", 0)
    assert digest_to_pb(counter.digest(2**63)).ByteSize() < 256 * 1024


@pytest.mark.parametrize("medium", ["x" * 128, "é" * 64, "x" * 126 + "é"])
def test_the_name_of_a_place_has_a_bound_in_bytes(medium: str) -> None:
    counter = DigestCounter()
    assert counter.admits(medium, 0) and not counter.admits(medium + "x", 0)


def test_keys_wait_only_until_there_are_many() -> None:
    counter, many = DigestCounter(), list(range(5_000))
    counter.add("GPU", 0, many, len(many))
    tier = counter._tiers["GPU", 0]
    assert not tier._came
    counter.remove("GPU", 0, many[1:], len(many) - 1)
    assert not tier._went and counter.digest(0).tiers == (TierDigest("GPU", 0, 1, mix(0)),)
