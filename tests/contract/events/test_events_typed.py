"""Typed batches and filters: one form for the events of all engines, bytes where a message would be too large, and a
digest that no filter changes."""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from kvgrpc.client import Begin, Client, Heartbeat, Snapshot, TypedBatches
from kvgrpc.client.cursor import Cursor
from kvgrpc.events import decode_batch, wire
from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding
from kvgrpc.events.log.journal import Batches
from kvgrpc.events.log.recorder import Recorder
from kvgrpc.events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    TierBlocksCleared,
    UnknownEvent,
)
from kvgrpc.events.watch import SnapshotPart
from kvgrpc.events.wire import Form, part_to_pb
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import event_service_pb2 as pb
from tests.support.event_serving import REPLAY, SNAPSHOT, TAIL, TYPED, kinds, publish, served, snapshot_of, stored


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (1.5, 1.5),
        (-2e9, -2e9),
        (99999999999.5, 99999999999.5),
        (1.7e12, 1.7e9),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_the_time_of_a_batch_comes_back_as_it_was_written(written: float, told: float) -> None:
    def seconds(ts: float) -> float:
        payload = BatchEncoder(Dialect.VLLM, Encoding.MAP, 0).encode(KVEventBatch(ts, []))
        return part_to_pb(Batches(0, [payload]), Form(typed=True)).typed.batches[0].unix_seconds

    assert seconds(written) == told
    assert math.isnan(seconds(math.nan))


def test_a_clear_says_its_scope_and_passes_the_filter_of_its_tier() -> None:
    events: list[Event] = [AllBlocksCleared(), TierBlocksCleared("gpu"), TierBlocksCleared("CPU", "kvcr")]
    payload = BatchEncoder(Dialect.VLLM, Encoding.MAP, 0).encode(KVEventBatch(1.0, events))

    def told(*tiers: int) -> list[pb.BlocksCleared]:
        form = Form(typed=True, tiers=frozenset(tiers))
        return [event.cleared for event in part_to_pb(Batches(0, [payload]), form).typed.batches[0].events]

    everything = pb.BlocksCleared(scope=pb.CLEAR_SCOPE_ALL)
    device = pb.BlocksCleared(scope=pb.CLEAR_SCOPE_MEDIUM, tier=common_pb2.TIER_DEVICE, medium="gpu")
    host = pb.BlocksCleared(scope=pb.CLEAR_SCOPE_MEDIUM, tier=common_pb2.TIER_HOST, medium="CPU", ownership="kvcr")
    assert told() == [everything, device, host]
    assert told(common_pb2.TIER_HOST) == [everything, host]


async def test_typed_batches_have_one_form_for_all_engines() -> None:
    async with served() as events:
        digest = bytes(range(32))
        everything = BlockStored(
            [-2, digest], 2**64 - 1, [10, 11], 1, 3, "CPU_PINNED", "adapter", None, 2, "mamba", 64, "LOCAL", "o", "s",
            None, "salt",
        )  # fmt: skip
        strange = UnknownEvent("BlockMoved", msgspec.msgpack.encode({"type": "BlockMoved"}))
        bigrams = BlockStored([1], None, [[1, 2]], 1, None, "DISK")
        for happened in (everything, BlockRemoved([-2]), AllBlocksCleared(), strange, bigrams):
            await publish(events, happened)
        _, message = await events.read(encoding=TYPED)
        assert message.typed.first_sequence == 0
        full, removed, cleared, unknown, pairs = (batch.events[0] for batch in message.typed.batches)
        assert [hash.WhichOneof("kind") for hash in full.stored.block_hashes] == ["value", "digest"]
        assert full.stored.block_hashes[0].value == 2**64 - 2
        assert full.stored.block_hashes[1].digest == digest
        assert full.stored.parent_block_hash.value == 2**64 - 1
        assert list(full.stored.token_ids) == [10, 11]
        told = full.stored
        assert (told.page_tokens, told.tier, told.medium, told.group) == (1, common_pb2.TIER_HOST, "CPU_PINNED", 2)
        assert (told.lora_id, told.lora_name, told.cache_salt) == (3, "adapter", "salt")
        assert (told.cache_kind, told.sliding_window, told.locality) == ("mamba", 64, "LOCAL")
        assert (told.ownership, told.session_id) == ("o", "s")
        assert (removed.removed.tier, removed.removed.medium) == (common_pb2.TIER_DEVICE, "")
        assert cleared.WhichOneof("kind") == "cleared"
        assert unknown.unknown == strange.raw
        assert (list(pairs.stored.token_ids), pairs.stored.tier) == ([], common_pb2.TIER_STORAGE)
        assert not pairs.stored.HasField("parent_block_hash")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"tiers": [common_pb2.TIER_DEVICE]}, [1, 4]),
        ({"tiers": [common_pb2.TIER_HOST, common_pb2.TIER_STORAGE]}, [2, 3]),
        ({"groups": [0]}, [1, 2, 3]),
        ({"groups": [1], "tiers": [common_pb2.TIER_DEVICE]}, [4]),
    ],
    ids=str,
)
async def test_filters_leave_events_out_and_no_batch(filters: dict[str, Any], expected: list[int]) -> None:
    async with served() as events:
        await publish(
            events, stored(1), stored(2, medium="CPU"), stored(3, medium="DISK"), stored(4, group=1), AllBlocksCleared()
        )
        _, message = await events.read(encoding=TYPED, **filters)
        assert len(message.typed.batches) == 5
        told = [event for batch in message.typed.batches for event in batch.events]
        assert [event.stored.block_hashes[0].value for event in told[:-1]] == expected
        assert told[-1].WhichOneof("kind") == "cleared"


