"""One room wherever in the fleet it is known: what each rank saw of it, and in which order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.cli.fitting import Name
from kvgrpc.cli.fleet.tables import layouts_of
from kvgrpc.cli.names import incarnation_name, reason_name, role_name, row_name, seconds_of
from kvgrpc.cli.output import counted, gigabytes, size
from kvgrpc.cli.rooms.command import pages_done, peers_of, state_name
from kvgrpc.errors import RoomNotFound

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.v1 import common_pb2, registry_service_pb2, transfer_service_pb2

STAGES = ("bootstrap", "wait", "transfer")


@dataclass(frozen=True, slots=True)
class RoomSide:
    """A rank that knows the room. Times are Unix seconds of that rank's host; of a room that runs they are of this one.

    ``stages``: the seconds of each, once it went well.
    """

    rank: Name
    incarnation: str
    room: transfer_service_pb2.Room
    began: float
    ended: float
    stages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Story:
    """Its sides, the one that began first before the others; the ranks that did not answer; the layouts of engines;
    how many were asked."""

    room: int
    attempt: int
    sides: Sequence[RoomSide] = ()
    silent: Sequence[RankAnswer[transfer_service_pb2.Room | None]] = ()
    layouts: Mapping[str, common_pb2.Layout] = field(default_factory=dict)
    asked: int = 0


def look_at_room(client: SyncClient, room: int, attempt: int, timeout: float | None = None) -> Story:
    """Asks all ranks of the registry."""

    async def look(rank: Client) -> transfer_service_pb2.Room | None:
        try:
            return await rank.get_room(room, attempt)
        except RoomNotFound:
            return None

    answers = client.ask_ranks(look, timeout)
    now = time.time()
    sides = [side_of(each.row, each.value, now) for each in answers if each.value is not None]
    silent = [answer for answer in answers if answer.error is not None]
    sides.sort(key=lambda side: (side.began, side.rank))
    return Story(room, attempt, sides, silent, layouts_of(answers), len(answers))


def side_of(row: registry_service_pb2.RankRow, room: transfer_service_pb2.Room, now: float) -> RoomSide:
    names = row_name(row), incarnation_name(row.rank)
    if room.HasField("end"):
        stages = {stage: seconds_of(getattr(room.end, f"{stage}_time")) for stage in STAGES}
        ended = room.end.time.ToNanoseconds() / 1e9
        return RoomSide(*names, room, ended - sum(stages.values()), ended, stages)
    began = now - seconds_of(room.age)
    failed = room.HasField("failure")
    return RoomSide(*names, room, began, max(began, room.failure.time.ToNanoseconds() / 1e9) if failed else now, {})


def steps_of(sides: Sequence[RoomSide]) -> Iterator[tuple[float, RoomSide, str]]:
    """When which side came to what, in order."""
    return iter(sorted((step for side in sides for step in _steps(side)), key=lambda step: step[0]))


def _steps(side: RoomSide) -> Iterator[tuple[float, RoomSide, str]]:
    room = side.room
    yield side.began, side, f"{role_name(room.role)} knows of the room"
    if room.HasField("end"):
        known = side.began + side.stages["bootstrap"]
        there = "decode's pages are given" if role_name(room.role) == "decode" else "the first pages are computed"
        yield known, side, f"knows its peer {peers_of(room)}"
        yield known + side.stages["wait"], side, there
        speed = f", {gigabytes(room.end.gigabytes_per_second)} GB/s" if room.end.bytes else ""
        yield side.ended, side, f"SUCCESS: {counted(room.pages, 'page')}, {size(room.end.bytes)}{speed}"
    elif room.HasField("failure"):
        yield side.ended, side, f"FAILED: {reason_name(room.failure)}, {pages_done(room)} pages of {room.pages or '?'}"
    else:
        yield side.ended, side, f"now: {state_name(room.state)}, {pages_done(room)} pages of {room.pages or '?'}"
