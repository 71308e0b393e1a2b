"""Prefill's half of a session: who owns a room, what is written, what is said and remembered. docs/session.md."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, InvalidRequest, ParallelLayoutMismatch, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.prefill_core import Chunk, PrefillCore, PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import (
    Align,
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    PrefillEntry,
    RoomKey,
    RoomState,
    SessionState,
    Timing,
    Want,
    Writes,
)
from tests.simulation.work import Work

ME, KEY, TIMING = RankRef(RankId("P"), 1), RoomKey(5), Timing()
D0, D1 = RankRef(RankId("D0"), 2), RankRef(RankId("D1"), 3)
CANCELLED = Failure(Reason.ROOM_CANCELLED, "enough", {}, "D0")


class Side:
    """A prefill core, and the shell around it by hand."""

    def __init__(self, **settings: object) -> None:
        self.core = PrefillCore(ME, **settings)  # type: ignore[arg-type]
        self.take = Work(self.core).take
        self.streams: dict[RankRef, object] = {}
        self._number = 0

    def hello(self, ref: RankRef = D0) -> object:
        self._number += 1
        stream = self.streams[ref] = object()
        assert self.core.on_hello(stream, ref, ME, self._number) is None
        return stream

    def name(self, want: Want = Want.WRITE, key: RoomKey = KEY, pages: int = 3, ref: RankRef = D0) -> None:
        """Decode says a room; its pages are 10, 11, …"""
        if ref not in self.streams:
            self.hello(ref)
        destination = Destination(np.arange(10, 10 + pages, dtype=np.uint32)) if want is Want.WRITE else None
        failure = CANCELLED if want is Want.STOP else None
        self.core.on_frame(self.streams[ref], ref, [DecodeEntry(key, want, destination, 300_000, failure)])

    def claim(self, key: RoomKey = KEY, total: int | None = 3, align: Align = Align.HEAD) -> tuple[PrefillRoom, Handle]:
        handle = Handle()
        record = self.core.claim(key, handle)
        assert record is not None
        self.core.expect(record, total, align)
        return record, handle

    def send(self, record: PrefillRoom, start: int, stop: int, last: bool = False, aux: bytes | None = None) -> None:
        """Position n of the room is page 100 + n."""
        self.core.send(record, Chunk(np.arange(100 + start, 100 + stop, dtype=np.uint32), start, last), aux)

    def writing(self, key: RoomKey = KEY) -> tuple[PrefillRoom, Handle, Submission]:
        self.name(key=key)
        record, handle = self.claim(key)
        self.send(record, 0, 3, last=True)
        (submission,) = self.take("submissions")
        return record, handle, submission

    def done(self) -> dict[int, int]:
        """Every write that was submitted ends well; decode's page -> our page."""
        moved: dict[int, int] = {}
        for submission in self.take("submissions"):
            moved.update(zip(submission.destination.tolist(), submission.source.tolist(), strict=True))
            self.core.on_outcome(submission, Outcome.DONE)
        return moved

    def said(self, ref: RankRef = D0) -> dict[RoomKey, PrefillEntry]:
        return {entry.key: entry for pair in self.take("tell") for entry in self.core.flush(pair) if pair.ref == ref}

    def ticks(self, count: int, heard: bool = True) -> None:
        for _ in range(count):
            self.core.tick()
            for ref, stream in self.streams.items():
                if heard:
                    self.core.on_heard(stream, ref)


@pytest.fixture
def side() -> Side:
    return Side()


def reason(handle: Handle) -> str:
    assert handle.poll is KVPoll.Failed and handle.failure is not None
    return handle.failure.reason.name