async def test_a_typed_snapshot_is_filtered_and_its_digest_is_not() -> None:
    async with served() as events:
        await publish(events, stored(1, 2), stored(3, medium="CPU"))
        call = events.watch(SNAPSHOT, encoding=TYPED, tiers=[common_pb2.TIER_HOST])
        await call.read()
        (part,) = await snapshot_of(call)
        assert [event.stored.block_hashes[0].value for event in part.events] == [3]
        assert [tier.blocks for tier in part.state.tiers] == [1, 2]
        assert not part.payloads


async def test_the_client_watches_typed_and_filtered_with_the_digest() -> None:
    async with served(heartbeat=0.02) as events, Client(events.address) as client:
        await publish(events, stored(1, 2), stored(3, medium="CPU"))
        typed: dict[str, Any] = {"typed": True, "tiers": [common_pb2.TIER_HOST]}
        async with aclosing(client.watch(mode=SNAPSHOT, **typed)) as parts:  # type: ignore[type-var]
            begin, snapshot = await anext(parts), await anext(parts)
            assert isinstance(begin, Begin) and isinstance(snapshot, Snapshot) and snapshot.last
            assert [event.stored.block_hashes[0].value for event in snapshot.events] == [3]
            await publish(events, stored(4), stored(5, medium="CPU"))
            heard: list[Any] = []
            while not heard or heard[-1].first_sequence + len(heard[-1].batches) < 4:
                part = await anext(parts)
                heard += [part] if isinstance(part, TypedBatches) else []
            told = [event for part in heard for batch in part.batches for event in batch.events]
            assert [event.stored.block_hashes[0].value for event in told] == [5]
            beat = await anext(parts)
            while not isinstance(beat, Heartbeat):
                beat = await anext(parts)
            assert beat.state is not None and [tier.blocks for tier in beat.state.tiers] == [2, 3]


def test_a_typed_watch_that_breaks_goes_on_behind_its_last_batch() -> None:
    cursor = Cursor(pb.WatchRequest(mode=TAIL, encoding=TYPED))
    begin = pb.WatchBegin(stream=pb.EventStream(log_id="a" * 32, next_sequence=9), first_sequence=5)
    cursor.hear(pb.WatchResponse(begin=begin))
    cursor.hear(pb.WatchResponse(typed=pb.TypedBatches(first_sequence=5, batches=[pb.KvEventBatch()] * 2)))
    assert (cursor.request.from_sequence, cursor.request.encoding) == (7, TYPED)


async def test_a_batch_that_would_be_too_large_as_a_message_comes_as_it_is_and_the_watch_goes_on() -> None:
    """Hashes of a byte are eleven times as large in a message. The stub's channel takes 4 MiB, as any by itself."""
    async with served() as events:
        many = BlockStored([7] * 400_000, None, [], 16)
        await publish(events, stored(1), many, stored(2))
        call = events.watch(TAIL, encoding=TYPED)
        messages = [await call.read() for _ in range(4)]
        assert kinds(messages) == ["begin", "typed", "raw", "typed"]
        assert (messages[2].raw.first_sequence, len(messages[2].raw.payloads)) == (1, 1)
        assert decode_batch(messages[2].raw.payloads[0]).events == [many]
        assert messages[3].typed.first_sequence == 2


def test_a_part_that_would_be_too_large_as_a_message_has_its_payload() -> None:
    payload = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [7] * 400_000}], 0])
    snapshot = Recorder(Dialect.VLLM, 0).snapshot(0)
    message = part_to_pb(SnapshotPart(snapshot, 0, payload, False), Form(typed=True))
    assert (list(message.snapshot.payloads), len(message.snapshot.events)) == ([payload], 0)
    filtered = part_to_pb(
        SnapshotPart(snapshot, 0, payload, False), Form(typed=True, tiers=frozenset([common_pb2.TIER_HOST]))
    )
    assert not filtered.snapshot.payloads and not filtered.snapshot.events


def test_what_no_message_would_hold_is_not_built_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of hashes of a byte took seconds, and became RAW then."""
    monkeypatch.setattr(wire, "_fill_event", pytest.fail)
    payload = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [7] * 400_000}], 0])
    typed = Form(typed=True)
    assert part_to_pb(Batches(5, [payload]), typed).raw.payloads == [payload]
    snapshot = Recorder(Dialect.VLLM, 0).snapshot(0)
    assert part_to_pb(SnapshotPart(snapshot, 0, payload, False), typed).snapshot.payloads == [payload]
    nothings = msgspec.msgpack.encode([1.0, [[]] * 400_000, 0])
    assert part_to_pb(Batches(5, [nothings]), typed).raw.payloads == [nothings]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"encoding": 9}, "encoding"),
        ({"tiers": [common_pb2.TIER_HOST]}, "tiers"),
        ({"groups": [0]}, "groups"),
        ({"tiers": [0], "encoding": pb.WATCH_ENCODING_TYPED}, "tiers"),
        ({"tiers": [9], "encoding": pb.WATCH_ENCODING_TYPED}, "tiers"),
        ({"mode": SNAPSHOT, "from_sequence": 0}, "from_sequence"),
    ],
    ids=str,
)
async def test_forms_that_make_no_sense_are_refused(fields: dict[str, Any], field: str) -> None:
    async with served() as events:
        refused = await events.refusal(**{"mode": REPLAY} | fields)
        assert (refused.code, refused.reason.name) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert refused.metadata["field"] == field
