"""Snapshots: the state and then what comes, whatever the log did meanwhile; what a heartbeat says of the state; and
readers that stall within one."""

from __future__ import annotations

from typing import Any

import pytest

from kvgrpc.errors import EventsCompacted, TooManyRequests
from kvgrpc.events import KVEventBatch, decode_batch
from kvgrpc.events.log.digest import mix
from kvgrpc.events.log.journal import MAX_BATCH_BYTES
from kvgrpc.events.log.recorder import MAX_SNAPSHOTS
from kvgrpc.events.model import BlockRemoved, BlockStored
from kvgrpc.events.watch import MAX_SNAPSHOTS_IN_A_ROW, SnapshotPart, Watch, WatchMode, WatchOrder
from kvgrpc.v1 import event_service_pb2 as pb
from tests.support.event_serving import (
    HEARTBEAT,
    SNAPSHOT,
    TAIL,
    TYPED,
    Served,
    blocks_of,
    publish,
    served,
    snapshot_of,
    stored,
)
from tests.support.waiting import until


async def test_a_snapshot_is_the_state_and_then_what_comes() -> None:
    async with served() as events:
        await publish(events, stored(1, 2, 3), stored(4, parent=3), BlockRemoved([2], "GPU"), stored(9, medium="CPU"))
        call = events.watch(SNAPSHOT)
        assert (await call.read()).WhichOneof("kind") == "begin"
        parts = await snapshot_of(call)
        assert sorted(blocks_of(parts), key=int) == [1, 3, 4, 9]
        assert (parts[-1].next_sequence, parts[-1].total_blocks) == (4, 4)
        tiers = [(tier.medium, tier.group, tier.blocks, tier.mixed_hashes) for tier in parts[-1].state.tiers]
        assert tiers == [("CPU", 0, 1, mix(9)), ("GPU", 0, 3, (mix(1) + mix(3) + mix(4)) % 2**64)]
        assert parts[-1].state.next_sequence == 4
        await publish(events, stored(5))
        message = await call.read()
        assert message.raw.first_sequence == 4
        assert decode_batch(message.raw.payloads[0]).events == [stored(5)]


@pytest.mark.parametrize("encoding", [pb.WATCH_ENCODING_RAW, TYPED])
async def test_a_snapshot_without_tokens_is_the_same_state_and_batches_are_whole(encoding: Any) -> None:
    async with served() as events:
        await publish(events, stored(1, 2, 3), stored(4, parent=3))
        call = events.watch(SNAPSHOT, encoding=encoding, without_tokens=True)
        await call.read()
        parts = await snapshot_of(call)
        told = [event for part in parts for payload in part.payloads for event in decode_batch(payload).events]
        assert [event.token_ids for event in told if isinstance(event, BlockStored)] == [[]] * len(told)
        assert [list(event.stored.token_ids) for part in parts for event in part.events] in ([], [[]])
        assert parts[-1].state == (await snapshot_of(await begun(events)))[-1].state
        await publish(events, stored(5))
        message = await call.read()
        if encoding == TYPED:
            assert len(message.typed.batches[0].events[0].stored.token_ids) == 4
        else:
            assert decode_batch(message.raw.payloads[0]).events == [stored(5)]


async def begun(events: Served) -> Any:
    """A Watch of a whole snapshot, behind its first message."""
    call = events.watch(SNAPSHOT)
    await call.read()
    return call


async def test_a_snapshot_of_nothing_is_one_empty_part() -> None:
    async with served() as events:
        call = events.watch(SNAPSHOT)
        await call.read()
        (part,) = await snapshot_of(call)
        assert blocks_of([part]) == []
        assert (part.next_sequence, part.total_blocks, list(part.state.tiers)) == (0, 0, [])


async def test_a_snapshot_needs_no_journal() -> None:
    async with served(buffer_steps=0) as events:
        await publish(events, *(stored(number) for number in range(20)))
        call = events.watch(SNAPSHOT)
        await call.read()
        assert sorted(blocks_of(await snapshot_of(call)), key=int) == list(range(20))


async def test_a_publisher_without_snapshots_says_so() -> None:
    async with served(snapshots=False, heartbeat=0.02) as events:
        refused = await events.refusal(SNAPSHOT)
        assert (refused.code, refused.reason.name) == ("UNIMPLEMENTED", "FEATURE_DISABLED")
        call = events.watch(HEARTBEAT)
        assert not (await call.read()).begin.stream.HasField("state")
        assert not (await call.read()).heartbeat.HasField("state")


@pytest.mark.parametrize("mode", [TAIL, HEARTBEAT, SNAPSHOT])
async def test_a_heartbeat_says_what_the_state_comes_to(mode: pb.WatchMode.ValueType) -> None:
    async with served(heartbeat=0.02) as events:
        await publish(events, stored(-2, 5), stored(5), BlockRemoved([7], "GPU"), stored(-2, group=3))
        call = events.watch(mode)
        while True:
            message = await call.read()
            if message.WhichOneof("kind") == "heartbeat" and message.heartbeat.state.next_sequence == 4:
                break
        tiers = [(tier.medium, tier.group, tier.blocks, tier.mixed_hashes) for tier in message.heartbeat.state.tiers]
        assert tiers == [("GPU", 0, 2, (mix(2**64 - 2) + 2 * mix(5)) % 2**64), ("GPU", 3, 1, mix(2**64 - 2))]


