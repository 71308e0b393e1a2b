"""How writes end at prefill, and what decode is told of them (rule 7, writes); one to which too many end unknown gets
no more of them for a while (rule 8, a bound of unknown writes)."""

from __future__ import annotations

from typing import Any

import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import Bounds, Handle, KVPoll, RoomKey, RoomState, Want, Writes
from tests.support.prefill_side import CANCELLED, D0, D1, KEY, TIMING, Side, reason, side

__all__ = ["side"]


class TestWrites:
    @pytest.mark.parametrize("plane", ["shm", "mooncake"])
    @pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.FAILED_SRC_FREE, Outcome.FAILED_UNKNOWN])
    def test_a_failure_says_which_data_plane_failed_how(self, plane: str, outcome: Outcome) -> None:
        side = Side(data_plane=plane)
        side.name()
        record, handle = side.claim()
        side.send(record, 0, 3, last=True)
        side.core.on_outcome(side.take("submissions")[0], outcome, "-800")
        assert handle.failure is not None
        assert handle.failure.metadata == {"dataPlane": plane, "outcome": outcome.name, "code": "-800"}

    @pytest.mark.parametrize(
        ("outcome", "writes"),
        [
            (Outcome.REJECTED, Writes.SETTLED),
            (Outcome.FAILED_SRC_FREE, Writes.STOPPED),
            (Outcome.FAILED_UNKNOWN, Writes.UNKNOWN),
        ],
    )
    def test_they_end_as_the_worst_of_them(self, side: Side, outcome: Outcome, writes: Writes) -> None:
        side.name()
        record, handle = side.claim()
        for start in range(3):
            side.send(record, start, start + 1, last=start == 2)
        first, second, third = side.take("submissions")
        side.core.on_outcome(first, outcome)
        assert reason(handle) == "TRANSFER_FAILED" and not handle.release_safe
        assert side.said()[KEY].writes is Writes.OPEN
        assert side.take("stops") == [record]
        side.core.on_outcome(second, Outcome.DONE)
        side.core.on_outcome(third, Outcome.DONE)
        assert side.said()[KEY].writes is writes
        assert handle.release_safe is (writes is not Writes.UNKNOWN) and side.core.open_writes == 0

    @pytest.mark.parametrize("counted", [False, True])
    @pytest.mark.parametrize("had_failed", [False, True])
    @pytest.mark.parametrize(
        ("outcome", "writes"), [(Outcome.DONE, Writes.SETTLED), (Outcome.FAILED_UNKNOWN, Writes.UNKNOWN)]
    )
    def test_an_end_that_could_not_be_taken_is_counted_once_and_told(
        self, side: Side, counted: bool, had_failed: bool, outcome: Outcome, writes: Writes, monkeypatch: Any
    ) -> None:
        """Its memory was lacking: decode holds the pages of the room until it is told that nobody writes to them."""

        def no_memory(*_: object) -> None:
            raise MemoryError

        record, handle, submission = side.writing()
        if had_failed:
            side.core.fail(record, CANCELLED)
            assert side.said()[KEY].writes is Writes.OPEN
        if counted:
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(type(record), "end_write", no_memory)
                side.core.on_outcome(submission, outcome)
        side.core.fail_write(submission, outcome, CANCELLED)
        assert side.said()[KEY].writes is writes and reason(handle) == "ROOM_CANCELLED"
        assert handle.release_safe is (writes is not Writes.UNKNOWN)
        assert side.core.open_writes == record.open_writes == 0

    def test_unknown_becomes_stopped_when_the_engine_is_destroyed(self, side: Side) -> None:
        _, handle, submission = side.writing()
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        assert side.said()[KEY].writes is Writes.UNKNOWN
        side.core.on_engine_destroyed()
        assert side.said()[KEY].writes is Writes.STOPPED and handle.release_safe

    def test_a_write_that_was_not_taken_yet_never_starts(self, side: Side) -> None:
        side.name()
        record, handle = side.claim()
        side.send(record, 0, 3, last=True)
        side.core.fail(record, CANCELLED)
        assert side.take("submissions") == [] and side.core.open_writes == 0
        assert reason(handle) == "ROOM_CANCELLED" and side.said()[KEY].writes is Writes.SETTLED

    def test_a_stop_that_meets_success_changes_nothing(self, side: Side) -> None:
        _, handle, submission = side.writing()
        side.core.on_outcome(submission, Outcome.DONE)
        side.name(Want.STOP)
        assert handle.poll is KVPoll.Success and side.said()[KEY].state is RoomState.SUCCESS

    def test_no_sender_in_this_record_means_stopped(self, side: Side) -> None:
        side.name(Want.STOP)
        assert side.said()[KEY].writes is Writes.STOPPED

    def test_or_unknown_once_an_unknown_record_of_the_pair_was_dropped(self, side: Side) -> None:
        _, _, submission = side.writing()
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)
        side.ticks(2 * TIMING.ended_record)
        assert KEY in side.core.rooms, "it stays while its pair has a stream"
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(2 * TIMING.ended_record)
        assert KEY not in side.core.rooms
        side.name(Want.STOP)
        side.name(Want.STOP, RoomKey(6), ref=D1)
        assert side.said()[KEY].writes is Writes.UNKNOWN
        side.core.on_engine_destroyed()
        assert side.said()[KEY].writes is Writes.STOPPED