class TestPoll:
    def test_sender_first(self, side: Side) -> None:
        handle = Handle()
        record = side.core.claim(KEY, handle)
        assert record is not None and handle.poll is KVPoll.Bootstrapping
        side.core.expect(record, 3)
        assert handle.poll is KVPoll.WaitingForInput, "never Bootstrapping after init"
        side.send(record, 0, 1)
        assert not side.take("submissions")
        side.name()
        assert handle.poll is KVPoll.Transferring
        side.send(record, 1, 3, last=True)
        assert side.done() == {10: 100, 11: 101, 12: 102}
        assert handle.poll is KVPoll.Success and handle.release_safe

    def test_decode_first(self, side: Side) -> None:
        side.name()
        handle = Handle()
        side.core.claim(KEY, handle)
        assert handle.poll is KVPoll.WaitingForInput

    def test_decode_hears_of_an_ordinary_room_once(self, side: Side) -> None:
        _, _, submission = side.writing()
        assert side.said() == {}
        side.core.on_outcome(submission, Outcome.DONE)
        entry = side.said()[KEY]
        assert (entry.state, entry.writes, entry.pages_done) == (RoomState.SUCCESS, Writes.SETTLED, 3)

    def test_of_a_long_one_it_hears_the_progress_once_a_tick(self, side: Side) -> None:
        side.name()
        record, _ = side.claim()
        side.send(record, 0, 2)
        side.done()
        side.ticks(1)
        entry = side.said()[KEY]
        assert (entry.state, entry.writes, entry.pages_done) == (RoomState.TRANSFERRING, Writes.OPEN, 2)


class TestAnnounced:
    """Decode names a room before it has pages."""

    def test_decode_hears_once_that_the_sender_is_there_whoever_came_first(self, side: Side) -> None:
        side.name(Want.ANNOUNCE)
        assert side.said() == {}
        side.claim()
        assert side.said()[KEY].state is RoomState.WAITING_FOR_INPUT
        other = RoomKey(6)
        side.claim(other)
        side.name(Want.ANNOUNCE, other)
        assert side.said()[other].state is RoomState.WAITING_FOR_INPUT
        side.name(Want.ANNOUNCE, other)
        assert side.said() == {}

    def test_its_sender_waits_for_the_pages_and_then_sends(self, side: Side) -> None:
        side.name(Want.ANNOUNCE)
        record, handle = side.claim()
        side.send(record, 0, 3, last=True)
        assert not side.take("submissions")
        side.name()
        assert len(side.done()) == 3 and handle.poll is KVPoll.Success

    def test_it_waits_for_its_sender_as_long_as_the_newest_word_of_decode_says(self, side: Side) -> None:
        side.name(Want.ANNOUNCE)
        side.ticks(2000)
        side.name()
        side.ticks(2900)
        assert KEY in side.core.rooms and not side.core.rooms[KEY].ended
        side.ticks(100)
        assert side.said()[KEY].state is RoomState.FAILED

    def test_forget_ends_the_sender_of_a_room_that_decode_does_not_know(self, side: Side) -> None:
        side.name(Want.ANNOUNCE)
        _, handle = side.claim()
        side.name(Want.FORGET)
        assert reason(handle) == "ROOM_CANCELLED" and KEY not in side.core.rooms

    def test_past_the_bound_it_is_not_noted_and_nothing_is_refused(self) -> None:
        side = Side(bounds=Bounds(unclaimed_per_session=1))
        side.name(Want.ANNOUNCE)
        side.name(Want.ANNOUNCE, RoomKey(6))
        assert RoomKey(6) not in side.core.rooms and side.said() == {}
        side.name(Want.WRITE, RoomKey(6))
        assert side.said()[RoomKey(6)].state is RoomState.FAILED

    def test_a_refused_hello_ends_the_senders_it_names_but_nobody_elses(self, side: Side) -> None:
        _, waiting = side.claim()
        owned = RoomKey(6)
        side.name(key=owned)
        _, other = side.claim(owned)
        side.core.on_refused_hello([KEY, owned, RoomKey(7)], ParallelLayoutMismatch("tp"))
        assert reason(waiting) == "PARALLEL_LAYOUT_MISMATCH"
        assert other.poll is KVPoll.WaitingForInput
        late = Handle()
        side.core.claim(RoomKey(7), late)
        assert reason(late) == "PARALLEL_LAYOUT_MISMATCH"

    def test_a_room_of_a_refused_hello_that_a_fitting_decode_names_disturbs_no_deadline(self, side: Side) -> None:
        """It has ended, and is dropped long before the time that a living one would wait for its sender."""
        side.core.on_refused_hello([KEY], ParallelLayoutMismatch("tp"))
        side.name(Want.WRITE, KEY)
        side.name(Want.FORGET, KEY)
        other = RoomKey(6)
        side.name(Want.WRITE, other)
        side.ticks(TIMING.unclaimed)
        late = Handle()
        side.core.claim(other, late)
        assert reason(late) == "ROOM_NOT_FOUND", "the other room's time ran out as ever"


