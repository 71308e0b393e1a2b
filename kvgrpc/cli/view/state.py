"""What the page shows: the whole fleet as one object of plain values, bounded however large the fleet is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgrpc.cli.cache import tier_name
from kvgrpc.cli.names import rank_name, reason_name, role_name, value_name
from kvgrpc.errors import FeatureDisabled
from kvgrpc.v1 import prefetch_service_pb2, pull_service_pb2
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
MOST_FAILED = 20
_FAILED_OF_A_RANK = 10
_LONGEST_TEXT = 300
_FROM_GOOD_TO_BAD = (
    *(pb.SESSION_STATE_OPEN, pb.SESSION_STATE_CONNECTING, pb.SESSION_STATE_BROKEN, pb.SESSION_STATE_SILENT),
    *(pb.SESSION_STATE_LOST, pb.SESSION_STATE_DEAD),
)

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankLook:
    """What one rank said of itself."""

    rank: pb.GetRankResponse
    sessions: Sequence[pb.Session]
    rooms: Sequence[pb.Room]
    all_rooms: int
    failed: Sequence[pb.Room]
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
        "pulls": [_pull(name, pull) for name, look in _looks(answers) for pull in look.pulls][:MOST_PULLS],
    }


async def look_at_rank(rank: Client) -> RankLook:
    """Its questions side by side, so that a slow rank holds the page up once and not seven times."""
    found = await asyncio.gather(
        rank.get_rank(),
        rank.list_sessions(),
        rank.list_rooms(most_pages=MOST_ROOM_PAGES),
        rank.count_rooms(),
        rank.list_newest_failed_rooms(_FAILED_OF_A_RANK),
        _cache_of(rank),
        _pulls_of(rank),
        return_exceptions=True,
    )
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return RankLook(*found)  # type: ignore[arg-type]  # none of them is an exception


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
    known = {"name": name, "label": name.partition("/")[2], "address": answer.row.endpoints.grpc}
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
            link = pairs.setdefault((first, second), {"ends": [first, second], "bad": -1, "rooms": 0, "pending": 0})
            if bad > link["bad"]:
                link |= {"bad": bad, "state": value_name(pb.SessionState, session.state)}
            link["rooms"] = max(link["rooms"], session.rooms)
            link["pending"] += session.pending_rooms
    return sorted(pairs.values(), key=lambda link: (-link["bad"], -link["rooms"], link["ends"]))


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
