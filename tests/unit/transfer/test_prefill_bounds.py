"""What prefill counts, bounds and tells people: its bounds at their limits, its tables, who hears what of a refusal."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import ParallelLayoutMismatch, Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.prefill.chunks import Chunk
from kvgrpc.transfer.protocol.types import (
    HARDLY_GUESSED,
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    LostPair,
    RoomKey,
    RoomState,
    SessionState,
    Want,
    Writes,
)
from tests.support.prefill_side import CANCELLED, D0, D1, KEY, ME, TIMING, Side, reason, side

__all__ = ["side"]
SIX, SEVEN = RoomKey(6), RoomKey(7)
PAGES = Destination(np.arange(3, dtype=np.uint32))


def claimed(side: Side, key: RoomKey) -> Handle:
    """Of a sender that comes, whether or not it may."""
    handle = Handle()
    side.core.claim(key, handle)
    return handle


def write(key: RoomKey, milliseconds: int = 300_000, trace: str = "") -> DecodeEntry:
    return DecodeEntry(key, Want.WRITE, PAGES, milliseconds, None, trace)


class TestBounds:
    def test_past_the_bound_of_rooms_a_new_sender_fails_and_one_whose_room_is_there_does_not(self) -> None:
        side = Side(bounds=Bounds(rooms=2))
        side.claim()
        side.name(key=SIX)
        refused = claimed(side, SEVEN)
        assert reason(refused) == "TOO_MANY_REQUESTS" and refused.release_safe and SEVEN not in side.core.rooms
        assert refused.failure is not None and refused.failure.metadata == {
            "limit": "2",
            "value": "2",
            "scope": "rooms",
        }
        assert claimed(side, SIX).poll is KVPoll.WaitingForInput and side.core.open_rooms == 2

    def test_a_refused_hello_makes_no_room_past_it(self) -> None:
        side = Side(bounds=Bounds(rooms=1))
        large, other = RoomKey(HARDLY_GUESSED), RoomKey(HARDLY_GUESSED + 1)
        _, handle = side.claim(large)
        side.core.on_refused_hello([other, large], "D9", ParallelLayoutMismatch("tp"))
        assert list(side.core.rooms) == [large] and reason(handle) == "PARALLEL_LAYOUT_MISMATCH"

    def test_each_refusal_names_the_bound_that_it_met(self) -> None:
        side = Side(bounds=Bounds(rooms=3, unclaimed_per_session=1, unclaimed=2))
        for number, ref in ((1, D0), (2, D0), (3, D1), (4, D1)):
            side.name(key=RoomKey(number), ref=ref)
        said = {ref: side.core.flush(side.core.pairs[ref]) for ref in (D0, D1)}
        failures = [entry.failure for entries in said.values() for entry in entries]
        assert [failure and failure.metadata["scope"] for failure in failures] == ["unclaimed rooms of one session"] * 2
        side.claim(SIX)
        third = RankRef(D0.rank, 99)
        side.name(key=SEVEN, ref=third)
        (entry,) = side.core.flush(side.core.pairs[third])
        assert entry.failure is not None and entry.failure.metadata == {
            "limit": "2", "value": "2", "scope": "unclaimed rooms",
        }  # fmt: skip

    def test_a_room_whose_sender_came_counts_no_more_among_the_unclaimed_of_all(self) -> None:
        side = Side(bounds=Bounds(unclaimed=2))
        for number in (1, 2):
            side.name(key=RoomKey(number))
        side.claim(RoomKey(1))
        for number, ref in ((3, D1), (4, D0)):
            side.name(key=RoomKey(number), ref=ref)
        assert RoomKey(3) in side.core.rooms and RoomKey(4) not in side.core.rooms
        assert side.core._records.owners.places == {}, "each has one owner"

    def test_at_the_bound_of_unknown_writes_a_room_still_waits_and_past_it_none_that_writes_nothing(self) -> None:
        side = Side(bounds=Bounds(unknown_writes=2))
        side.name(key=RoomKey(9))
        _, waiting = side.claim(RoomKey(9))
        for number in (1, 2, 3):
            assert waiting.failure is None
            _, _, submission = side.writing(RoomKey(number))
            side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        assert reason(waiting) == "TOO_MANY_REQUESTS"
        side.ticks(TIMING.probe)
        _, _, submission = side.writing(RoomKey(4))
        side.core.on_outcome(submission, Outcome.DONE)
        assert side.core.pairs[D0].unknown_writes == 0
        for number in (5, 6):
            side.name(key=RoomKey(number))
            assert side.claim(RoomKey(number))[1].failure is None

    def test_a_probe_that_was_cancelled_while_it_writes_may_still_show_something(self) -> None:
        side = Side(bounds=Bounds(unknown_writes=1))
        for number in (1, 2):
            _, _, submission = side.writing(RoomKey(number))
            side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        side.ticks(TIMING.probe)
        record, _, submission = side.writing(RoomKey(3))
        side.core.fail(record, CANCELLED)
        side.name(key=RoomKey(4))
        assert reason(claimed(side, RoomKey(4))) == "TOO_MANY_REQUESTS"
        side.core.on_outcome(submission, Outcome.DONE)
        side.name(key=RoomKey(5))
        assert claimed(side, RoomKey(5)).failure is None

    def test_two_bounds_that_are_met_in_one_tick_are_two_failures(self) -> None:
        side = Side(bounds=Bounds(rooms=2, unclaimed_per_session=1))
        side.name(key=RoomKey(1))
        side.name(key=RoomKey(2))
        side.claim(RoomKey(3))
        side.name(key=RoomKey(4), ref=D1)
        scopes = [
            entry.failure.metadata["scope"]
            for ref in (D0, D1)
            for entry in side.core.flush(side.core.pairs[ref])
            if entry.failure is not None
        ]
        assert scopes == ["unclaimed rooms of one session", "rooms"]

    def test_one_failure_for_two_decodes_says_of_each_what_is_known_of_its_own_writes(self) -> None:
        side = Side(bounds=Bounds(rooms=1))
        _, _, submission = side.writing()
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(2 * TIMING.ended_record)
        side.claim(SEVEN)
        for ref in (D0, D1, D0):
            side.name(key=SIX, ref=ref)
        said = [side.core.flush(side.core.pairs[ref])[0].writes for ref in (D0, D1)]
        assert said == [Writes.UNKNOWN, Writes.STOPPED]

    def test_what_a_decode_says_after_it_was_given_up_is_not_heard(self) -> None:
        side = Side(bounds=Bounds(rooms=1, unclaimed=1))
        record, handle = side.claim()
        stream = side.hello()
        refused = [write(RoomKey(number)) for number in (11, 12)]
        side.core.on_frame(stream, D0, [*refused, write(KEY)])
        assert side.core.pairs[D0].lost and record.owner is None and handle.poll is KVPoll.WaitingForInput

    def test_so_many_refusals_are_kept_and_a_known_one_is_no_further_one(self) -> None:
        side = Side(bounds=Bounds(rooms=1, unclaimed=2))
        side.claim()
        for number in (11, 12, 11, 12):
            side.name(key=RoomKey(number))
        assert len(side.core.pairs[D0].answers) == 2 and not side.core.pairs[D0].lost
        side.name(key=RoomKey(13))
        assert side.core.pairs[D0].lost
        (lost,) = side.take("lost")
        assert lost == LostPair(D0, "2 rooms were refused and not forgotten", 0)

    def test_a_write_that_is_done_below_the_bound_of_unknown_ones_clears_nothing(self) -> None:
        side = Side(bounds=Bounds(unknown_writes=2))
        for number in (1, 2):
            _, _, submission = side.writing(RoomKey(number))
            side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        _, _, submission = side.writing(RoomKey(3))
        side.core.on_outcome(submission, Outcome.DONE)
        assert side.core.pairs[D0].unknown_writes == 2

    @pytest.mark.parametrize(
        ("milliseconds", "ticks"),
        [
            (0, TIMING.unclaimed - TIMING.welcome_within),
            (3_600_000, TIMING.unclaimed),
            (3_000, 30 - TIMING.welcome_within),
            (1_000, 1),
            (500, 1),
        ],
    )
    def test_a_room_waits_for_its_sender_a_second_less_than_its_decode(
        self, side: Side, milliseconds: int, ticks: int
    ) -> None:
        stream = side.hello()
        side.core.on_frame(stream, D0, [write(KEY, milliseconds)])
        side.ticks(ticks - 1)
        assert not side.core.rooms[KEY].ended
        side.ticks(1)
        (failure,) = [entry.failure for entry in side.said().values()]
        assert failure is not None and failure.reason is Reason.ROOM_NOT_FOUND
        assert f"within {ticks * 100} ms" in failure.message


class TestTables:
    def test_a_room_is_as_old_as_its_record_whoever_named_it(self, side: Side) -> None:
        side.ticks(7)
        side.claim()
        side.name(key=SIX)
        large = RoomKey(HARDLY_GUESSED)
        side.core.on_refused_hello([large], "D9", ParallelLayoutMismatch("tp"))
        assert {key: room.created_at for key, room in side.core.rooms.items()} == {KEY: 7, SIX: 7, large: 7}

    def test_a_sender_whose_decode_never_came_says_how_long_it_waited(self, side: Side) -> None:
        side.ticks(7)
        _, handle = side.claim()
        side.ticks(TIMING.room_deadline)
        assert handle.failure is not None
        assert handle.failure.metadata == {"room": "5", "attempt": "0", "state": "BOOTSTRAPPING", "limitMs": "300000"}

    def test_its_trace_is_what_decode_said(self, side: Side) -> None:
        stream = side.hello()
        side.core.on_frame(stream, D0, [DecodeEntry(KEY, Want.ANNOUNCE, None, 5000, None, "00-a")])
        assert side.core.rooms[KEY].traceparent == "00-a"
        side.core.on_frame(stream, D0, [DecodeEntry(KEY, Want.ANNOUNCE, None, 5000, None, "00-b")])
        assert side.core.rooms[KEY].traceparent == "00-a", "the first word counts"
        side.core.on_frame(stream, D0, [write(KEY, trace="00-a"), write(SIX, trace="00-c")])
        assert [side.core.rooms[key].traceparent for key in (KEY, SIX)] == ["00-a", "00-c"]

    def test_a_sender_sees_decodes_prefix_and_the_pages_that_are_in_place(self, side: Side) -> None:
        record, handle = side.claim()
        stream = side.hello()
        side.send(record, 0, 2)
        assert handle.prefix_pages is None
        destination = Destination(np.arange(3, dtype=np.uint32), 4)
        side.core.on_frame(stream, D0, [DecodeEntry(KEY, Want.WRITE, destination, 5000)])
        assert (handle.prefix_pages, handle.pages_done) == (4, 0)
        side.done()
        assert (handle.pages_done, record.pages_done) == (2, 2)

    def test_the_shell_hears_of_each_end_once_and_of_a_failed_one_when_it_is_dropped(self, side: Side) -> None:
        record, _ = side.claim()
        side.core.fail(record, CANCELLED)
        side.core.fail(record, CANCELLED)
        assert side.take("ended") == [record] and side.take("failed") == [] and side.core.open_rooms == 0
        side.ticks(TIMING.ended_record)
        assert side.take("failed") == [record] and side.take("ended") == [] and side.core.open_rooms == 0

    def test_a_room_that_was_dropped_before_it_ended_is_open_no_more(self, side: Side) -> None:
        side.name(Want.ANNOUNCE)
        assert side.core.open_rooms == 1
        side.name(Want.FORGET)
        assert side.core.open_rooms == 0 and not side.core.rooms and side.take("failed") == []

    def test_a_record_that_was_dropped_has_no_say_in_its_successor(self, side: Side) -> None:
        side.name()
        old, _ = side.claim()
        side.core.fail(old, CANCELLED)
        side.name(Want.FORGET)
        new, handle = side.claim()
        side.core.fail(old, CANCELLED)
        assert new is not old and not new.ended and handle.failure is None

    def test_a_lost_pair_is_told_with_its_reason_and_the_rooms_that_decode_did_not_forget(self, side: Side) -> None:
        side.name()
        side.name(Want.STOP, SIX)
        side.name(Want.FORGET, SIX)
        side.ticks(TIMING.idle_timeout + 1, heard=False)
        assert side.take("lost") == [LostPair(D0, "not a word for 60000 ms, though its connection stood", 1)]

    def test_an_ended_room_keeps_none_of_its_chunks(self, side: Side) -> None:
        record, _ = side.claim()
        side.send(record, 0, 2)
        assert record.chunks.waiting
        side.core.fail(record, CANCELLED)
        assert not record.chunks.waiting

    def test_its_states_as_both_sides_come(self, side: Side) -> None:
        record, handle = side.claim()
        assert (record.state, record.sender_live, record.traceparent) == (RoomState.BOOTSTRAPPING, True, "")
        side.name()
        assert (record.state, side.core.pairs[D0].unclaimed) == (RoomState.WAITING_FOR_INPUT, 0)
        side.send(record, 0, 1)
        side.expect(record, 3)
        assert (record.state, handle.poll) == (RoomState.TRANSFERRING, KVPoll.Transferring), "init changes no state"
        side.core.fail(record, CANCELLED)
        assert (record.state, record.sender_live) == (RoomState.FAILED, False)
        side.take("submissions")
        side.name(Want.FORGET)
        assert not side.core.rooms and side.core.pairs[D0].unclaimed == 0

    def test_a_room_without_a_sender_has_no_live_one(self, side: Side) -> None:
        side.name()
        assert not side.core.rooms[KEY].sender_live


class TestTold:
    def test_that_pages_move_is_told_with_the_next_tick_before_any_is_in_place(self, side: Side) -> None:
        side.name()
        record, _ = side.claim()
        side.send(record, 0, 1)
        assert side.said() == {}
        side.ticks(1)
        assert (side.said()[KEY].state, record.pages_done) == (RoomState.TRANSFERRING, 0)

    def test_an_engine_that_is_gone_changes_nothing_of_rooms_that_lost_no_write(self, side: Side) -> None:
        side.name()
        record, handle = side.claim()
        side.core.on_engine_destroyed()
        assert side.said() == {}
        side.ticks(TIMING.ended_record + 1)
        assert side.core.rooms[KEY] is record and handle.poll is KVPoll.WaitingForInput

    def test_a_room_that_ended_while_pages_moved_is_told_again_once_all_writes_are_over(self, side: Side) -> None:
        side.name()
        record, _ = side.claim()
        side.send(record, 0, 1)
        side.send(record, 1, 3, last=True)
        first, second = side.take("submissions")
        side.core.fail(record, CANCELLED)
        assert side.said()[KEY].writes is Writes.OPEN
        side.core.on_outcome(first, Outcome.DONE)
        assert side.said() == {}
        side.ticks(TIMING.ended_record + 1)
        assert side.core.rooms[KEY] is record, "its time begins with its last change"
        side.core.on_outcome(second, Outcome.DONE)
        assert side.said()[KEY].writes is Writes.SETTLED
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(TIMING.ended_record)
        assert not side.core.rooms

    def test_what_was_unknown_is_remembered_anew_from_the_end_of_the_engine_on(self, side: Side) -> None:
        _, _, submission = side.writing()
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(TIMING.ended_record - 1)
        side.core.on_engine_destroyed()
        assert side.core.pairs[D0].unknown_writes == 0
        side.ticks(TIMING.ended_record - 1)
        assert KEY in side.core.rooms
        side.ticks(1)
        assert not side.core.rooms

    def test_checksums_go_with_success_in_the_order_of_decodes_pages(self, side: Side) -> None:
        stream = side.hello()
        numbers = [np.array(pages, np.uint32) for pages in ([12, 10, 11], [21, 20])]
        destination = Destination(numbers[0], others=(Destination(numbers[1]),))
        side.core.on_frame(stream, D0, [DecodeEntry(KEY, Want.WRITE, destination, 5000)])
        record, _ = side.claim(total=3)
        for start, stop, other in ((0, 2, [121]), (2, 3, [120])):
            pages = np.arange(100 + start, 100 + stop, dtype=np.uint32)
            side.core.send(record, Chunk(pages, start, stop == 3, None, (np.array(other, np.uint32),)))
        first, last = side.take("submissions")
        for submission in (last, first):
            pools = (submission.destination, *(to for _, to in submission.others or ()))
            submission.checksums = tuple((pages, pages * 7) for pages in pools)
            assert record.entry().checksums == b""
            side.core.on_outcome(submission, Outcome.DONE)
        assert np.frombuffer(side.said()[KEY].checksums, "<u4").tolist() == [84, 70, 77, 147, 140]

    def test_progress_is_told_as_often_as_there_is_some(self, side: Side) -> None:
        side.name()
        record, _ = side.claim(total=4)
        done = []
        for position in range(3):
            side.send(record, position, position + 1)
            side.done()
            side.ticks(1)
            done.append(side.said()[KEY].pages_done)
        assert done == [1, 2, 3]
        side.ticks(1)
        assert side.said() == {}

    @pytest.mark.parametrize("sends", [True, False])
    def test_aux_goes_to_the_rank_that_gets_it_from_us_once_all_is_in_place(self, side: Side, sends: bool) -> None:
        side.name(pages=2)
        side.core.pairs[D0].sends_aux = sends
        record, _ = side.claim(total=2)
        side.send(record, 0, 1, aux=b"token")
        side.done()
        side.ticks(1)
        assert side.said()[KEY].aux == b""
        side.send(record, 1, 2, last=True)
        side.done()
        assert side.said()[KEY].aux == (b"token" if sends else b"")

    def test_a_failed_room_says_none(self, side: Side) -> None:
        side.name()
        record, _ = side.claim()
        side.send(record, 0, 1, aux=b"token")
        side.core.fail(record, CANCELLED)
        assert side.said()[KEY].aux == b""

    def test_nobody_is_told_of_a_room_of_another(self, side: Side) -> None:
        side.name()
        side.hello(D1)
        side.core._records.pending.add(side.core.pairs[D1], KEY)
        assert side.core.flush(side.core.pairs[D1]) == []

    def test_a_refusal_says_stopped_once_the_engine_that_lost_a_write_is_gone(self, side: Side) -> None:
        _, _, submission = side.writing()
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(2 * TIMING.ended_record)
        side.name(key=SIX, ref=D1)
        side.name(key=SIX, ref=D0)
        assert side.said()[SIX].writes is Writes.UNKNOWN and side.core.has_unknown_writes
        side.core.on_engine_destroyed()
        entry = side.said()[SIX]
        assert (entry.state, entry.writes) == (RoomState.FAILED, Writes.STOPPED) and not side.core.has_unknown_writes

    def test_whether_a_write_may_still_be_on_its_way(self, side: Side) -> None:
        assert not side.core.has_unknown_writes
        _, _, submission = side.writing()
        assert not side.core.has_unknown_writes
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        assert side.core.has_unknown_writes
        side.core.on_engine_destroyed()
        assert not side.core.has_unknown_writes

    def test_a_stop_without_a_reason_has_one_of_ours(self, side: Side) -> None:
        stream = side.hello()
        _, handle = side.claim()
        side.core.on_frame(stream, D0, [DecodeEntry(KEY, Want.STOP)])
        assert reason(handle) == "ROOM_CANCELLED" and handle.failure is not None
        assert handle.failure.metadata == {"room": "5", "attempt": "0", "by": str(D0)}

    def test_forgetting_twice_is_forgetting_once(self, side: Side) -> None:
        side.name(Want.STOP)
        side.name(key=SIX)
        for _ in range(2):
            side.name(Want.FORGET)
        pair = side.core.pairs[D0]
        assert (pair.forgotten, pair.open_rooms, pair.unclaimed) == (1, 1, 1)
        assert reason(claimed(side, KEY)) == "ROOM_CANCELLED"
        assert (pair.forgotten, pair.open_rooms, pair.unclaimed) == (0, 1, 1)


class TestStreams:
    def test_only_the_stream_that_counts_keeps_a_pair_alive(self, side: Side) -> None:
        old = side.hello()
        new = side.hello()
        for _ in range(TIMING.idle_timeout + 1):
            side.core.tick()
            side.core.on_heard(old, D0)
        assert side.core.pairs == {} and side.take("closes") == [old, new]

    def test_a_frame_keeps_it_alive_too(self, side: Side) -> None:
        side.name()
        for _ in range(2 * TIMING.idle_timeout):
            side.core.tick()
            side.core.on_frame(side.streams[D0], D0, [])
        assert not side.core.pairs[D0].lost

    def test_what_hello_says_of_its_memory_is_kept_for_the_data_plane(self, side: Side) -> None:
        assert side.core.on_hello("stream", D0, ME, 1, "memory") is None
        pair = side.core.pairs[D0]
        assert (pair.peer, pair.verify, pair.number) == ("memory", False, 1)

    def test_a_pair_has_its_time_to_come_back_from_the_break_on(self, side: Side) -> None:
        side.name()
        pair = side.core.pairs[D0]
        states = [pair.state]
        side.ticks(3 * TIMING.welcome_within)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(TIMING.welcome_within)
        states.append(pair.state)
        side.ticks(1)
        states.append(pair.state)
        assert states == [SessionState.OPEN, SessionState.BROKEN, SessionState.LOST]

    def test_a_number_that_was_used_says_which_was_the_newest(self, side: Side) -> None:
        side.hello()
        error = side.core.on_hello(object(), D0, ME, 1)
        assert error is not None
        assert error.metadata == {"field": "stream", "value": "1", "rule": "above 1"}


def test_a_chunk_that_comes_after_the_end_is_let_go(side: Side) -> None:
    record, handle = side.claim()
    side.core.fail(record, CANCELLED)
    side.core.send(record, Chunk(np.arange(1, dtype=np.uint32), 0, True))
    side.expect(record, 9)
    assert handle.failure == CANCELLED and record.chunks.total == 3 and not record.chunks.waiting