class TestChunks:
    def test_slices_in_any_order(self, side: Side) -> None:
        side.name()
        record, handle = side.claim()
        for start in (2, 0, 1):
            side.send(record, start, start + 1, last=start == 1)
        assert side.done() == {10: 100, 11: 101, 12: 102} and handle.poll is KVPoll.Success

    def test_without_a_total_the_last_chunk_says_it(self, side: Side) -> None:
        side.name()
        record, handle = side.claim(total=None)
        side.send(record, 0, 3, last=True)
        assert len(side.done()) == 3 and handle.poll is KVPoll.Success

    def test_an_empty_last_chunk_sends_aux_alone(self, side: Side) -> None:
        side.name()
        record, handle = side.claim()
        side.send(record, 0, 3)
        side.done()
        assert handle.poll is KVPoll.Transferring
        side.send(record, 3, 3, last=True, aux=b"token")
        assert handle.poll is KVPoll.Success and side.said()[KEY].aux == b"token"

    def test_a_full_prefix_hit_needs_no_page(self, side: Side) -> None:
        side.name(pages=0)
        record, handle = side.claim(total=0)
        side.send(record, 0, 0, last=True)
        assert handle.poll is KVPoll.Success

    @pytest.mark.parametrize(
        ("chunks", "said"),
        [
            ([(0, 2, False), (1, 3, True)], "sent before"),
            ([(0, 4, True)], "init said 3"),
            ([(0, 3, True), (0, 0, False)], "after the last"),
            ([(0, 1, False), (2, 3, True)], "page 1 of 3 was not"),
        ],
    )
    def test_what_cannot_be_right_fails_the_room(
        self, side: Side, chunks: list[tuple[int, int, bool]], said: str
    ) -> None:
        side.name()
        record, handle = side.claim()
        for chunk in chunks:
            side.send(record, *chunk)
        assert reason(handle) == "INVALID_REQUEST" and said in str(handle.failure)

    def test_chunks_that_wait_are_bounded(self) -> None:
        side = Side(bounds=Bounds(chunks_per_room=2))
        record, handle = side.claim()
        for start in range(3):
            side.send(record, start, start + 1)
        assert reason(handle) == "TOO_MANY_REQUESTS"


class TestOwnership:
    def test_a_second_sender_fails_alone(self, side: Side) -> None:
        _, first = side.claim()
        second = Handle()
        assert side.core.claim(KEY, second) is None
        assert reason(second) == "ROOM_CONFLICT" and second.release_safe and first.poll is KVPoll.WaitingForInput

    def test_another_asker_keeps_hearing_conflict_until_its_forget(self, side: Side) -> None:
        _, handle, submission = side.writing()
        for _ in range(2):
            side.name(ref=D1)
            entry = side.said(D1)[KEY]
            assert entry.failure is not None and entry.failure.reason is Reason.ROOM_CONFLICT
            assert entry.writes is Writes.STOPPED, "what an older record knew of its pages is gone"
        side.name(Want.STOP, ref=D1)
        assert KEY in side.said(D1)
        side.name(Want.FORGET, ref=D1)
        side.hello(D1)
        assert side.said(D1) == {}
        side.core.on_outcome(submission, Outcome.DONE)
        assert handle.poll is KVPoll.Success

    def test_the_pages_of_a_write_never_change(self, side: Side) -> None:
        _, handle, _ = side.writing()
        side.name()
        assert handle.poll is KVPoll.Transferring, "a repeat is harmless"
        side.name(pages=2)
        assert reason(handle) == "ROOM_CONFLICT"

    def test_want_never_goes_back(self, side: Side) -> None:
        side.name(Want.STOP)
        side.name(Want.WRITE)
        assert side.core.ignored_entries == 1
        assert side.said()[KEY].failure == CANCELLED

    def test_a_wrong_entry_fails_its_room_alone(self, side: Side) -> None:
        stream = side.hello()
        good, bad = RoomKey(1), RoomKey(2)
        pages = Destination(np.arange(3, dtype=np.uint32))
        wrong = DecodeEntry(bad, Want.WRITE, error=InvalidRequest("pages: must fit"))
        side.core.on_frame(stream, D0, [wrong, DecodeEntry(good, Want.WRITE, pages, 1000)])
        entry = side.said()[bad]
        assert entry.failure is not None and entry.failure.reason is Reason.INVALID_REQUEST
        assert side.claim(good)[1].poll is KVPoll.WaitingForInput


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


