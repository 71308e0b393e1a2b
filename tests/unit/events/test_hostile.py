"""Payloads that no engine writes: each is refused, or read as it was when it was put here, and harms nobody."""

from __future__ import annotations

import tracemalloc

import pytest

from kvgrpc.events import wire
from kvgrpc.events.log.snapshot import CacheState
from kvgrpc.events.model import BlockRemoved, BlockStored, Event, KVEventBatch
from tests.fuzz.corpus import Hostile, hostile
from tests.fuzz.reading import MAP, read

# A hash of one byte is a block of the state, with its place in a message, a snapshot and an index.
MOST_BYTES_FOR_ONE = 1_000
MOST_BYTES_FOR_ANY = 1 << 20


@pytest.mark.parametrize("case", hostile(), ids=lambda case: case.name)
def test_a_hostile_payload_is_refused_or_harms_no_reader(case: Hostile) -> None:
    tracemalloc.start()
    try:
        batch = read(case.payload)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (None if batch is None else tuple(type(event).__name__ for event in batch.events)) == case.events
    assert most < MOST_BYTES_FOR_ANY + MOST_BYTES_FOR_ONE * len(case.payload)


def test_the_corpus_has_both_kinds() -> None:
    cases = hostile()
    assert len({case.name for case in cases}) == len(cases)
    assert min(sum(case.events is None for case in cases), sum(case.events is not None for case in cases)) > 20


@pytest.mark.parametrize("group", [-1, 2**32, 2**63])
def test_a_group_that_no_message_holds_spoils_no_digest(group: int) -> None:
    """Its engine may hand it over as an object: what is written is not what is read."""
    state = CacheState()
    events: list[Event] = [BlockStored([1]), BlockStored([2], group_idx=group), BlockRemoved([1], group_idx=group)]
    batch = read(MAP.encode(KVEventBatch(1.0, events)))
    assert batch is not None
    state.apply(batch.events)
    assert [(tier.group, tier.blocks) for tier in wire.digest_to_pb(state.digest()).tiers] == [(0, 1)]


NESTED = [case for case in hostile() if "_nest" in case.name]


@pytest.mark.parametrize("case", NESTED, ids=lambda case: case.name)
@pytest.mark.parametrize("frames", [100, 600, 800])
def test_how_deep_a_payload_may_nest_does_not_depend_on_the_stack_of_its_reader(case: Hostile, frames: int) -> None:
    """Where the stack has no room for what others read, that is said, and not taken for another event."""

    def below(left: int) -> KVEventBatch | None:
        return below(left - 1) if left else read(case.payload)

    try:
        batch = below(frames)
    except RecursionError:
        assert case.events is not None and frames > 100
    else:
        assert (None if batch is None else tuple(type(event).__name__ for event in batch.events)) == case.events
