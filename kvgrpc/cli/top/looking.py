"""The figures of each rank, and how they are written."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.cli.fleet.tables import unanswered
from kvgrpc.cli.names import reason_name, role_name, row_name, seconds_of, tier_name, value_name
from kvgrpc.cli.output import NO_ANSWER, gigabytes, milliseconds, seconds

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.v1 import prefetch_service_pb2, server_service_pb2, transfer_service_pb2

_OF_A_ROW = ("rank", "role", "server")
_OF_HAND_OFFS = (
    *("#sessions", "#not open", "#rooms", "#failed", "#held"),
    *("#rooms/min", "#GB/s", "#p50", "#p99"),
)
COLUMNS = (*_OF_A_ROW, "health", "lease", *_OF_HAND_OFFS, "tiers", "#hits", "#event lag", "#pulls")
# Shown although no rank has a value.
_ALWAYS = 5
_FORMATS = {"#GB/s": gigabytes, "#p50": milliseconds, "#p99": milliseconds, "#hits": "{:.0%}".format}
# Where there is no room these are left out, the first ones first; a rank that is opened says all.
FIRST_TO_GO = (
    *("server", "role", "#p50", "#sessions", "lease", "#pulls", "#hits", "#event lag", "tiers", "#not open", "#held"),
    *("#rooms", "#failed", "#p99", "#rooms/min", "#GB/s"),
)
_FAILED_LOOKED_AT = 256
_SLOWEST_LISTED = 5
_TRANSFER, _CACHE, _PULL, _EVENTS = (f"kvgrpc.v1.{name}Service" for name in ("Transfer", "Prefetch", "Pull", "Event"))
_WATCH = "/kvgrpc.v1.EventService/Watch"


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank: a value for each column, numbers as they are, None where there is none; of its newest failed rooms how
    many ended by which reason; its sessions; its rooms that are open, then those that failed, the newest first, and the
    slowest that went well."""

    values: Sequence[object]
    reasons: Counter[str] = field(default_factory=Counter)
    sessions: Sequence[transfer_service_pb2.Session] = ()
    rooms: Sequence[transfer_service_pb2.Room] = ()

    @property
    def unanswered(self) -> bool:
        """Its health says why."""
        return str(self.values[len(_OF_A_ROW)]).startswith(NO_ANSWER)


def look_at_ranks(client: SyncClient) -> list[RankLine]:
    """All ranks of the registry, by name. One that does not answer has that in place of its health."""
    found = []
    for answer in client.ask_ranks(_look):
        row = answer.row
        known = (row_name(row), role_name(row.role), row.endpoints.grpc)
        if answer.value is None:
            missing = [None] * (len(COLUMNS) - len(known) - 1)
            found.append(RankLine((*known, unanswered(answer), *missing)))
        else:
            seen = answer.value
            reasons = Counter(reason_name(room.failure) for room in seen.rooms if room.HasField("failure"))
            found.append(RankLine((*known, *seen.values), reasons, seen.sessions, seen.rooms))
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """An answer of a rank: its values behind those of its row."""

    values: Sequence[object]
    sessions: Sequence[transfer_service_pb2.Session]
    rooms: Sequence[transfer_service_pb2.Room]


async def _look(rank: Client) -> _Seen:
    """Asks a rank for what it serves, and for nothing else."""
    info = await rank.get_server_info()
    hand_offs: Sequence[object] = [None] * len(_OF_HAND_OFFS)
    sessions: Sequence[transfer_service_pb2.Session] = ()
    rooms: Sequence[transfer_service_pb2.Room] = ()
    if _TRANSFER in info.services:
        hand_offs, sessions, rooms = await _hand_offs(rank)
    tiers = (await rank.get_cache_info()).tiers if _CACHE in info.services else ()
    lag = await _event_lag(rank) if _EVENTS in info.services else None
    pulls = len((await rank.list_pulls(open_only=True)).pulls) if _PULL in info.services else None
    values = (await rank.health(), _lease(info), *hand_offs, fill(tiers) or None, hit_rate(tiers), lag, pulls)
    return _Seen(values, sessions, rooms)


