"""A rank that checks pages fails a room that is given what another has, and says which (rule 16, page check)."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure
from kvgrpc.transfer.protocol.page_check import PoolSize, ReadPages, WrittenPages
from kvgrpc.transfer.protocol.prefill.core import Chunk, PrefillRoom
from kvgrpc.transfer.protocol.types import Align, DecodeEntry, Destination, Handle, RoomKey, RoomState, Want, Writes
from tests.support import decode_side, prefill_side
from tests.support.prefill_side import D0

KEY, OTHER, THIRD = RoomKey(5), RoomKey(6), RoomKey(7)
POOLS = [PoolSize("kv", 64), PoolSize("state", 8)]


def pages(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(numbers, np.uint32)


class TestDecode:
    """A page is written for one room, until nobody writes to it any more."""

    @pytest.fixture
    def side(self) -> decode_side.Side:
        return decode_side.Side(written=WrittenPages(POOLS))

    def test_a_page_of_an_open_room_cannot_be_given_to_another(self, side: decode_side.Side) -> None:
        first, _ = side.writing()
        second = side.open(OTHER)
        side.core.write(second, Destination(pages(9, 1)))
        assert decode_side.reason(second) == "PAGES_IN_USE" and first.handle.failure is None
        said = failure_of(second.handle)
        text = "page 1 of pool 'kv', given to room 6 attempt 0 at position 1, belongs to room 5 attempt 0"
        assert said.message.startswith(text) and "release_safe" in said.message
        assert said.metadata["owner"] == "room 5 attempt 0"

    def test_nor_can_a_held_page(self, side: decode_side.Side) -> None:
        first, stream = side.writing()
        side.core.fail(first, decode_side.CANCELLED)
        assert not first.handle.release_safe
        second = side.open(OTHER)
        side.core.write(second, Destination(pages(0)))
        assert decode_side.reason(second) == "PAGES_IN_USE"
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert first.handle.release_safe
        third = side.open(THIRD)
        side.core.write(third, Destination(pages(0)))
        assert third.handle.failure is None

    def test_a_page_is_free_again_after_success(self, side: decode_side.Side) -> None:
        _, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        second = side.open(OTHER)
        side.core.write(second, Destination(pages(0, 1)))
        assert second.handle.failure is None

    def test_a_refused_room_takes_nothing_from_anybody(self, side: decode_side.Side) -> None:
        side.writing()
        refused, third = side.open(OTHER), side.open(THIRD)
        side.core.write(refused, Destination(pages(1, 9)))
        assert refused.handle.release_safe
        side.core.write(third, Destination(pages(9)))
        assert third.handle.failure is None
        fourth = side.open(RoomKey(8))
        side.core.write(fourth, Destination(pages(1)))
        assert decode_side.reason(fourth) == "PAGES_IN_USE"

    def test_each_pool_has_pages_of_its_own(self, side: decode_side.Side) -> None:
        first, second, third = (side.open(key) for key in (KEY, OTHER, THIRD))
        side.core.write(first, Destination(pages(1), others=(Destination(pages(2)),)))
        side.core.write(second, Destination(pages(2), others=(Destination(pages(1)),)))
        side.core.write(third, Destination(pages(3), others=(Destination(pages(4, 2)),)))
        assert second.handle.failure is None
        assert "page 2 of pool 'state'" in failure_of(third.handle).message

    def test_prefill_is_told_the_reason_but_not_the_other_room(self, side: decode_side.Side) -> None:
        side.writing()
        side.core.write(side.open(OTHER), Destination(pages(1)))
        (entry,) = [entry for entry in side.said() if entry.key == OTHER]
        assert entry.want is Want.STOP and entry.failure is not None
        assert entry.failure.reason.name == "PAGES_IN_USE" and "page 1" in entry.failure.message
        assert "room 5" not in entry.failure.message and entry.failure.metadata["owner"] == "another room"

    def test_without_the_check_both_go_on(self) -> None:
        side = decode_side.Side()
        side.writing()
        second = side.open(OTHER)
        side.core.write(second, Destination(pages(1)))
        assert second.handle.failure is None


class TestPrefill:
    """A page may be read for several rooms where it is the same place of their prompts, and at no other place."""

    @pytest.fixture
    def side(self) -> prefill_side.Side:
        return prefill_side.Side(read=ReadPages(PoolSize("kv", 256)))

    def send(
        self, side: prefill_side.Side, key: RoomKey, *numbers: int, first_page: int = 0, wanted: int | None = None
    ) -> tuple[PrefillRoom, Handle]:
        """A room of these pages, of which decode wants the last ``wanted``, behind the ``first_page`` that it has."""
        if D0 not in side.streams:
            side.hello()
        count = len(numbers) if wanted is None else wanted
        start = 10 * key.room
        destination = Destination(np.arange(start, start + count, dtype=np.uint32), first_page)
        side.core.on_frame(side.streams[D0], D0, [DecodeEntry(key, Want.WRITE, destination, 300_000)])
        record, handle = side.claim(key, len(numbers))
        side.core.send(record, Chunk(pages(*numbers), 0, True))
        return record, handle

    def test_rooms_that_share_a_prefix_read_its_pages_together(self, side: prefill_side.Side) -> None:
        handles = [self.send(side, key, 100, 101, last)[1] for key, last in ((KEY, 102), (OTHER, 103))]
        assert len(side.take("submissions")) == 2 and not any(handle.failure for handle in handles)

    def test_a_page_that_a_room_reads_is_sent_at_another_place(self, side: prefill_side.Side) -> None:
        _, first = self.send(side, KEY, 100, 101, 102)
        _, second = self.send(side, OTHER, 103, 100)
        assert prefill_side.reason(second) == "PAGES_IN_USE" and first.failure is None
        text = (
            "page 100 of pool 'kv', given to room 6 attempt 0 at position 1, is read at position 0 by room 5 attempt 0"
        )
        assert failure_of(second).message.startswith(text)
        submissions = side.take("submissions")
        assert [submission.record.key for submission in submissions] == [KEY]
        assert second.release_safe

    def test_one_room_sends_a_page_twice(self, side: prefill_side.Side) -> None:
        _, handle = self.send(side, KEY, 100, 101, 100)
        assert prefill_side.reason(handle) == "PAGES_IN_USE" and "by room 5" in failure_of(handle).message

    def test_a_page_is_free_for_another_place_once_it_is_written(self, side: prefill_side.Side) -> None:
        self.send(side, KEY, 100, 101)
        self.send(side, OTHER, 100, 101)
        (first, second) = side.take("submissions")
        side.core.on_outcome(first, Outcome.DONE)
        _, early = self.send(side, THIRD, 101)
        assert prefill_side.reason(early) == "PAGES_IN_USE"
        side.core.on_outcome(second, Outcome.DONE)
        _, late = self.send(side, RoomKey(8), 101)
        assert late.failure is None

    @pytest.mark.parametrize(
        ("outcome", "free"),
        [(Outcome.REJECTED, True), (Outcome.FAILED_SRC_FREE, True), (Outcome.FAILED_UNKNOWN, False)],
    )
    def test_after_a_failure_as_soon_as_the_sender_says_so(
        self, side: prefill_side.Side, outcome: Outcome, free: bool
    ) -> None:
        _, first = self.send(side, KEY, 100, 101)
        (submission,) = side.take("submissions")
        side.core.on_outcome(submission, outcome)
        assert first.release_safe is free
        _, second = self.send(side, OTHER, 101)
        assert (second.failure is None) is free
        side.core.on_engine_destroyed()
        _, third = self.send(side, THIRD, 101)
        assert third.failure is None

    def test_an_aborted_room_keeps_its_pages_while_a_write_is_open(self, side: prefill_side.Side) -> None:
        record, first = self.send(side, KEY, 100, 101)
        (submission,) = side.take("submissions")
        side.core.fail(record, prefill_side.CANCELLED)
        assert not first.release_safe
        _, second = self.send(side, OTHER, 101)
        assert prefill_side.reason(second) == "PAGES_IN_USE"
        side.core.on_outcome(submission, Outcome.FAILED_SRC_FREE)
        _, third = self.send(side, THIRD, 101)
        assert third.failure is None

    def test_places_are_those_of_the_prompt_where_decode_has_a_prefix(self, side: prefill_side.Side) -> None:
        self.send(side, KEY, 100, 101, 102)
        _, behind = self.send(side, OTHER, 100, 101, 103, first_page=1, wanted=2)
        assert behind.failure is None
        _, wrong = self.send(side, THIRD, 100, 102, 101, first_page=1, wanted=2)
        assert prefill_side.reason(wrong) == "PAGES_IN_USE"

    def test_no_decode_makes_rooms_of_others_fail_by_the_prefix_that_it_says(self, side: prefill_side.Side) -> None:
        _, lying = self.send(side, KEY, 100, 101, first_page=7)
        _, honest = self.send(side, OTHER, 100, 101)
        assert lying.failure is None and honest.failure is None

    def test_aligned_at_the_tail_the_sender_has_all_of_the_prompt(self, side: prefill_side.Side) -> None:
        self.send(side, KEY, 100, 101, 102)
        side.core.on_frame(
            side.streams[D0], D0, [DecodeEntry(OTHER, Want.WRITE, Destination(pages(60, 61), 1), 300_000)]
        )
        record, handle = side.claim(OTHER, 3, Align.TAIL)
        side.core.send(record, Chunk(pages(100, 101, 102), 0, True))
        assert handle.failure is None and len(side.take("submissions")) == 2

    def test_decode_is_told_the_reason_but_not_the_other_room(self, side: prefill_side.Side) -> None:
        self.send(side, KEY, 100, 101, 102)
        self.send(side, OTHER, 103, 100)
        side.take("submissions")
        told = side.said()[OTHER]
        assert told.writes is Writes.SETTLED and told.failure is not None
        assert told.failure.reason.name == "PAGES_IN_USE" and "room 5" not in told.failure.message
        assert told.failure.metadata["owner"] == "another room"

    def test_without_the_check_both_go_on(self) -> None:
        side = prefill_side.Side()
        self.send(side, KEY, 100, 101, 102)
        _, second = self.send(side, OTHER, 103, 100)
        assert second.failure is None


def failure_of(handle: Handle) -> Failure:
    assert handle.failure is not None
    return handle.failure
