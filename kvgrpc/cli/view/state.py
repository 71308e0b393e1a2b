"""The state that the page shows: the whole fleet as one object of plain values, bounded however large the fleet is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgrpc.cli.names import rank_name, reason_name, role_name, seconds_of, tier_name, value_name
from kvgrpc.errors import FeatureDisabled
from kvgrpc.net import split
from kvgrpc.v1 import common_pb2, prefetch_service_pb2, pull_service_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.v1 import registry_service_pb2

# A rank that is slower shows as one that does not answer: a killed one turns red within two seconds.
ANSWER_SECONDS = 0.8
# Rooms that are looked at, of one rank; the rest are counted without their states.
MOST_ROOM_PAGES = 5
MOST_RANKS = 1000
MOST_LINKS = 2000
MOST_PULLS = 50
MOST_OPERATIONS = 50
MOST_FAILED = 20
MOST_SLOWEST = 20
_LISTED_OF_A_RANK = 10
_LONGEST_TEXT = 300
_FROM_GOOD_TO_BAD = (
    *(pb.SESSION_STATE_OPEN, pb.SESSION_STATE_CONNECTING, pb.SESSION_STATE_BROKEN, pb.SESSION_STATE_SILENT),
    *(pb.SESSION_STATE_LOST, pb.SESSION_STATE_DEAD),
)

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankLook:
    """The answers of one rank about itself."""

    rank: pb.GetRankResponse
    sessions: Sequence[pb.Session]
    rooms: Sequence[pb.Room]
    all_rooms: int
    failed: Sequence[pb.Room]
    slowest: Sequence[pb.Room]
    operations: Sequence[prefetch_service_pb2.CacheOperation]
    cache: prefetch_service_pb2.GetCacheInfoResponse | None
    pulls: Sequence[pull_service_pb2.Pull]


Answers = Sequence["RankAnswer[RankLook]"]


def look_at_fleet(client: SyncClient) -> Fields:
    """All of it, by the registry of ``client``. Raises what the registry raises; a rank's failure is a rank's state."""
    engines = client.list_engines()
    answers = client.ask_ranks(look_at_rank, ANSWER_SECONDS)
    shown = answers[:MOST_RANKS]
    links = _links(answers)
    return {
        "registry": client.address,
        "warming_up": engines.warming_up,
        "engines": [_engine(engine, shown) for engine in engines],
        "ranks": {"all": len(answers), "shown": len(shown), "silent": sum(each.value is None for each in answers)},
        "links": links[:MOST_LINKS],
        "links_left_out": max(0, len(links) - MOST_LINKS),
        "failed": _failed(answers),
        "slowest": _slowest(answers),
        "operations": [_operation(name, each) for name, look in _looks(answers) for each in look.operations][
            :MOST_OPERATIONS
        ],
        "pulls": [_pull(name, pull) for name, look in _looks(answers) for pull in look.pulls][:MOST_PULLS],
    }


async def look_at_rank(rank: Client) -> RankLook:
    """Its questions side by side, so that a slow rank holds the page up once and not nine times."""
    found = await asyncio.gather(
        rank.get_rank(),
        rank.list_sessions(),
        rank.list_rooms(most_pages=MOST_ROOM_PAGES),
        rank.count_rooms(),
        rank.list_newest_failed_rooms(_LISTED_OF_A_RANK),
        rank.list_slowest_rooms(_LISTED_OF_A_RANK),
        _operations_of(rank),
        _cache_of(rank),
        _pulls_of(rank),
        return_exceptions=True,
    )
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return RankLook(*found)  # type: ignore[arg-type]  # none of them is an exception


async def _operations_of(rank: Client) -> Sequence[prefetch_service_pb2.CacheOperation]:
    try:
        return await rank.list_operations(open_only=True)
    except FeatureDisabled:
        return ()


async def _cache_of(rank: Client) -> prefetch_service_pb2.GetCacheInfoResponse | None:
    try:
        return await rank.get_cache_info()
    except FeatureDisabled:
        return None


async def _pulls_of(rank: Client) -> Sequence[pull_service_pb2.Pull]:
    try:
        return (await rank.list_pulls(open_only=True)).pulls
    except FeatureDisabled:
        return ()


def _looks(answers: Answers) -> Iterable[tuple[str, RankLook]]:
    return ((rank_name(each.row.rank), each.value) for each in answers if each.value is not None)


def _engine(engine: registry_service_pb2.Engine, answers: Answers) -> Fields:
    return {
        "name": engine.name,
        "role": role_name(engine.role),
        "ready": engine.ready,
        "registered": engine.registered_ranks,
        "expected": engine.expected_ranks,
        "ranks": [_rank(each) for each in answers if each.row.rank.rank.engine == engine.name],
    }


def _rank(answer: RankAnswer[RankLook]) -> Fields:
    name = rank_name(answer.row.rank)
    address = answer.row.endpoints.grpc
    known = {"name": name, "label": name.partition("/")[2], "address": address, "host": split(address)[0]}
    look = answer.value
    if look is None:
        error = answer.error
        why = "" if error is None else error.reason.name if error.reason else error.code
        return {
            **known,
            "answers": False,
            "why": why,
            "message": "" if error is None else error.message[:_LONGEST_TEXT],
        }
    states = Counter(value_name(pb.RoomState, room.state) for room in look.rooms)
    return {
        **known,
        "answers": True,
        "sessions": len(look.sessions),
        "not_open": sum(session.state != pb.SESSION_STATE_OPEN for session in look.sessions),
        "rooms": dict(states),
        "rooms_all": max(look.all_rooms, len(look.rooms)),
        "held_pages": look.rank.pages_held,
        "held_limit": look.rank.pages_held_limit,
        "cache": None if look.cache is None else _cache(look.cache),
    }


def _cache(found: prefetch_service_pb2.GetCacheInfoResponse) -> Fields:
    return {
        "tiers": [
            {"tier": tier_name(use), "used": use.used_pages, "pages": use.pages, "page_bytes": use.page_bytes}
            for use in found.tiers
        ],
        "storage": found.storage_backend,
        "storage_fault": "" if found.storage_healthy else found.storage_detail[:_LONGEST_TEXT],
        "operations": found.open_operations,
    }


def _links(answers: Answers) -> list[Fields]:
    """One for each pair, in the state of the side that says worse; those that are not open first, then by rooms."""
    pairs: dict[tuple[str, str], Fields] = {}
    for name, look in _looks(answers):
        for session in look.sessions:
            peer = rank_name(session.peer)
            first, second = sorted((name, peer))
            # By the number of its state in the order of badness; a state of a newer version is as bad as can be.
            known = session.state in _FROM_GOOD_TO_BAD
            bad = _FROM_GOOD_TO_BAD.index(session.state) if known else len(_FROM_GOOD_TO_BAD)
            link = pairs.setdefault((first, second), _new_link(first, second))
            if bad > link["bad"]:
                link |= {"bad": bad, "state": value_name(pb.SessionState, session.state)}
            link["rooms"] = max(link["rooms"], session.rooms)
            link["pending"] += session.pending_rooms
            _count_in(link, session)
    return sorted(pairs.values(), key=lambda link: (-link["bad"], -link["rooms"], link["ends"]))


def _new_link(first: str, second: str) -> Fields:
    counts = {"rooms": 0, "pending": 0, "well": 0, "failed": 0, "bytes": 0, "minute": 0}
    return {"ends": [first, second], "bad": -1, **counts, "speed": 0.0, "p50": 0.0, "p99": 0.0}


def _count_in(link: Fields, session: pb.Session) -> None:
    """Both sides count the same hand-offs: whoever has seen more is right. Times are of decode, who saw all of them."""
    since, minute = session.since_start, session.last_minute
    link["well"] = max(link["well"], since.succeeded)
    link["failed"] = max(link["failed"], since.failed)
    link["bytes"] = max(link["bytes"], since.bytes)
    link["minute"] = max(link["minute"], minute.succeeded)
    link["speed"] = max(link["speed"], round(minute.gigabytes_per_second, 6))
    for name in ("p50", "p99"):
        link[name] = max(link[name], round(seconds_of(getattr(minute, name)), 5))


def _failed(answers: Answers) -> list[Fields]:
    found = [(room.failure.time.ToNanoseconds(), name, room) for name, look in _looks(answers) for room in look.failed]
    found.sort(key=lambda each: (-each[0], each[1]))
    return [
        {
            "room": str(room.room),
            "attempt": room.attempt,
            "rank": name,
            "reason": reason_name(room.failure),
            "message": room.failure.message[:_LONGEST_TEXT],
            "time": nanoseconds / 1e9,
        }
        for nanoseconds, name, room in found[:MOST_FAILED]
    ]


def _slowest(answers: Answers) -> list[Fields]:
    """The slowest of the last that went well, each once: as decode saw it where it answers."""
    found: dict[tuple[int, int], Fields] = {}
    for name, look in _looks(answers):
        for room in look.slowest:
            key = (room.room, room.attempt)
            if key not in found or look.rank.role == common_pb2.ROLE_DECODE:
                found[key] = _went_well(name, room)
    return sorted(found.values(), key=lambda each: (-each["seconds"], each["room"]))[:MOST_SLOWEST]


def _went_well(name: str, room: pb.Room) -> Fields:
    stages = {stage: seconds_of(getattr(room.end, f"{stage}_time")) for stage in ("bootstrap", "wait", "transfer")}
    return {
        "room": str(room.room),
        "attempt": room.attempt,
        "rank": name,
        "peer": rank_name(room.parts[0].peer) if room.parts else "",
        "pages": room.pages,
        "bytes": room.end.bytes,
        "speed": round(room.end.gigabytes_per_second, 6),
        **{stage: round(seconds, 6) for stage, seconds in stages.items()},
        "seconds": round(sum(stages.values()), 6),
    }


def _operation(name: str, operation: prefetch_service_pb2.CacheOperation) -> Fields:
    return {
        "id": operation.operation_id,
        "rank": name,
        "kind": value_name(prefetch_service_pb2.OperationKind, operation.kind).lower(),
        "done": operation.completed_pages,
        "pages": operation.agreed_pages or operation.asked_pages,
        "bytes": operation.bytes,
    }


def _pull(name: str, pull: pull_service_pb2.Pull) -> Fields:
    return {
        "room": str(pull.room),
        "rank": name,
        "peer": rank_name(pull.peer),
        "way": value_name(pull_service_pb2.PullDirection, pull.direction).lower(),
        "done": pull.done_pages,
        "pages": pull.lent_pages,
        "bytes": pull.bytes,
    }
