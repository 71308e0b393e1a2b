"""What is looked at, of each rank, and how it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.cli.fleet.tables import unanswered
from kvgrpc.cli.names import rank_name, reason_name, role_name, seconds_of
from kvgrpc.cli.output import milliseconds

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.v1 import registry_service_pb2, transfer_service_pb2

COLUMNS = (
    *("rank", "role", "server", "health", "#sessions", "#not open", "#rooms", "#failed", "#held"),
    *("#rooms/min", "#GB/s", "#p50", "#p99"),
)
_FAILED_LOOKED_AT = 256


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank: a value for each column, numbers as they are, None where there is none; of its newest failed rooms how
    many ended by which reason."""

    values: Sequence[object]
    short_name: str
    reasons: Counter[str] = field(default_factory=Counter)


def look_at_ranks(client: SyncClient) -> list[RankLine]:
    """All ranks of the registry, by name. One that does not answer has that in place of its health."""
    found = []
    for answer in client.ask_ranks(_look):
        row = answer.row
        known = (rank_name(row.rank), role_name(row.role), row.endpoints.grpc)
        if answer.value is None:
            missing = [value or None for value in unanswered(answer, len(COLUMNS) - len(known))]
            found.append(RankLine((*known, *missing), _short_name(row)))
        else:
            values, reasons = answer.value
            found.append(RankLine((*known, *values), _short_name(row), reasons))
    return found


async def _look(rank: Client) -> tuple[Sequence[object], Counter[str]]:
    from kvgrpc.v1 import transfer_service_pb2 as pb

    open_states = [pb.ROOM_STATE_BOOTSTRAPPING, pb.ROOM_STATE_WAITING_FOR_INPUT, pb.ROOM_STATE_TRANSFERRING]
    sessions = await rank.list_sessions()
    shut = sum(session.state != pb.SESSION_STATE_OPEN for session in sessions)
    failed = await rank.list_newest_failed_rooms(_FAILED_LOOKED_AT)
    open_rooms = await rank.count_rooms(states=open_states)
    here = await rank.get_rank()
    known = await rank.health(), len(sessions), shut, open_rooms, len(failed), here.pages_held
    return (*known, *_last_minute(sessions)), Counter(reason_name(room.failure) for room in failed)


def _last_minute(sessions: Sequence[transfer_service_pb2.Session]) -> Sequence[object]:
    """Of all pairs of a rank: rooms, the mean speed of one, and the slowest pair's quantiles."""
    figures = [session.last_minute for session in sessions if session.last_minute.succeeded]
    if not figures:
        return 0, None, None, None
    busy = sum(each.bytes / each.gigabytes_per_second for each in figures if each.gigabytes_per_second)
    speed = sum(each.bytes for each in figures) / busy if busy else 0.0
    slowest = (max(seconds_of(getattr(each, name)) for each in figures) for name in ("p50", "p99"))
    return sum(each.succeeded for each in figures), speed, *slowest


def cells(line: RankLine, *, short: bool = False) -> Sequence[object]:
    """As it is shown; ``short``: without the coordinates that all ranks of the engine share."""
    *known, speed, p50, p99 = line.values
    if short:
        known[0] = line.short_name
    times = (milliseconds(time) if isinstance(time, float) else "" for time in (p50, p99))
    return (*known, f"{speed:.2f}" if isinstance(speed, float) else "", *times)


def failures_by_reason(lines: Sequence[RankLine]) -> str:
    """One line of how many rooms failed, of those that ranks still list; empty for none."""
    together: Counter[str] = sum((line.reasons for line in lines), Counter())
    if not together:
        return ""
    return "failed rooms that are listed: " + ", ".join(f"{reason} {count}" for reason, count in together.most_common())


def _short_name(row: registry_service_pb2.RankRow) -> str:
    engine, *coordinates = rank_name(row.rank).split("/")
    sizes = (row.layout.dp, row.layout.pp, row.layout.cp, row.layout.tp)
    return "/".join((engine, *(each for each, size in zip(coordinates, sizes, strict=True) if size > 1)))
