"""How long prefill remembers rooms that are ended, refused, unclaimed or forgotten, and how many of them (rule 11,
memory of the ended)."""

from __future__ import annotations

import numpy as np

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Reason
from kvgrpc.transfer.protocol.types import Bounds, DecodeEntry, Destination, Handle, KVPoll, RoomKey, Want, Writes
from tests.support.prefill_side import CANCELLED, D0, KEY, TIMING, Side, reason, side

__all__ = ["side"]


class TestMemory:
    def test_a_late_sender_fails_at_once_with_the_cause_and_that_ends_the_record(self, side: Side) -> None:
        side.name(Want.STOP)
        side.name(Want.FORGET)
        handle = Handle()
        side.core.claim(KEY, handle)
        assert handle.failure == CANCELLED and handle.release_safe and not side.core.rooms

    def test_decode_is_answered_from_the_record(self, side: Side) -> None:
        record, _ = side.claim()
        side.core.fail(record, CANCELLED)
        side.ticks(TIMING.ended_record - 1)
        side.name()
        entry = side.said()[KEY]
        assert entry.failure == CANCELLED and entry.writes is Writes.SETTLED

    def test_forget_does_not_drop_what_is_unknown(self, side: Side) -> None:
        _, _, submission = side.writing()
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        side.name(Want.FORGET)
        assert KEY in side.core.rooms and not side.core.ignored_entries

    def test_once_both_sides_met_there_is_no_deadline_for_meeting(self, side: Side) -> None:
        side.name()
        record, handle = side.claim()
        side.ticks(TIMING.room_deadline + 1)
        assert handle.poll is KVPoll.WaitingForInput
        other = Handle()
        assert side.core.claim(RoomKey(6), other) is not None
        side.ticks(TIMING.room_deadline - 1)
        side.name(key=RoomKey(6))
        side.ticks(2)
        assert other.poll is KVPoll.WaitingForInput and not record.ended

    def test_forget_drops_what_is_settled(self, side: Side) -> None:
        _, _, submission = side.writing()
        side.name(Want.FORGET)
        assert KEY in side.core.rooms and side.core.ignored_entries == 1
        side.core.on_outcome(submission, Outcome.DONE)
        side.name(Want.FORGET)
        assert not side.core.rooms

    def test_an_ended_record_is_kept_for_a_minute(self, side: Side) -> None:
        _, _, submission = side.writing()
        side.core.on_outcome(submission, Outcome.DONE)
        side.said()
        side.ticks(TIMING.ended_record - 1)
        assert KEY in side.core.rooms
        side.ticks(1)
        assert not side.core.rooms

    def test_past_the_bound_the_oldest_goes_but_not_before_decode_forgot_it(self) -> None:
        side = Side(bounds=Bounds(ended_records=1))
        keys = {RoomKey(1), RoomKey(2), RoomKey(3)}
        for key in keys:
            side.name(Want.STOP, key)
        side.ticks(5)
        assert set(side.said()) == keys and set(side.core.rooms) == keys
        for key in keys:
            side.name(Want.FORGET, key)
        side.ticks(1)
        assert len(side.core.rooms) == 1

    def test_a_decode_that_does_not_forget_in_time_has_to_dial_again(self, side: Side) -> None:
        side.name(Want.STOP)
        stream = side.streams[D0]
        side.ticks(TIMING.ended_record)
        assert not side.core.rooms and side.take("closes") == [stream]
        side.core.on_frame(stream, D0, [DecodeEntry(KEY, Want.WRITE, Destination(np.arange(3, dtype=np.uint32)))])
        assert not side.core.rooms, "what it said before it heard the end opens nothing"

    def test_a_room_that_nobody_claims_is_not_found_before_decode_gives_it_up(self, side: Side) -> None:
        side.name()
        side.ticks(TIMING.unclaimed - TIMING.welcome_within - 1)
        assert not side.said()
        side.ticks(1)
        failure = side.said()[KEY].failure
        assert failure is not None and failure.reason is Reason.ROOM_NOT_FOUND

    def test_unclaimed_rooms_are_bounded_and_ended_ones_count_no_more(self) -> None:
        side = Side(bounds=Bounds(unclaimed_per_session=2))
        for number in (1, 2, 3):
            side.name(key=RoomKey(number))
        refused = side.said()[RoomKey(3)].failure
        assert refused is not None and refused.reason is Reason.TOO_MANY_REQUESTS
        side.name(Want.STOP, RoomKey(1))
        side.name(key=RoomKey(4))
        side.claim(RoomKey(2))
        side.name(key=RoomKey(5))
        assert side.core.pairs[D0].unclaimed == 2 and side.said()[RoomKey(1)].failure == CANCELLED

    def test_a_sender_without_decode_runs_into_its_deadline(self, side: Side) -> None:
        _, handle = side.claim()
        side.ticks(TIMING.room_deadline - 1)
        assert handle.poll is KVPoll.WaitingForInput
        side.ticks(1)
        assert reason(handle) == "ROOM_DEADLINE" and handle.release_safe

    def test_a_drain_refuses_rooms_without_a_sender_and_lets_the_others_go_on(self, side: Side) -> None:
        _, running, submission = side.writing()
        side.name(key=RoomKey(6))
        side.core.drain()
        side.name(key=RoomKey(7))
        for key in (RoomKey(6), RoomKey(7)):
            failure = side.core.rooms[key].failure
            assert failure is not None and failure.reason is Reason.SERVER_DRAINING
        handle = Handle()
        side.core.claim(RoomKey(8), handle)
        assert reason(handle) == "SERVER_DRAINING"
        side.core.on_outcome(submission, Outcome.DONE)
        assert running.poll is KVPoll.Success and side.core.open_rooms == 0


def test_nothing_is_left_of_rooms_that_are_over(side: Side) -> None:
    for number in range(1, 200):
        key = RoomKey(number)
        _, _, submission = side.writing(key)
        side.core.on_outcome(submission, Outcome.DONE)
        side.said()
        side.name(Want.FORGET, key)
        side.ticks(1)
    pair, core = side.core.pairs[D0], side.core
    assert not core.rooms and not pair.rooms and not pair.pending_rooms and not pair.unclaimed and not pair.forgotten
    records = core._records
    assert len(records._due) == 0 and not records._moving and not records._ended._since


def test_rooms_that_meet_one_bound_share_one_failure_and_one_answer() -> None:
    side = Side(bounds=Bounds(unclaimed_per_session=1))
    for number in range(1, 4):
        side.name(key=RoomKey(number))
    answers = side.core.pairs[D0].answers
    assert answers.keys() == {RoomKey(2), RoomKey(3)} and answers[RoomKey(2)] is answers[RoomKey(3)]
    side.name(key=RoomKey(4), ref=D0)
    assert answers[RoomKey(4)][0] is answers[RoomKey(2)][0]
    assert side.core.find(RoomKey(4)) is None


def test_a_room_that_decode_forgot_before_a_sender_came_makes_room_for_another() -> None:
    side = Side(bounds=Bounds(unclaimed_per_session=1))
    side.name(Want.ANNOUNCE)
    side.name(Want.FORGET)
    side.name(Want.ANNOUNCE, RoomKey(6))
    assert not side.core.pairs[D0].answers and side.core.find(RoomKey(6)) is not None
