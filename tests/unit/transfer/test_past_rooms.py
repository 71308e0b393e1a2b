"""Which failures people may still ask about."""

from __future__ import annotations

from kvgrpc.errors import Failure, Reason
from kvgrpc.model import Role
from kvgrpc.transfer.protocol.types import RoomKey, RoomState
from kvgrpc.transfer.runtime.past_rooms import PastRooms
from kvgrpc.transfer.tables import RoomRow


def row(room: int, reason: Reason) -> RoomRow:
    failure = Failure(reason, "", {}, "")
    return RoomRow(RoomKey(room), Role.DECODE, RoomState.FAILED, (), 0, False, False, 0.0, failure)


def test_cancellations_drive_no_other_failure_out() -> None:
    past = PastRooms(256)
    past.keep(row(1, Reason.PEER_LOST), 0.0)
    past.keep(row(2, Reason.ROOM_NOT_FOUND), 0.0)
    for room in range(3, 1000):
        past.keep(row(room, Reason.ROOM_CANCELLED), 0.0)
    assert len(past) == 256
    assert RoomKey(1) in past and RoomKey(2) in past and RoomKey(999) in past and RoomKey(3) not in past


def test_a_room_that_failed_anew_is_kept_once_with_its_last_reason() -> None:
    past = PastRooms(2)
    for reason in (Reason.PEER_LOST, Reason.ROOM_CANCELLED):
        past.keep(row(1, reason), 1.0)
    past.keep(row(2, Reason.ROOM_CANCELLED), 2.0)
    past.keep(row(3, Reason.ROOM_CANCELLED), 3.0)
    assert list(past) == [RoomKey(2), RoomKey(3)]
    assert len(past) == 2