@pytest.mark.parametrize("encoding", [pb.WATCH_ENCODING_RAW, TYPED])
async def test_a_client_that_nobody_configured_heals_from_a_snapshot_of_blocks_that_say_much(encoding: Any) -> None:
    """The stub's channel takes 4 MiB, as gRPC of every language does by itself."""
    async with served() as events:
        for first in range(0, 12_000, 4_000):
            batch = [
                BlockStored([n.to_bytes(32, "big")], None, [], 16, None, "GPU", extra_keys=[["x" * 500]])
                for n in range(first, first + 4_000)
            ]
            assert events.publisher.publish(KVEventBatch(1.0, batch))
        await until(lambda: events.publisher.counts.unsent == 0)
        assert events.publisher.counts.dropped == 0
        call = events.watch(SNAPSHOT, encoding=encoding)
        await call.read()
        parts = await snapshot_of(call)
        typed = sum(len(event.stored.block_hashes) for part in parts for event in part.events)
        assert typed + len(blocks_of(parts)) == parts[-1].total_blocks == 12_000


@pytest.mark.parametrize("encoding", [pb.WATCH_ENCODING_RAW, TYPED])
async def test_the_last_part_of_a_snapshot_may_be_as_large_as_a_batch_beside_the_longest_digest(encoding: Any) -> None:
    """The stub's channel takes 4 MiB, as gRPC of every language does by itself."""
    async with served() as events:
        many = [BlockStored([number], None, [], 16, None, f"{number:0128}") for number in range(1_000)]
        # A token is five bytes in either form.
        tokens = [2**32 - 1] * ((MAX_BATCH_BYTES - 300) // 5)
        large = BlockStored([1_000], None, tokens, len(tokens))
        assert events.publisher.publish(KVEventBatch(1.0, many))
        await publish(events, large)
        assert events.publisher.counts.dropped == 0
        call = events.watch(SNAPSHOT, encoding=encoding)
        await call.read()
        parts = await snapshot_of(call)
        assert MAX_BATCH_BYTES < parts[-1].ByteSize() < 4 * 2**20
        assert (parts[-1].total_blocks, len(parts[-1].state.tiers)) == (1_001, 1_001)


async def test_a_snapshot_that_the_log_overtakes_is_followed_by_another_one() -> None:
    async with served(buffer_steps=100) as events:
        await publish(events, *(stored(number) for number in range(5)))
        call = events.watch(SNAPSHOT)
        await call.read()
        assert len(blocks_of(await snapshot_of(call))) == 5
        # More than the transport holds for a reader that does not read.
        filler = BlockStored([1], None, list(range(70_000, 80_000)), 10_000)
        await publish(events, *[filler] * 400, *(stored(number) for number in range(100, 110)))
        known: set[int | bytes] = set()
        snapshots = reached = 0
        while reached < events.stream.next_sequence:
            message = await call.read()
            if message.WhichOneof("kind") == "snapshot":
                if message.snapshot.index == 0:
                    known, snapshots = set(), snapshots + 1
                known |= set(blocks_of([message.snapshot]))
                reached = message.snapshot.next_sequence if message.snapshot.last else reached
            for payload in message.raw.payloads:
                known |= {block for event in decode_batch(payload).events for block in event.block_hashes}  # type: ignore[union-attr]
                reached += 1
        assert known == {*range(5), *range(100, 110)}
        assert snapshots >= 1


async def test_a_reader_that_is_overtaken_again_and_again_is_told() -> None:
    async with served(buffer_steps=0) as events:
        await publish(events, stored(1))

        class Overtaken(Watch):
            async def next_part(self) -> Any:
                await publish(events, stored(2))
                return await super().next_part()

        reader = Overtaken(events.stream, WatchOrder(WatchMode.SNAPSHOT))
        snapshots = 0
        with pytest.raises(EventsCompacted):
            while True:
                part = await reader.next_part()
                snapshots += part is not None and part.last
        assert snapshots == MAX_SNAPSHOTS_IN_A_ROW


async def stalled_in_snapshots(events: Served, monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """As many readers as there may be snapshots, each in the middle of one of its own that nobody reads on."""
    monkeypatch.setattr("kvgrpc.events.log.recorder.PART_BYTES", 1)  # one block in each
    readers = []
    for number in range(MAX_SNAPSHOTS):
        await publish(events, *(stored(100 * number + block) for block in range(3)))
        readers.append(Watch(events.stream, WatchOrder(WatchMode.SNAPSHOT)))
        part = await readers[-1].next_part()
        assert isinstance(part, SnapshotPart) and not part.last
    await publish(events, stored(999))
    return readers


async def test_readers_that_stall_within_their_snapshots_shut_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(buffer_steps=0) as events:
        readers = await stalled_in_snapshots(events, monkeypatch)
        with pytest.raises(TooManyRequests):  # they may be reading on
            await Watch(events.stream, WatchOrder(WatchMode.SNAPSHOT)).next_part()
        monkeypatch.setattr("kvgrpc.events.log.recorder.STALLED_SECONDS", 0.0)
        fifth = events.watch(SNAPSHOT)
        await fifth.read()
        assert 999 in blocks_of(await snapshot_of(fifth))
        # The one that lost its place begins another when it reads on.
        part = await readers[0].next_part()
        assert isinstance(part, SnapshotPart) and part.index == 0
        assert part.snapshot.next_sequence == events.stream.next_sequence


async def test_a_reader_that_loses_its_place_again_and_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(buffer_steps=0) as events:
        reader, *_ = await stalled_in_snapshots(events, monkeypatch)
        monkeypatch.setattr("kvgrpc.events.log.recorder.LONGEST_SECONDS", 0.0)
        with pytest.raises(EventsCompacted):
            for _ in range(MAX_SNAPSHOTS_IN_A_ROW):
                assert reader._snapshot is not None
                reader._snapshot.give_up()
                await reader.next_part()