class TestUnknownWrites:
    """A decode to which writes are lost track of, again and again, gets no more of them, for a while."""

    BOUND = 2

    @pytest.fixture
    def side(self) -> Side:
        return Side(bounds=Bounds(unknown_writes=self.BOUND))

    def lose(self, side: Side, room: int) -> None:
        _, _, submission = side.writing(RoomKey(room))
        side.core.on_outcome(submission, Outcome.FAILED_UNKNOWN)

    def past_the_bound(self, side: Side) -> None:
        for room in range(1, self.BOUND + 2):
            self.lose(side, room)

    def test_up_to_the_bound_nothing_changes(self, side: Side) -> None:
        self.lose(side, 1)
        self.lose(side, 2)
        _, handle, submission = side.writing(RoomKey(3))
        side.core.on_outcome(submission, Outcome.DONE)
        assert handle.poll is KVPoll.Success and side.core.unknown_writes == 2

    def test_past_it_new_rooms_are_refused_on_both_sides_and_say_when_to_come_again(self, side: Side) -> None:
        self.past_the_bound(side)
        side.ticks(30)
        _, first = side.claim(RoomKey(8))
        for room in (8, 9):
            side.name(key=RoomKey(room))
        late = Handle()
        side.core.claim(RoomKey(9), late)
        said = side.said()
        for failure in (first.failure, late.failure, said[RoomKey(8)].failure, said[RoomKey(9)].failure):
            assert failure is not None and failure.reason is Reason.TOO_MANY_REQUESTS
            assert failure.metadata == {"limit": "2", "value": "3", "scope": "unknown_writes"}
            assert failure.retry_after == pytest.approx((TIMING.probe - 30) * TIMING.tick_seconds)
        assert said[RoomKey(8)].writes is Writes.SETTLED, "nothing was written: the pages come back at once"

    def test_rooms_that_wrote_nothing_yet_are_given_up_and_writes_on_their_way_are_not(self, side: Side) -> None:
        _, moving, submission = side.writing(RoomKey(8))
        side.name(key=RoomKey(9))
        _, waiting = side.claim(RoomKey(9))
        self.past_the_bound(side)
        assert reason(waiting) == "TOO_MANY_REQUESTS"
        side.core.on_outcome(submission, Outcome.DONE)
        assert moving.poll is KVPoll.Success

    def test_another_decode_notices_nothing(self, side: Side) -> None:
        self.past_the_bound(side)
        side.name(key=RoomKey(8), ref=D1)
        record, handle = side.claim(RoomKey(8))
        side.send(record, 0, 3, last=True)
        side.done()
        assert handle.poll is KVPoll.Success

    def test_one_room_a_while_is_taken_and_when_it_is_done_all_are(self, side: Side) -> None:
        self.past_the_bound(side)
        side.ticks(TIMING.probe)
        _, probe, submission = side.writing(RoomKey(8))
        side.name(key=RoomKey(9))
        assert reason(side.claim(RoomKey(9))[1]) == "TOO_MANY_REQUESTS", "only one"
        side.core.on_outcome(submission, Outcome.DONE)
        assert probe.poll is KVPoll.Success
        _, handle, submission = side.writing(RoomKey(10))
        side.core.on_outcome(submission, Outcome.DONE)
        assert handle.poll is KVPoll.Success

    def test_a_probe_that_is_lost_too_begins_the_while_anew(self, side: Side) -> None:
        self.past_the_bound(side)
        side.ticks(TIMING.probe)
        self.lose(side, 8)
        side.ticks(TIMING.probe - 1)
        side.name(key=RoomKey(9))
        assert reason(side.claim(RoomKey(9))[1]) == "TOO_MANY_REQUESTS"
        side.ticks(1)
        assert side.writing(RoomKey(10))[1].failure is None

    def test_a_probe_that_ended_before_it_wrote_gives_its_turn_to_the_next_room(self, side: Side) -> None:
        """Several decode ranks past the bound refuse each other's probes: no two turns would ever meet else."""
        self.past_the_bound(side)
        side.ticks(TIMING.probe)
        side.name(key=RoomKey(8))
        probe, handle = side.claim(RoomKey(8))
        assert handle.failure is None
        side.core.fail(probe, CANCELLED)
        _, handle, submission = side.writing(RoomKey(9))
        side.name(key=RoomKey(10))
        assert reason(side.claim(RoomKey(10))[1]) == "TOO_MANY_REQUESTS", "one at a time"
        side.core.on_outcome(submission, Outcome.DONE)
        assert handle.poll is KVPoll.Success and side.writing(RoomKey(11))[1].failure is None

    def test_a_new_incarnation_and_a_new_engine_begin_at_nothing(self, side: Side) -> None:
        self.past_the_bound(side)
        newer = RankRef(D0.rank, D0.epoch + 1)
        side.name(key=RoomKey(8), ref=newer)
        assert side.claim(RoomKey(8))[1].failure is None
        side.core.on_engine_destroyed()
        assert side.core.unknown_writes == 0 and side.writing(RoomKey(9))[1].failure is None

    def test_an_incarnation_that_is_met_again_is_at_the_bound_still(self, side: Side) -> None:
        self.past_the_bound(side)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(2 * TIMING.ended_record)
        assert D0 not in side.core.pairs
        self.lose(side, 8)
        side.name(key=RoomKey(9))
        assert reason(side.claim(RoomKey(9))[1]) == "TOO_MANY_REQUESTS"
