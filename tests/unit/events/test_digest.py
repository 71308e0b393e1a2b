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
from kvgrpc.events.log.digest import DigestCounter, StateDigest, TierDigest, hash_key, medium_key, mix, mix_all
from kvgrpc.events.log.snapshot import CacheState

GOLDEN = Path(__file__).parents[2] / "conformance" / "events"
VECTORS = json.loads((GOLDEN / "digests.json").read_text())
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
