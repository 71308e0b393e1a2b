"""Pages of a room that ended come back by what its writers say, never by time alone (rule 8, evidence)."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.transfer.protocol.types import Destination, KVPoll, RoomState, Want, Writes
from tests.support.decode_side import CANCELLED, KEY, P0, P1, TIMING, Side, reason, side

__all__ = ["side"]


class TestEvidence:
    def test_a_part_that_was_never_told_where_to_write_holds_nothing(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, _ = side.take("dials")
        side.core.on_welcome(first)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.core.fail(room, CANCELLED)
        assert not room.handle.release_safe and side.core.held_pages == 2
        side.hear(first, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe and not side.core.held_pages

    def test_settled_gives_pages_back_at_once(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert reason(room) == "TRANSFER_FAILED" and room.handle.release_safe

    def test_stopped_after_the_settle_time(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        side.ticks(TIMING.settle, stream)
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)  # said once more, so it is looked at once more
        assert not room.handle.release_safe
        side.ticks(1, stream)
        assert room.handle.release_safe

    def test_a_room_that_gave_its_pages_back_sooner_frees_none_of_a_later_one_of_its_key(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        side.ticks(1, stream)
        assert [entry.want for entry in side.said()] == [Want.FORGET]
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe and not side.core.held_pages
        later = side.open()
        side.core.write(later, Destination(np.arange(2, dtype=np.uint32)))
        assert [entry.want for entry in side.said()] == [Want.WRITE]
        side.core.fail(later, CANCELLED)
        side.ticks(TIMING.settle + 1, stream)
        assert not later.handle.release_safe and side.core.held_pages == 2

    @pytest.mark.parametrize("writes", [Writes.OPEN, Writes.UNKNOWN])
    def test_open_and_unknown_never(self, side: Side, writes: Writes) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, writes)
        side.ticks(1000, stream)
        assert not room.handle.release_safe
        assert Want.FORGET not in [entry.want for entry in side.said()]
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        side.ticks(TIMING.settle + 1, stream)
        assert room.handle.release_safe and side.core.held_pages == 0

    def test_an_abort_fails_the_handle_at_once_and_holds_the_pages(self, side: Side) -> None:
        room, _ = side.writing()
        side.core.fail(room, CANCELLED)
        assert reason(room) == "ROOM_CANCELLED" and not room.handle.release_safe and side.core.held_pages == 2
        (said,) = side.said()
        assert said.want is Want.STOP and said.failure == CANCELLED

    def test_an_abort_before_anybody_was_told_holds_nothing(self, side: Side) -> None:
        room = side.open()
        side.welcome()
        side.core.fail(room, CANCELLED)
        assert room.handle.release_safe
        assert [entry.want for entry in side.said()] == [Want.STOP], "a late sender is to fail too"

    def test_every_part_that_was_told_has_to_give_it(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.welcome()
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.hear(first, RoomState.FAILED, Writes.SETTLED)
        assert reason(room) == "TRANSFER_FAILED" and not room.handle.release_safe
        assert {entry.want for entry in side.said()} == {Want.STOP, Want.FORGET}
        side.hear(second, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.release_safe

    def test_the_deadline_counts_anew_from_the_pages(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.ticks(TIMING.room_deadline - 1, stream)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.ticks(TIMING.room_deadline - 1, stream)
        assert room.handle.poll is KVPoll.WaitingForInput
        side.ticks(1, stream)
        assert reason(room) == "ROOM_DEADLINE"
