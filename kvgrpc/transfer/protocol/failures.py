"""The failures that the cores give to rooms: one place for their texts and metadata (docs/errors.md). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.errors import (
    Failure,
    InvalidRequest,
    KvGrpcError,
    PagesHeld,
    PagesInUse,
    PeerLost,
    Reason,
    RoomCancelled,
    RoomConflict,
    RoomDeadline,
    RoomNotFound,
    ServerDraining,
    TooManyRequests,
    TransferFailed,
)
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.types import RoomKey

RETRY_SECONDS = 1.0  # rooms end all the time: then there is a place, or the router knows a better rank


def in_words(value: object) -> str:
    """``str`` of a value from outside; the name of its type where ``str`` raises."""
    try:
        return str(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def raised(error: BaseException) -> str:
    """An exception from outside as text; never raises."""
    return f"{type(error).__name__}: {in_words(error)}"


def conflict(key: RoomKey, owner: object) -> KvGrpcError:
    """Another peer owns the room; ``owner`` says which."""
    text = f"room {key.room} attempt {key.attempt} belongs to {owner}; a retry needs a new attempt"
    return RoomConflict(text, metadata={**_of(key), "owner": owner})


def pages_changed(key: RoomKey, owner: RankRef) -> KvGrpcError:
    text = f"room {key.room} attempt {key.attempt}: the pages of a WRITE never change; a retry needs a new attempt"
    return RoomConflict(text, metadata={**_of(key), "owner": owner})


def cancelled(key: RoomKey, why: str, by: object) -> Failure:
    """An engine's abort, or an operator's."""
    return Failure.of(RoomCancelled(why, metadata={**_of(key), "by": by}), str(by))


def stopped(key: RoomKey, by: RankRef) -> KvGrpcError:
    text = f"room {key.room} attempt {key.attempt} was stopped by {by}"
    return RoomCancelled(text, metadata={**_of(key), "by": by})


def nobody_came(key: RoomKey, milliseconds: int) -> KvGrpcError:
    text = f"room {key.room} attempt {key.attempt}: no local sender came within {milliseconds} ms at prefill"
    return RoomNotFound(text, metadata=_of(key))


def nobody_named(key: RoomKey, lost: RankId, milliseconds: int) -> KvGrpcError:
    """Its router sent it to a decode that is dead, it seems: others would have named it."""
    where = f"room {key.room} attempt {key.attempt}"
    text = f"decode {lost} was lost, and nobody named {where} within {milliseconds} ms: it was for that one, it seems"
    return PeerLost(text, metadata={"peer": lost, "how": "nobody named the room after it was lost"})


def out_of_time(key: RoomKey, state: str, milliseconds: int, where: str) -> KvGrpcError:
    text = f"room {key.room} attempt {key.attempt} was {state} for {milliseconds} ms at {where}"
    return RoomDeadline(text, metadata={**_of(key), "state": state, "limitMs": milliseconds})


def peer_lost(peer: RankRef, where: str, how: str) -> KvGrpcError:
    return PeerLost(f"{where} was given up: {how}", metadata={"peer": peer, "how": how})


def no_successor(peer: RankRef) -> KvGrpcError:
    """The rank that owes the room is dead, and its registry names nobody in its place, or is gone with it."""
    how = "its address refused, and no successor is registered"
    return PeerLost(f"prefill {peer} was given up: {how}", metadata={"peer": peer, "how": how})


def other_ranks(key: RoomKey, ranks: Sequence[RankId]) -> KvGrpcError:
    """The engine that owes the room was found again with other ranks, while some of the old ones know the room."""
    text = f"room {key.room} attempt {key.attempt}: its prefill engine came back with another layout"
    return PeerLost(text, metadata={"peer": " ".join(map(str, ranks[:8])), "how": "another layout"})


def too_many(scope: str, limit: int, value: int) -> KvGrpcError:
    text = f"{value} {scope} are open, the bound is {limit}"
    metadata = {"limit": limit, "value": value, "scope": scope}
    return TooManyRequests(text, metadata=metadata, retry_after=RETRY_SECONDS)


def too_many_unknown(peer: RankRef, limit: int, value: int, retry_after: float) -> KvGrpcError:
    """Of writes to one decode, whose pages on both sides are lost to their engines (8, pages)."""
    text = (
        f"of {value} writes to {peer} nobody knows whether they ended, the bound is {limit}; if the next one fares no "
        "better, the data plane of this rank or of that one is to be made again (Rank.close and open_rank)"
    )
    metadata = {"limit": limit, "value": value, "scope": "unknown_writes"}
    return TooManyRequests(text, metadata=metadata, retry_after=retry_after)


def pages_held(held: int, limit: int, retry_after: float, peer: RankRef | None = None) -> KvGrpcError:
    """``peer``: the one writer whose evidence they wait for. ``retry_after``: the settle time in seconds."""
    what = "evidence that nobody writes to them any more" if peer is None else f"evidence that {peer} writes no more"
    text = f"{held} pages wait for {what}, the bound is {limit}"
    return PagesHeld(text, metadata={"held": held, "limit": limit}, retry_after=retry_after)


def pages_written_twice(key: RoomKey, pool: str, page: int, position: int, owner: RoomKey) -> KvGrpcError:
    """Decode's engine gave a page that another room has (rule 16, page check)."""
    remedy = "a page is free again once its receiver succeeded or says release_safe"
    return _in_use(key, pool, page, position, owner, "belongs to", remedy)


