"""One room as the page tells it: what each rank that knows it saw, on one scale of time; and its cancelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgrpc.cli.names import incarnation_name, rank_name, reason_name, role_name, value_name
from kvgrpc.cli.rooms import story
from kvgrpc.cli.rooms.why import next_step
from kvgrpc.cli.view.state import ANSWER_SECONDS
from kvgrpc.errors import RoomNotFound
from kvgrpc.v1 import transfer_service_pb2 as pb

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client

Fields = dict[str, Any]
# A rank that answers later may have done it all the same; the connection of a browser lasts longer.
CANCEL_SECONDS = 3.0


def look_at_room(client: SyncClient, room: int, attempt: int) -> Fields:
    """Its sides, the one that began first before the others, and the ranks that did not answer."""
    told = story.look_at_room(client, room, attempt, ANSWER_SECONDS)
    return {
        "room": str(room),
        "attempt": attempt,
        "sides": [_side(side) for side in told.sides],
        "silent": [rank_name(each.row.rank) for each in told.silent],
    }


def cancel_room(client: SyncClient, room: int, attempt: int) -> Fields:
    """Cancels it at each rank that knows it; the names of these, and what the others said."""

    async def cancel(rank: Client) -> bool:
        try:
            await rank.cancel_room(room, attempt, "cancelled on the page of kvgrpc view")
        except RoomNotFound:
            return False
        return True

    answers = client.ask_ranks(cancel, CANCEL_SECONDS)
    return {
        "cancelled": [rank_name(each.row.rank) for each in answers if each.value],
        "refused": [f"{rank_name(each.row.rank)}: {each.error}"[:300] for each in answers if each.error],
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
