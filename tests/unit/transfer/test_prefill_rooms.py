"""A room at prefill: it meets its decode whoever comes first, one decode owns it, and its chunks go where that one
wants them. docs/session.md."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import InvalidRequest, ParallelLayoutMismatch, Reason
from kvgrpc.transfer.protocol.types import (
    HARDLY_GUESSED,
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    RoomKey,
    RoomState,
    Want,
    Writes,
)
from tests.support.prefill_side import CANCELLED, D0, D1, KEY, TIMING, Side, reason, side

__all__ = ["side"]


class TestPoll:
    def test_sender_first(self, side: Side) -> None:
        handle = Handle()
        record = side.core.claim(KEY, handle)
        assert record is not None and handle.poll is KVPoll.Bootstrapping
        side.expect(record, 3)
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
        mine, owned, later = (RoomKey(HARDLY_GUESSED + number) for number in range(3))
        _, waiting = side.claim(mine)
        side.name(key=owned)
        _, other = side.claim(owned)
        side.core.on_refused_hello([mine, owned, later], "D9", ParallelLayoutMismatch("tp"))
        assert reason(waiting) == "PARALLEL_LAYOUT_MISMATCH"
        assert other.poll is KVPoll.WaitingForInput
        late = Handle()
        side.core.claim(later, late)
        assert reason(late) == "PARALLEL_LAYOUT_MISMATCH"

    def test_a_refused_hello_ends_no_room_by_a_number_that_may_be_a_guess(self, side: Side) -> None:
        _, handle = side.claim()
        side.core.on_refused_hello([KEY, RoomKey(HARDLY_GUESSED - 1)], "D9", ParallelLayoutMismatch("tp"))
        assert handle.poll is KVPoll.WaitingForInput and RoomKey(HARDLY_GUESSED - 1) not in side.core.rooms

    def test_a_refused_hello_ends_a_room_whose_sender_named_its_engine_whatever_the_number(self, side: Side) -> None:
        handle, other = Handle(), Handle()
        side.core.claim(KEY, handle, "D9")
        side.core.claim(RoomKey(HARDLY_GUESSED), other, "D0")
        side.core.on_refused_hello([KEY, RoomKey(HARDLY_GUESSED)], "D9", ParallelLayoutMismatch("tp"))
        assert reason(handle) == "PARALLEL_LAYOUT_MISMATCH" and other.failure is None

    def test_a_room_of_a_refused_hello_that_a_fitting_decode_names_disturbs_no_deadline(self, side: Side) -> None:
        """It has ended, and is dropped long before the time that a living one would wait for its sender."""
        refused = RoomKey(HARDLY_GUESSED)
        side.core.on_refused_hello([refused], "D9", ParallelLayoutMismatch("tp"))
        side.name(Want.WRITE, refused)
        side.name(Want.FORGET, refused)
        other = RoomKey(6)
        side.name(Want.WRITE, other)
        side.ticks(TIMING.unclaimed)
        late = Handle()
        side.core.claim(other, late)
        assert reason(late) == "ROOM_NOT_FOUND", "the other room's time ran out as ever"


class TestARoomThatItsSenderBindsToAnEngine:
    """D0 is the decode that the router chose; D1 says the room's number first."""

    def bind(self, side: Side) -> Handle:
        handle = Handle()
        record = side.core.claim(KEY, handle, "D0")
        assert record is not None
        side.expect(record, 3)
        side.send(record, 0, 3, last=True)
        return handle

    @pytest.mark.parametrize("want", [Want.ANNOUNCE, Want.WRITE, Want.STOP])
    @pytest.mark.parametrize("first", ["sender", "stranger"])
    def test_another_engine_gets_a_conflict_and_no_page_whoever_came_first(
        self, side: Side, want: Want, first: str
    ) -> None:
        if first == "stranger":
            side.name(want, ref=D1)
            side.said(D1)
        handle = self.bind(side)
        if first == "sender":
            side.name(want, ref=D1)
        assert not side.take("submissions")
        said = side.said(D1)[KEY]
        assert (said.state, said.failure and said.failure.reason.name) == (RoomState.FAILED, "ROOM_CONFLICT")
        assert "D0" not in str(said.failure)
        side.name(ref=D0, pages=3)
        (written,) = side.take("submissions")
        assert written.pair.ref == D0
        side.core.on_outcome(written, Outcome.DONE)
        assert handle.poll is KVPoll.Success

    def test_a_refused_hello_of_another_engine_leaves_no_mark_for_it(self, side: Side) -> None:
        key = RoomKey(HARDLY_GUESSED)
        side.core.on_refused_hello([key], "D1", ParallelLayoutMismatch("tp"))
        handle = Handle()
        assert side.core.claim(key, handle, "D0") is not None and handle.failure is None

    def test_nothing_of_the_binding_stays_when_the_room_is_over(self, side: Side) -> None:
        self.bind(side)
        side.name(ref=D0, pages=3)
        side.done()
        side.name(Want.FORGET, ref=D0)
        assert not side.core.rooms and not side.core._records.owners.named
        side.name(ref=D1)
        assert side.core.rooms[KEY].owner is side.core.pairs[D1]

    def test_a_second_sender_binds_nothing(self, side: Side) -> None:
        side.name(ref=D1)
        side.claim()
        late = Handle()
        assert side.core.claim(KEY, late, "D0") is None
        assert side.core.rooms[KEY].owner is side.core.pairs[D1]


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
