"""What changed is told in the order in which it did, a frame's worth at a time."""

from __future__ import annotations

from kvgrpc.transfer.protocol.dirty import take
from kvgrpc.transfer.protocol.types import RoomKey


def test_a_piece_is_taken_from_the_front_and_the_rest_stays() -> None:
    dirty = dict.fromkeys(RoomKey(room) for room in range(1, 6))
    assert [key.room for key in take(dirty, 2)] == [1, 2]
    dirty[RoomKey(1)] = None  # it changed again
    assert [key.room for key in take(dirty, 3)] == [3, 4, 5]
    assert [key.room for key in take(dirty, 3)] == [1]
    assert take(dirty, 3) == [] and not dirty
