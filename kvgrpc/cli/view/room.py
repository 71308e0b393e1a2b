"""One room as the page tells it: what each rank that knows it saw, on one scale of time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvgrpc.cli.names import incarnation_name, rank_name, reason_name, role_name, seconds_of, value_name
from kvgrpc.cli.rooms.why import next_step
from kvgrpc.cli.view.state import ANSWER_SECONDS
from kvgrpc.errors import RoomNotFound
from kvgrpc.v1 import transfer_service_pb2 as pb

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client

Fields = dict[str, Any]
STAGES = ("bootstrap", "wait", "transfer")


def look_at_room(client: SyncClient, room: int, attempt: int) -> Fields:
    """Its sides, the one that began first before the others, and the ranks that did not answer."""

    async def look(rank: Client) -> pb.Room | None:
        try:
            return await rank.get_room(room, attempt)
        except RoomNotFound:
            return None

    answers = client.ask_ranks(look, ANSWER_SECONDS)
    now = time.time()
    sides = [_side(rank_name(each.row.rank), each.value, now) for each in answers if each.value is not None]
    return {
        "room": str(room),
        "attempt": attempt,
        "sides": sorted(sides, key=lambda side: (side["began"], side["rank"])),
        "silent": [rank_name(each.row.rank) for each in answers if each.error is not None],
    }


def _side(name: str, room: pb.Room, now: float) -> Fields:
    """Times are Unix seconds of that rank's host; of a room that runs they are of this one."""
    stages = {stage: seconds_of(getattr(room.end, f"{stage}_time")) for stage in STAGES}
    went_well, failed = room.HasField("end"), room.HasField("failure")
    if went_well:
        ended = room.end.time.ToNanoseconds() / 1e9
        began = ended - sum(stages.values())
    else:
        began = now - seconds_of(room.age)
        ended = max(began, room.failure.time.ToNanoseconds() / 1e9) if failed else now
    return {
        "rank": name,
        "role": role_name(room.role),
        "state": value_name(pb.RoomState, room.state),
        "began": began,
        "ended": ended,
        "stages": stages if went_well else {},
        "pages": room.pages,
        "bytes": room.end.bytes,
        "speed": round(room.end.gigabytes_per_second, 6),
        "held": room.held_pages,
        "peers": [rank_name(part.peer) for part in room.parts],
        "trace": room.traceparent,
        "failure": _failure(room) if failed else None,
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
