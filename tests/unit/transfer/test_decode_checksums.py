"""With checksums a room has arrived once its pages were compared; whatever ends it meanwhile counts."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.transfer.protocol.decode.core import DecodeRoom, Stream
from kvgrpc.transfer.protocol.types import Destination, KVPoll, PrefillEntry, RoomState, Target, Want, Writes
from tests.support.decode_side import CANCELLED, KEY, TIMING, Side, reason, side

__all__ = ["side"]


class TestChecksums:
    """A room whose pages are there, and are being compared with their checksums on another thread."""

    DIFFERS = Failure(Reason.CHECKSUM_MISMATCH, "page 3")

    @staticmethod
    def comparing(side: Side, *targets: Target) -> tuple[DecodeRoom, Stream]:
        room, stream = side.writing(KEY, *targets)
        stream.pair.verify = True
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
        assert side.take("compares") == [room]
        assert room.handle.poll is not KVPoll.Success and not side.aux, "nothing is said, or delivered, before"
        return room, stream

    def test_pages_that_are_as_they_were_sent_are_success(self, side: Side) -> None:
        room, _ = self.comparing(side)
        side.core.on_compared(room, None)
        assert room.handle.poll is KVPoll.Success and side.aux == [b"token"]
        side.ticks(2)
        assert [entry.want for entry in side.said()] == [Want.FORGET]

    def test_a_page_that_differs_fails_the_room_and_the_pages_come_back_at_once(self, side: Side) -> None:
        room, _ = self.comparing(side)
        side.core.on_compared(room, self.DIFFERS)
        assert reason(room) == "CHECKSUM_MISMATCH" and room.handle.release_safe and not side.aux

    @pytest.mark.parametrize("result", [None, DIFFERS])
    def test_an_abort_meanwhile_counts_and_the_result_changes_nothing(self, side: Side, result: Failure | None) -> None:
        room, _ = self.comparing(side)
        side.core.fail(room, CANCELLED)
        assert reason(room) == "ROOM_CANCELLED" and room.handle.release_safe
        side.core.on_compared(room, result)
        assert reason(room) == "ROOM_CANCELLED" and not side.aux
        assert side.take("ended") == [room], "it ended once"

    def test_the_deadline_counts_while_pages_are_compared(self, side: Side) -> None:
        room, stream = self.comparing(side)
        side.ticks(TIMING.room_deadline, hear=stream)
        assert reason(room) == "ROOM_DEADLINE"
        side.core.on_compared(room, None)
        assert reason(room) == "ROOM_DEADLINE" and not side.aux

    def test_a_success_that_is_said_again_compares_nothing_again(self, side: Side) -> None:
        room, stream = self.comparing(side)
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
        assert side.take("compares") == [] and room.handle.poll is not KVPoll.Success
        side.core.on_compared(room, None)
        assert room.handle.poll is KVPoll.Success and side.aux == [b"token"]

    def test_what_was_said_first_is_compared_whatever_is_said_meanwhile(self, side: Side) -> None:
        """A thread compares; a second SUCCESS put its own checksums and aux in the place of the first one's."""
        room, stream = self.comparing(side)
        before = [part.checksums for part in room.to_compare]
        again = PrefillEntry(KEY, RoomState.SUCCESS, Writes.SETTLED, 0, b"other", None, b"othersum")
        side.core.on_frame(stream, [again])
        assert [part.checksums for part in room.to_compare] == before
        side.core.on_compared(room, None)
        assert side.aux == [b"token"]

    def test_a_peer_that_is_lost_meanwhile_takes_nothing_from_a_room_that_has_all(self, side: Side) -> None:
        room, _ = self.comparing(side)
        side.ticks(TIMING.idle_timeout + 1)
        assert side.take("lost") and room.handle.failure is None
        side.core.on_compared(room, None)
        assert room.handle.poll is KVPoll.Success and side.aux == [b"token"]

    def test_a_room_without_pages_has_nothing_to_compare(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        stream.pair.verify = True
        side.core.write(room, Destination(np.arange(0, dtype=np.uint32)))
        side.said()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert side.take("compares") == [] and room.handle.poll is KVPoll.Success
