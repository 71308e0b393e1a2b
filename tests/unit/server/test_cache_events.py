"""Events of the cache's tiers: however many pages go at once, no event is larger than a follower takes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvgrpc.events import BlockRemoved, EventPublisher, KVEventBatch
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.model import Tier
from kvgrpc.server.cache.events import TierEvents

MOST = 65_536


class Noted:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[KVEventBatch] = []

    def publish(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)


def hashes(count: int) -> list[str]:
    return [number.to_bytes(8, "big").ljust(32, b"\1").hex() for number in range(count)]


def removed(tier: Tier, gone: Sequence[str]) -> list[list[Any]]:
    publisher = Noted()
    TierEvents(cast(EventPublisher, publisher), 16).tell(tier, "removed", gone, "")
    events = [event for batch in publisher.batches for event in batch.events]
    assert len(publisher.batches) == len(events), "each is a frame of its own"
    assert all(isinstance(event, BlockRemoved) for event in events)
    return [list(cast(BlockRemoved, event).block_hashes) for event in events]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])
def test_a_huge_removal_is_many_events(tier: Tier) -> None:
    gone = hashes(2 * MOST + 1)
    told = removed(tier, gone)
    assert [len(each) for each in told] == [MOST, MOST, 1]
    assert [name for each in told for name in each] == [sglang_event_hash(bytes.fromhex(each)) for each in gone]


def test_a_removal_of_few_pages_is_one_event_and_of_none_is_none() -> None:
    assert [len(each) for each in removed(Tier.STORAGE, hashes(3))] == [3]
    assert removed(Tier.STORAGE, []) == []
