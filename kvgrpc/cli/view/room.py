"""One room as the page tells it: what each rank that knows it saw, on one scale of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgrpc.cli.names import incarnation_name, rank_name, reason_name, role_name, value_name
from kvgrpc.cli.rooms import story
from kvgrpc.cli.rooms.why import next_step
from kvgrpc.cli.view.state import ANSWER_SECONDS
from kvgrpc.v1 import transfer_service_pb2 as pb

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient

Fields = dict[str, Any]


def look_at_room(client: SyncClient, room: int, attempt: int) -> Fields:
    """Its sides, the one that began first before the others, and the ranks that did not answer."""
    told = story.look_at_room(client, room, attempt, ANSWER_SECONDS)
    return {
        "room": str(room),
        "attempt": attempt,
        "sides": [_side(side) for side in told.sides],
        "silent": [rank_name(each.row.rank) for each in told.silent],
    }


def _side(side: story.RoomSide) -> Fields:
    room = side.room
    return {
        "rank": str(side.rank),
        "role": role_name(room.role),
        "state": value_name(pb.RoomState, room.state),
        "began": side.began,
        "ended": side.ended,
        "stages": side.stages,
        "pages": room.pages,
        "bytes": room.end.bytes,
        "speed": round(room.end.gigabytes_per_second, 6),
        "held": room.held_pages,
        "peers": [rank_name(part.peer) for part in room.parts],
        "trace": room.traceparent,
        "failure": _failure(room) if room.HasField("failure") else None,
    }


def _failure(room: pb.Room) -> Fields:
    failure = room.failure
    return {
        "reason": reason_name(failure),
        "message": failure.message,
        "origin": incarnation_name(failure.origin) if failure.HasField("origin") else "",
        "next": next_step(room),
        "metadata": dict(sorted(failure.metadata.items())),
    }