async def _hand_offs(
    rank: Client,
) -> tuple[Sequence[object], Sequence[transfer_service_pb2.Session], Sequence[transfer_service_pb2.Room]]:
    from kvgrpc.v1 import transfer_service_pb2 as pb

    open_states = [pb.ROOM_STATE_BOOTSTRAPPING, pb.ROOM_STATE_WAITING_FOR_INPUT, pb.ROOM_STATE_TRANSFERRING]
    sessions = await rank.list_sessions()
    shut = sum(session.state != pb.SESSION_STATE_OPEN for session in sessions)
    failed = await rank.list_newest_failed_rooms(_FAILED_LOOKED_AT)
    open_rooms = await rank.list_rooms(states=open_states)
    slowest = await rank.list_slowest_rooms(_SLOWEST_LISTED)
    here = await rank.get_rank()
    known = len(sessions), shut, len(open_rooms), len(failed), here.pages_held
    return (*known, *_last_minute(sessions)), sessions, [*open_rooms, *failed, *slowest]


def _lease(info: server_service_pb2.GetServerInfoResponse) -> str | None:
    """True if the registry keeps its row; None: it registers nowhere."""
    from kvgrpc.v1 import server_service_pb2 as pb

    if not info.HasField("registration"):
        return None
    known = info.registration
    state = value_name(pb.RegistrationState, known.state).lower()
    if not known.HasField("away_since"):
        return state
    return f"{state} {seconds(max(0.0, time.time() - known.away_since.ToNanoseconds() / 1e9))}"


async def _event_lag(rank: Client) -> int | None:
    """Batches that its slowest reader was not sent; None without readers, and for who is no operator."""
    from kvgrpc.errors import FeatureDisabled, PermissionDenied

    with contextlib.suppress(PermissionDenied, FeatureDisabled):
        readers = (reader for caller in await rank.list_callers() for reader in caller.readers)
        return max((reader.behind for reader in readers if reader.method == _WATCH), default=None)
    return None


def fill(tiers: Sequence[prefetch_service_pb2.CacheTierUse]) -> str:
    """ "host 80 %, device 20 %": of those that know their size."""
    return ", ".join(f"{tier_name(use)} {100 * use.used_pages / use.pages:.0f} %" for use in tiers if use.pages)


def hit_rate(tiers: Sequence[prefetch_service_pb2.CacheTierUse]) -> float | None:
    """Hits among what all tiers were asked for, since the rank stands; None: nothing yet."""
    hits, misses = (sum(use.counts.get(name, 0) for use in tiers) for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None


def _last_minute(sessions: Sequence[transfer_service_pb2.Session]) -> Sequence[object]:
    """Of all pairs of a rank: rooms, the mean speed of one, and the slowest pair's quantiles."""
    figures = [session.last_minute for session in sessions if session.last_minute.succeeded]
    if not figures:
        return 0, None, None, None
    busy = sum(each.bytes / each.gigabytes_per_second for each in figures if each.gigabytes_per_second)
    speed = sum(each.bytes for each in figures) / busy if busy else 0.0
    slowest = (max(seconds_of(getattr(each, name)) for each in figures) for name in ("p50", "p99"))
    return sum(each.succeeded for each in figures), speed, *slowest


def columns_of(lines: Sequence[RankLine]) -> list[int]:
    """The numbers of the columns to show: those in which some rank has a value."""
    there = {number for line in lines for number, value in enumerate(line.values) if value is not None}
    return [number for number in range(len(COLUMNS)) if number < _ALWAYS or number in there]


def cells(line: RankLine, shown: Sequence[int]) -> Sequence[object]:
    """These columns as they are shown; of a rank that did not answer, those until it says so."""
    numbers = [number for number in shown if number < _ALWAYS - 1] if line.unanswered else shown

    def cell(number: int) -> object:
        value, written = line.values[number], _FORMATS.get(COLUMNS[number])
        return value if written is None or not isinstance(value, float) else written(value)

    return [cell(number) for number in numbers]


def fields_of(line: RankLine) -> dict[str, object]:
    """For programs: each column by its name, numbers as they are, null where there is none."""
    return {column.removeprefix("#"): value for column, value in zip(COLUMNS, line.values, strict=True)}


def failures_by_reason(lines: Sequence[RankLine]) -> str:
    """One line of how many rooms failed, of those that ranks still list; empty for none."""
    together: Counter[str] = sum((line.reasons for line in lines), Counter())
    if not together:
        return ""
    return "failed rooms that are listed: " + ", ".join(f"{reason} {count}" for reason, count in together.most_common())