class TestStreams:
    def test_another_epoch_is_stale(self, side: Side) -> None:
        error = side.core.on_hello(object(), D0, RankRef(ME.rank, 99), 1)
        assert error is not None and error.reason is Reason.STALE_EPOCH and not side.core.pairs

    def test_a_larger_number_ends_the_older_stream_and_its_frames(self, side: Side) -> None:
        old = side.hello()
        new = side.hello()
        assert side.take("closes") == [old]
        side.core.on_frame(old, D0, [DecodeEntry(KEY, Want.STOP)])
        assert not side.core.rooms
        side.core.on_end(old, D0)
        assert side.core.pairs[D0].stream is new

    def test_a_smaller_number_is_refused_even_after_the_pair_was_dropped(self, side: Side) -> None:
        side.core.on_end(side.hello(), D0)
        side.ticks(TIMING.welcome_within + 1)
        assert D0 not in side.core.pairs and [pair.ref for pair in side.take("gone")] == [D0]
        error = side.core.on_hello(object(), D0, ME, 1)
        assert error is not None and error.reason is Reason.INVALID_REQUEST

    def test_a_welcome_says_every_room_that_is_not_forgotten_again(self, side: Side) -> None:
        side.writing()
        side.name(Want.STOP, RoomKey(6))
        side.said()
        side.name(Want.FORGET, RoomKey(6))
        assert side.core.pairs[D0].open_rooms == 1
        side.hello()
        assert set(side.said()) == {KEY}

    @pytest.mark.parametrize(("broken", "after"), [(True, TIMING.welcome_within), (False, TIMING.idle_timeout)])
    def test_a_lost_pair_fails_its_rooms_and_starts_no_further_write(
        self, side: Side, broken: bool, after: int
    ) -> None:
        side.name()
        record, handle = side.claim()
        side.send(record, 0, 1)
        (submission,) = side.take("submissions")
        if broken:
            side.core.on_end(side.streams[D0], D0)
        side.ticks(after, heard=False)
        assert handle.poll is KVPoll.Transferring
        side.ticks(1, heard=False)
        assert reason(handle) == "PEER_LOST" and side.take("stops") == [record]
        assert bool(side.take("closes")) is not broken
        side.send(record, 1, 3, last=True)
        assert not side.take("submissions")
        side.core.on_outcome(submission, Outcome.DONE)
        assert handle.release_safe

    def test_the_memory_of_a_lost_pair_is_given_back_at_once_and_once(self, side: Side) -> None:
        side.name(Want.STOP)
        side.core.on_end(side.streams[D0], D0)
        side.ticks(TIMING.welcome_within, heard=False)
        assert not side.take("gone")
        side.ticks(1, heard=False)
        assert side.take("gone") == [side.core.pairs[D0]] and side.core.rooms, "what it asked is remembered longer"
        side.ticks(TIMING.ended_record + 1, heard=False)
        assert not side.core.pairs and not side.take("gone")

    def test_a_pair_is_dropped_when_nothing_of_it_is_remembered(self, side: Side) -> None:
        side.name(Want.STOP)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(TIMING.ended_record + 1)
        assert not side.core.rooms and not side.core.pairs

    def test_an_asker_that_never_forgets_its_refusals_is_given_up(self) -> None:
        side = Side(bounds=Bounds(unclaimed=1))
        for number in (1, 2, 3):
            side.name(key=RoomKey(number))
        assert side.core.pairs[D0].state is SessionState.LOST


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
    assert len(core._due) == 0 and not core._moving and not core._ended._since


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


def test_progress_that_was_told_is_not_told_again(side: Side) -> None:
    side.name()
    record, _ = side.claim()
    side.send(record, 0, 1)
    side.done()
    side.ticks(1)
    assert side.said()[KEY].pages_done == 1
    side.send(record, 1, 2)
    side.ticks(1)
    assert side.said() == {}
