"""Clears of one tier, and events that cannot be read: what the publisher's state and every follower come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding, decode_batch
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.log.snapshot import CacheState
from kvgrpc.events.model import AllBlocksCleared, BlockStored, KVEventBatch, TierBlocksCleared

STEPS = json.loads((Path(__file__).parents[2] / "conformance/events/clears.json").read_text())


def test_publisher_and_follower_know_the_same_after_each_batch() -> None:
    index = BlockIndex()
    state, contents, other = CacheState(), CacheContents(index), CacheContents(index)
    # Another cache of the same index keeps what this one loses.
    other.apply([BlockStored(list(range(1, 10)), medium="GPU"), BlockStored([3], medium="CPU")])
    kept = other.digest()
    for sequence, step in enumerate(STEPS):
        events = decode_batch(bytes.fromhex(step["payload"])).events
        state.apply(events)
        contents.apply(events)
        contents.advance(sequence + 1)
        state.next_sequence = sequence + 1
        held = [(place["medium"], place["group"], place["blocks"]) for place in step["held"]]
        found = [(tier.medium, tier.group, tier.blocks) for tier in state.digest().tiers]
        assert found == [(*names, len(blocks)) for *names, blocks in held], step["name"]
        assert contents.digest() == state.digest(), step["name"]
        assert (contents.doubtful_at is not None) is state.digest().doubtful is step["doubtful"], step["name"]
        assert contents.blocks.counts() == {name: len(blocks) for name, group, blocks in held if group == 0}
        for name, group, blocks in held:
            assert group or all(name in contents.blocks.media_of(block) for block in blocks), step["name"]
    assert state.copies == 1, "copies of what was cleared are not counted any more"
    assert other.digest() == kept and other.blocks.counts() == {"CPU": 1, "GPU": 9}


@pytest.mark.parametrize("dialect", list(Dialect))
def test_maps_say_a_clear_of_one_tier_as_it_is(dialect: Dialect) -> None:
    clear = TierBlocksCleared("CPU", "kvcr", {"reason": "reset"})
    assert decode_batch(BatchEncoder(dialect, Encoding.MAP, 0).encode(KVEventBatch(1.0, [clear]))).events == [clear]


def test_arrays_have_readers_that_know_no_clear_but_that_of_everything() -> None:
    both = KVEventBatch(1.0, [TierBlocksCleared("CPU"), TierBlocksCleared("GPU")])
    sglang = BatchEncoder(Dialect.SGLANG, Encoding.ARRAY, 0).encode(both)
    vllm = BatchEncoder(Dialect.VLLM, Encoding.ARRAY, 0).encode(both)
    assert decode_batch(sglang).events == [AllBlocksCleared()], "the first form has the device alone"
    assert decode_batch(vllm).events == [AllBlocksCleared()] * 2
