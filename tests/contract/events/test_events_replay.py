"""Replay, tail and heartbeats: a log's exact bytes in order from a cursor on, its holes, and cursors that no log
answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvgrpc.events import KVEventBatch
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES
from kvgrpc.events.model import BlockRemoved
from kvgrpc.v1 import event_service_pb2 as pb
from tests.support.event_serving import HEARTBEAT, REPLAY, TAIL, kinds, payloads, said, served
from tests.support.waiting import until


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