def page_read_elsewhere(key: RoomKey, pool: str, page: int, position: int, owner: RoomKey, there: int) -> KvGrpcError:
    """Prefill's engine sent a page that a room reads at the position ``there`` of another prompt, or of its own."""
    remedy = "a page is free again once its sender succeeded or says release_safe"
    return _in_use(key, pool, page, position, owner, f"is read at position {there} by", remedy)


def _in_use(key: RoomKey, pool: str, page: int, position: int, owner: RoomKey, how: str, remedy: str) -> KvGrpcError:
    other = f"room {owner.room} attempt {owner.attempt}"
    text = (
        f"page {page} of pool {pool!r}, given to room {key.room} attempt {key.attempt} at position {position}, {how} "
    )
    metadata = {**_of(key), "pool": pool, "page": page, "position": position, "owner": other}
    return PagesInUse(f"{text}{other}: {remedy}", metadata=metadata)


def for_peers(failure: Failure | None) -> Failure | None:
    """The failure as other ranks are told of it: no rank is told the rooms of others (rule 10, ownership)."""
    if failure is None or failure.reason is not Reason.PAGES_IN_USE:
        return failure
    owner, another = failure.metadata.get("owner", ""), "another room"
    message = failure.message.replace(f"{owner}: ", f"{another}: ")
    return replace(failure, message=message, metadata={**failure.metadata, "owner": another})


def draining(rank: RankRef) -> KvGrpcError:
    return ServerDraining(f"{rank} drains; use another prefill")


def not_written(key: RoomKey, data_plane: str, outcome: str, detail: str) -> KvGrpcError:
    text = f"the data plane could not write room {key.room} attempt {key.attempt}: {outcome} {detail}".rstrip()
    return TransferFailed(text, metadata={"dataPlane": data_plane, "outcome": outcome, "code": detail[:200]})


def bad_send(key: RoomKey, text: str, field: str, value: int) -> KvGrpcError:
    """The engine's ``send`` cannot be right (rule 13, chunks)."""
    metadata = {**_of(key), "field": field, "value": value, "rule": "what decode wants, and no more"}
    return InvalidRequest(f"send: {text}", metadata=metadata)


def counted_from_the_end(key: RoomKey, parts: int) -> KvGrpcError:
    """Windows, of which a prompt's first pages are not sent (rule 13, chunks)."""
    rule = f"Align.HEAD, or pages of equal size: {parts} of ours fill one of decode's, and the end does not show where"
    return InvalidRequest.of("align", "Align.TAIL", rule, room=key.room, attempt=key.attempt)


def not_asked_for(peer: RankRef) -> KvGrpcError:
    """SUCCESS of a room that was not told where to write (rule 15, hostile frames)."""
    text = f"state: {peer} said SUCCESS, but was never told where to write"
    return InvalidRequest(text, metadata={"field": "state", "value": "SUCCESS", "rule": "SUCCESS only after WRITE"})


def too_much_aux(peer: RankRef, aux: int, limit: int) -> KvGrpcError:
    """More aux than any room has (rule 14, aux)."""
    text = f"aux: at most {limit} bytes a room, {peer} sent {aux}"
    return InvalidRequest(text, metadata={"field": "aux", "value": aux, "rule": f"at most {limit} bytes"})


def unexplained(peer: RankRef) -> Failure:
    return Failure(Reason.UNSPECIFIED, f"{peer} said FAILED without a reason", {}, str(peer))


def _of(key: RoomKey) -> dict[str, object]:
    return {"room": key.room, "attempt": key.attempt}
