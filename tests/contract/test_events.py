"""EventService over a real server: what the comments of event_service.proto promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import pytest

from kvgrpc.client import Begin, Client, Heartbeat, Snapshot, TypedBatches
from kvgrpc.client.cursor import Cursor
from kvgrpc.errors import EventsCompacted, KvGrpcError, TooManyRequests
from kvgrpc.events import (
    EventServicer,
    EventStream,
    JournalingPublisher,
    KVEventBatch,
    decode_batch,
    open_publisher,
    wire,
)
from kvgrpc.events.codec import Dialect
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES, mix
from kvgrpc.events.log.journal import MAX_BATCH_BYTES, Batches
from kvgrpc.events.log.recorder import MAX_SNAPSHOTS, Recorder
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, Event, UnknownEvent
from kvgrpc.events.watch import MAX_SNAPSHOTS_IN_A_ROW, SnapshotPart, Watch, WatchMode, WatchOrder
from kvgrpc.events.wire import Form, part_to_pb
from kvgrpc.model import RankId, RankRef
from kvgrpc.rpc.interceptors import Admission, CallLimits, interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub, add_EventServiceServicer_to_server
from tests.support.waiting import until

REPLAY, TAIL, HEARTBEAT = pb.WATCH_MODE_REPLAY, pb.WATCH_MODE_TAIL, pb.WATCH_MODE_HEARTBEAT
SNAPSHOT, TYPED = pb.WATCH_MODE_SNAPSHOT, pb.WATCH_ENCODING_TYPED


@dataclass
class Served:
    """Publishers, the servicer over their streams, and a client of it."""

    publishers: list[JournalingPublisher]
    servicer: EventServicer
    stub: Any
    address: str

    @property
    def publisher(self) -> JournalingPublisher:
        return self.publishers[0]

    @property
    def stream(self) -> EventStream:
        return self.publishers[0].stream

    async def publish(self, *words: bytes) -> None:
        """Publishes a batch for each word and waits until they are in the journal."""
        for word in words:
            assert self.publisher.publish_raw(said(word))
        await until(lambda: self.publisher.counts.unsent == 0)

    def watch(self, mode: pb.WatchMode.ValueType = REPLAY, **fields: Any) -> Any:
        return self.stub.Watch(pb.WatchRequest(mode=mode, **fields), timeout=30)

    async def read(self, mode: pb.WatchMode.ValueType = REPLAY, **fields: Any) -> list[pb.WatchResponse]:
        return [message async for message in self.watch(mode, **fields)]

    async def refusal(self, mode: pb.WatchMode.ValueType = REPLAY, **fields: Any) -> KvGrpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read(mode, **fields)
        return error_from(caught.value)


@asynccontextmanager
async def served(
    *, dps: int = 1, max_watches: int = 256, watches_per_caller: int = 64, heartbeat: float = 60.0, **settings: Any
) -> AsyncIterator[Served]:
    publishers = [open_publisher({"publisher": "null", "clear_first": False} | settings, rank(dp)) for dp in range(dps)]
    assert all(isinstance(publisher, JournalingPublisher) for publisher in publishers)
    streams = [publisher.stream for publisher in publishers if publisher.stream is not None]
    servicer = EventServicer(streams, max_watches=max_watches, heartbeat_seconds=heartbeat)
    admission = Admission(CallLimits(watches_per_caller=watches_per_caller))
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity(), admission), options=SERVER_OPTIONS)
    add_EventServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(publishers, servicer, EventServiceStub(channel), f"127.0.0.1:{port}")  # type: ignore[arg-type]
    finally:
        await server.stop(0)
        for publisher in publishers:
            publisher.shutdown(1)


def said(word: bytes) -> bytes:
    """A batch that can be told from others."""
    return msgspec.msgpack.encode([1.0, [{"type": "Said", "word": word}], 0])


def rank(dp: int = 0) -> RankRef:
    return RankRef(RankId("engine", dp=dp), 77)


def kinds(messages: list[pb.WatchResponse]) -> list[str | None]:
    return [message.WhichOneof("kind") for message in messages]


def payloads(messages: list[pb.WatchResponse]) -> list[bytes]:
    return [payload for message in messages for payload in message.raw.payloads]


async def test_a_stream_is_listed_as_it_stands() -> None:
    async with served(dps=2, topic="kv", buffer_steps=2) as events:
        await events.publish(b"a", b"bb", b"ccc")
        listed = (await events.stub.ListStreams(pb.ListStreamsRequest())).streams
        assert [(stream.engine, stream.dp) for stream in listed] == [("engine", 0), ("engine", 1)]
        first = listed[0]
        assert len(first.log_id) == 32
        assert (first.oldest_sequence, first.next_sequence, first.journal_bytes) == (
            1,
            3,
            len(said(b"bb") + said(b"ccc")),
        )
        assert (first.topic, first.pub_endpoint, first.dropped_batches) == (b"kv", "", 0)
        assert (first.publisher.rank.engine, first.publisher.epoch) == ("engine", 77)
        assert listed[1].oldest_sequence == listed[1].next_sequence == 0
        assert listed[1].log_id != first.log_id


async def test_a_replay_is_begin_then_the_exact_bytes_then_the_end() -> None:
    async with served() as events:
        sent = [b"%d" % number for number in range(1_000)]
        await events.publish(*sent)
        begin, *rest = await events.read()
        assert begin.begin.first_sequence == 0
        assert begin.begin.stream.log_id == events.stream.log_id
        assert begin.begin.stream.next_sequence == 1_000
        assert set(kinds(rest)) == {"raw"}
        assert payloads(rest) == [said(word) for word in sent]


async def test_chunks_follow_each_other_and_stay_far_below_the_message_limit() -> None:
    async with served() as events:
        sent = [bytes([number]) * 100_000 for number in range(50)]
        await events.publish(*sent)
        expected = 0
        for message in (await events.read())[1:]:
            assert message.raw.first_sequence == expected
            assert message.ByteSize() < 2 * 2**20
            expected += len(message.raw.payloads)
        assert expected == 50


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 0, [0]), (2, 4, [2, 3, 4]), (None, 3, [0, 1, 2, 3]), (3, None, [3, 4]), (4, 4, [4]), (5, None, [])],
)
async def test_a_replay_has_both_its_ends(first: int | None, last: int | None, expected: list[int]) -> None:
    async with served() as events:
        await events.publish(*(b"%d" % number for number in range(5)))
        messages = await events.read(from_sequence=first, end_sequence=last)
        assert messages[0].begin.first_sequence == (first or 0)
        assert payloads(messages) == [said(b"%d" % number) for number in expected]


async def test_a_replay_of_an_empty_log_says_that_it_is_empty() -> None:
    async with served() as events:
        (begin,) = await events.read()
        assert begin.begin.first_sequence == begin.begin.stream.next_sequence == 0


async def test_a_replay_without_a_cursor_begins_with_the_oldest_kept() -> None:
    async with served(buffer_steps=2) as events:
        await events.publish(b"a", b"b", b"c")
        messages = await events.read()
        assert messages[0].begin.first_sequence == 1
        assert payloads(messages) == [said(b"b"), said(b"c")]


async def test_a_hole_is_told_where_it_is() -> None:
    async with served() as events:
        await events.publish(b"a")
        events.publisher.publish(None)
        await events.publish(b"b")
        messages = await events.read()
        assert kinds(messages)[:3] == ["begin", "raw", "dropped"]
        dropped = messages[2].dropped
        assert (dropped.first_sequence, dropped.last_sequence, dropped.cause) == (1, 1, "encode")
        assert b"AllBlocksCleared" in payloads(messages[3:])[-1] + payloads(messages[3:])[0]


async def test_a_tail_goes_on_where_the_replay_ends() -> None:
    async with served() as events:
        await events.publish(b"a", b"b")
        call = events.watch(TAIL, from_sequence=1)
        seen: list[bytes] = []
        for number in range(20):
            while len(seen) < number + 1:
                seen += (await call.read()).raw.payloads
            await events.publish(b"%d" % number)
        assert seen == [said(b"b"), *(said(b"%d" % number) for number in range(19))]


async def test_an_idle_tail_says_that_it_is_current() -> None:
    async with served(heartbeat=0.05) as events:
        await events.publish(b"a")
        call = events.watch(TAIL)
        messages = [await call.read() for _ in range(4)]
        assert kinds(messages) == ["begin", "raw", "heartbeat", "heartbeat"]
        assert messages[-1].heartbeat.next_sequence == 1


async def test_a_busy_tail_hears_heartbeats_too_and_can_compare_each() -> None:
    async with served(heartbeat=0.02) as events:
        call, cursor, seen = events.watch(TAIL), 0, 0
        await call.read()
        while seen < 5:
            for _ in range(20):
                await events.publish(b"a")
            message = await call.read()
            cursor += len(message.raw.payloads)
            if message.WhichOneof("kind") == "heartbeat":
                state = message.heartbeat.state
                assert state.next_sequence >= cursor or state.next_sequence % CHECKPOINT_BATCHES == 0
                assert message.heartbeat.next_sequence >= cursor
                seen += 1


async def test_heartbeat_mode_tells_the_next_sequence_and_no_batches() -> None:
    async with served(heartbeat=0.02) as events:
        call = events.watch(HEARTBEAT, log_id=events.stream.log_id)
        assert (await call.read()).begin.first_sequence == 0
        await events.publish(b"a", b"b")
        heartbeats = [await call.read() for _ in range(3)]
        assert set(kinds(heartbeats)) == {"heartbeat"}
        while (await call.read()).heartbeat.next_sequence < 2:
            pass


async def test_the_engine_may_be_left_out_where_there_is_one_stream() -> None:
    async with served() as events:
        assert kinds(await events.read()) == kinds(await events.read(engine="engine")) == ["begin"]
    async with served(dps=2) as events:
        assert kinds(await events.read(engine="engine", dp=1)) == ["begin"]
        refused = await events.refusal()
        assert (refused.code, refused.reason.name) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert refused.metadata["field"] == "engine"


@pytest.mark.parametrize("fields", [{"engine": "other"}, {"engine": "engine", "dp": 5}, {"dp": 5}], ids=str)
async def test_an_unknown_stream_is_refused(fields: dict[str, Any]) -> None:
    async with served() as events:
        refused = await events.refusal(**fields)
        assert (refused.code, refused.reason.name) == ("NOT_FOUND", "STREAM_NOT_FOUND")
        assert refused.metadata == {"engine": fields.get("engine", ""), "dp": str(fields.get("dp", 0))}


async def test_a_process_without_a_stream_says_so() -> None:
    async with served(dps=0) as events:
        assert not (await events.stub.ListStreams(pb.ListStreamsRequest())).streams
        assert (await events.refusal()).reason.name == "STREAM_NOT_FOUND"


@pytest.mark.parametrize("mode", [REPLAY, TAIL, HEARTBEAT])
async def test_a_cursor_of_another_log_is_refused(mode: pb.WatchMode.ValueType) -> None:
    async with served() as events:
        refused = await events.refusal(mode, log_id="0" * 32)
        assert (refused.code, refused.reason.name) == ("ABORTED", "STALE_LOG")
        assert refused.metadata == {"requestLog": "0" * 32, "currentLog": events.stream.log_id}


@pytest.mark.parametrize("mode", [REPLAY, TAIL])
async def test_a_cursor_that_is_too_old_is_refused(mode: pb.WatchMode.ValueType) -> None:
    async with served(buffer_steps=2) as events:
        await events.publish(b"a", b"b", b"c")
        refused = await events.refusal(mode, from_sequence=0)
        assert (refused.code, refused.reason.name) == ("OUT_OF_RANGE", "EVENTS_COMPACTED")
        assert refused.metadata == {
            "log": events.stream.log_id,
            "requestedSequence": "0",
            "oldestSequence": "1",
            "nextSequence": "3",
        }


async def test_an_end_that_is_too_old_is_no_empty_success() -> None:
    async with served(buffer_steps=1) as events:
        await events.publish(b"a", b"b", b"c")
        assert (await events.refusal(end_sequence=0)).reason.name == "EVENTS_COMPACTED"


@pytest.mark.parametrize(
    ("mode", "fields", "requested"),
    [
        (REPLAY, {"from_sequence": 4}, 4),
        (TAIL, {"from_sequence": 4}, 4),
        (REPLAY, {"end_sequence": 3}, 3),
        (REPLAY, {"from_sequence": 3, "end_sequence": 3}, 3),
        (REPLAY, {"end_sequence": 2**64 - 1}, 2**64 - 1),
    ],
    ids=str,
)
async def test_what_nobody_published_is_refused(
    mode: pb.WatchMode.ValueType, fields: dict[str, int], requested: int
) -> None:
    async with served() as events:
        await events.publish(b"a", b"b", b"c")
        refused = await events.refusal(mode, **fields)
        assert (refused.code, refused.reason.name) == ("OUT_OF_RANGE", "EVENTS_SEQUENCE_IN_FUTURE")
        assert refused.metadata == {
            "log": events.stream.log_id,
            "requestedSequence": str(requested),
            "nextSequence": "3",
        }


@pytest.mark.parametrize(
    ("mode", "fields", "field"),
    [
        (pb.WATCH_MODE_UNSPECIFIED, {}, "mode"),
        (17, {}, "mode"),
        (TAIL, {"end_sequence": 0}, "end_sequence"),
        (HEARTBEAT, {"end_sequence": 0}, "end_sequence"),
        (HEARTBEAT, {"from_sequence": 0}, "from_sequence"),
        (REPLAY, {"from_sequence": 1, "end_sequence": 0}, "end_sequence"),
    ],
    ids=str,
)
async def test_requests_that_make_no_sense_are_refused(mode: Any, fields: dict[str, int], field: str) -> None:
    async with served() as events:
        await events.publish(b"a", b"b")
        refused = await events.refusal(mode, **fields)
        assert (refused.code, refused.reason.name) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert refused.metadata["field"] == field


async def test_a_reader_that_the_log_overtakes_is_told() -> None:
    async with served(buffer_steps=5) as events:
        call = events.watch(TAIL)
        await call.read()
        # More than the transport holds for a reader that does not read.
        for _ in range(400):
            await events.publish(b"x" * 50_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await call.read()
        assert error_from(caught.value).reason.name == "EVENTS_COMPACTED"


async def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async with served() as events:
        idle = events.watch(TAIL)
        await idle.read()
        busy = events.watch(TAIL)
        await busy.read()
        sent = [b"%d" % number * 10_000 for number in range(1_000)]
        await events.publish(*sent)
        seen: list[bytes] = []
        while len(seen) < len(sent):
            seen += (await busy.read()).raw.payloads
        assert seen == [said(word) for word in sent]
        caught_up: list[bytes] = []
        while len(caught_up) < len(sent):
            caught_up += (await idle.read()).raw.payloads
        assert caught_up == seen


@pytest.mark.slow
async def test_a_thousand_readers_that_do_not_read_hold_up_nobody() -> None:
    """One that reads gets all, the publisher drops nothing, and each of the others gets all once it reads."""
    readers, sent = 1_000, [b"%d" % number * 100 for number in range(1_000)]
    async with served(max_watches=readers + 1, watches_per_caller=readers + 1) as events, AsyncExitStack() as stack:
        idle = []
        for number in range(readers):
            if number % 100 == 0:
                own = grpc.aio.insecure_channel(events.address, options=[("grpc.use_local_subchannel_pool", 1)])
                stub: Any = EventServiceStub(await stack.enter_async_context(own))
            idle.append(stub.Watch(pb.WatchRequest(mode=TAIL)))
        for call in idle:
            assert (await call.read()).HasField("begin")
        busy = events.watch(TAIL)
        await busy.read()
        await events.publish(*sent)
        wanted, seen = [said(word) for word in sent], list[bytes]()
        while len(seen) < len(sent):
            seen += (await busy.read()).raw.payloads
        assert seen == wanted
        assert events.servicer.watches == readers + 1 and events.publisher.counts.dropped == 0
        for call in idle:
            late: list[bytes] = []
            while len(late) < len(sent):
                late += (await call.read()).raw.payloads
            assert late == wanted


async def test_readers_are_bounded_and_one_that_leaves_makes_room() -> None:
    async with served(max_watches=2) as events:
        calls = [events.watch(TAIL) for _ in range(2)]
        for call in calls:
            await call.read()
        refused = await events.refusal(TAIL)
        assert (refused.code, refused.reason.name) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
        assert refused.metadata == {"limit": "2", "value": "3", "scope": "watches"}
        assert refused.retry_after
        calls[0].cancel()
        await until(lambda: events.servicer.watches == 1)
        assert kinds(await events.read()) == ["begin"]
        calls[1].cancel()
        await until(lambda: events.servicer.watches == 0)
        assert events.stream._listeners == ()


@pytest.mark.parametrize("mode", [TAIL, HEARTBEAT])
async def test_draining_ends_whoever_would_not_end(mode: pb.WatchMode.ValueType) -> None:
    async with served() as events:
        await events.publish(b"a")
        call = events.watch(mode)
        await call.read()
        events.servicer.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read():
                pass
        refused = error_from(caught.value)
        assert (refused.code, refused.reason.name) == ("UNAVAILABLE", "SERVER_DRAINING")
        assert (await events.refusal(mode)).reason.name == "SERVER_DRAINING"
        assert payloads(await events.read(REPLAY)) == [said(b"a")]


async def test_a_tail_ends_with_its_publisher_and_after_its_last_batch() -> None:
    async with served() as events:
        call = events.watch(TAIL)
        await call.read()
        events.publisher.publish_raw(said(b"last"))
        await asyncio.to_thread(events.publisher.shutdown, 1)
        assert list((await call.read()).raw.payloads) == [said(b"last")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert error_from(caught.value).reason.name == "SERVER_DRAINING"


async def test_what_is_published_as_objects_is_replayed_with_the_rank() -> None:
    async with served(dps=2) as events:
        events.publishers[1].publish(KVEventBatch(1.0, [BlockRemoved([7], "GPU")]))
        await until(lambda: events.publishers[1].counts.unsent == 0)
        (payload,) = payloads(await events.read(engine="engine", dp=1))
        assert payload == (
            b"\x93\xcb\x3f\xf0"
            + b"\0" * 6
            + b"\x91\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x07\xa6medium\xa3GPU\x01"
        )


def stored(
    *hashes: int, medium: str | None = "GPU", parent: int | None = None, group: int | None = None
) -> BlockStored:
    return BlockStored([*hashes], parent, [7] * 4 * len(hashes), 4, None, medium, group_idx=group)


async def publish(events: Served, *happened: Event) -> None:
    """A batch for each."""
    for event in happened:
        assert events.publisher.publish(KVEventBatch(1.0, [event]))
    await until(lambda: events.publisher.counts.unsent == 0)


async def snapshot_of(call: Any) -> list[pb.SnapshotPart]:
    """The parts of the snapshot that comes next."""
    parts: list[pb.SnapshotPart] = []
    while not parts or not parts[-1].last:
        message = await call.read()
        assert message.WhichOneof("kind") == "snapshot"
        assert message.snapshot.index == len(parts)
        parts.append(message.snapshot)
    return parts


def blocks_of(parts: list[pb.SnapshotPart]) -> list[int | bytes]:
    """The blocks that RAW parts say, in their order."""
    return [
        block
        for part in parts
        for payload in part.payloads
        for event in decode_batch(payload).events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    ]


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


async def test_a_snapshot_of_nothing_is_one_empty_part() -> None:
    async with served() as events:
        call = events.watch(SNAPSHOT)
        await call.read()
        (part,) = await snapshot_of(call)
        assert blocks_of([part]) == []
        assert (part.next_sequence, part.total_blocks, list(part.state.tiers)) == (0, 0, [])


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


async def test_a_snapshot_needs_no_journal() -> None:
    async with served(buffer_steps=0) as events:
        await publish(events, *(stored(number) for number in range(20)))
        call = events.watch(SNAPSHOT)
        await call.read()
        assert sorted(blocks_of(await snapshot_of(call)), key=int) == list(range(20))


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


@pytest.mark.parametrize("mode", [WatchMode.REPLAY, WatchMode.TAIL])
async def test_a_reader_without_a_cursor_gets_the_oldest_however_busy_the_publisher(mode: WatchMode) -> None:
    """It drops the oldest batch while the reader hears where it begins."""
    async with served(buffer_steps=4) as events:
        await publish(events, *(stored(number) for number in range(8)))
        reader = Watch(events.stream, WatchOrder(mode))
        await publish(events, *(stored(number) for number in range(8, 16)))
        part = await reader.next_part()
        assert isinstance(part, Batches) and (part.first, len(part.payloads)) == (reader.state.oldest_sequence, 4)
        with pytest.raises(EventsCompacted):  # a reader that is too slow is told, as ever
            Watch(events.stream, WatchOrder(mode, first=reader.state.oldest_sequence))


async def test_a_reader_whose_oldest_went_between_two_looks_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(buffer_steps=4) as events:
        await publish(events, *(stored(number) for number in range(8)))
        before = events.stream.state()
        await publish(events, *(stored(number) for number in range(8, 16)))
        states = iter([before, before, events.stream.state()])
        monkeypatch.setattr(type(events.stream), "state", lambda self: next(states))
        reader = Watch(events.stream, WatchOrder(WatchMode.REPLAY))
        part = await reader.next_part()
        assert isinstance(part, Batches) and reader.complete
        assert (part.first, part.last) == (reader.state.oldest_sequence, reader.state.next_sequence - 1)


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
        assert (told.block_size, told.tier, told.medium, told.group) == (1, pb.TIER_HOST, "CPU_PINNED", 2)
        assert (told.lora_id, told.lora_name, told.cache_salt) == (3, "adapter", "salt")
        assert (told.cache_kind, told.sliding_window, told.locality) == ("mamba", 64, "LOCAL")
        assert (told.ownership, told.session_id) == ("o", "s")
        assert (removed.removed.tier, removed.removed.medium) == (pb.TIER_DEVICE, "")
        assert cleared.WhichOneof("kind") == "cleared"
        assert unknown.unknown == strange.raw
        assert (list(pairs.stored.token_ids), pairs.stored.tier) == ([], pb.TIER_STORAGE)
        assert not pairs.stored.HasField("parent_block_hash")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"tiers": [pb.TIER_DEVICE]}, [1, 4]),
        ({"tiers": [pb.TIER_HOST, pb.TIER_STORAGE]}, [2, 3]),
        ({"groups": [0]}, [1, 2, 3]),
        ({"groups": [1], "tiers": [pb.TIER_DEVICE]}, [4]),
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
        call = events.watch(SNAPSHOT, encoding=TYPED, tiers=[pb.TIER_HOST])
        await call.read()
        (part,) = await snapshot_of(call)
        assert [event.stored.block_hashes[0].value for event in part.events] == [3]
        assert [tier.blocks for tier in part.state.tiers] == [1, 2]
        assert not part.payloads


async def test_the_client_watches_typed_and_filtered_with_the_digest() -> None:
    async with served(heartbeat=0.02) as events, Client(events.address) as client:
        await publish(events, stored(1, 2), stored(3, medium="CPU"))
        typed: dict[str, Any] = {"typed": True, "tiers": [pb.TIER_HOST]}
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
    filtered = part_to_pb(SnapshotPart(snapshot, 0, payload, False), Form(typed=True, tiers=frozenset([pb.TIER_HOST])))
    assert not filtered.snapshot.payloads and not filtered.snapshot.events


def test_a_typed_watch_that_breaks_goes_on_behind_its_last_batch() -> None:
    cursor = Cursor(pb.WatchRequest(mode=TAIL, encoding=TYPED))
    begin = pb.WatchBegin(stream=pb.EventStream(log_id="a" * 32, next_sequence=9), first_sequence=5)
    cursor.hear(pb.WatchResponse(begin=begin))
    cursor.hear(pb.WatchResponse(typed=pb.TypedBatches(first_sequence=5, batches=[pb.KvEventBatch()] * 2)))
    assert (cursor.request.from_sequence, cursor.request.encoding) == (7, TYPED)


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


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"encoding": 9}, "encoding"),
        ({"tiers": [pb.TIER_HOST]}, "tiers"),
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


async def test_streams_are_listed_in_pages() -> None:
    async with served(dps=12) as events:
        listed: list[int] = []
        token = ""
        for _ in range(3):
            page = await events.stub.ListStreams(pb.ListStreamsRequest(page_size=5, page_token=token))
            listed += [stream.dp for stream in page.streams]
            token = page.next_page_token
        assert (listed, token) == (list(range(12)), "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events.stub.ListStreams(pb.ListStreamsRequest(page_token="nonsense"))
        assert error_from(caught.value).reason.name == "INVALID_REQUEST"


async def test_the_readers_of_a_fenced_publisher_are_sent_away() -> None:
    async with served() as events:
        calls = [events.watch(mode) for mode in (TAIL, HEARTBEAT, SNAPSHOT)]
        for call in calls:
            await call.read()
        events.publisher.fence()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert error_from(caught.value).reason.name == "SERVER_DRAINING"
