"""Values of messages as people write and read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvgrpc.cli.fitting import Name

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from kvgrpc.v1 import common_pb2, prefetch_service_pb2, registry_service_pb2


def value_name(kind: Any, value: int) -> str:
    """ "SETTLED" for SESSION_STATE_SETTLED; a value of a newer version as "SESSION_STATE 9"."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.DESCRIPTOR.name).upper()
    try:
        return str(kind.Name(value)).removeprefix(f"{prefix}_")
    except ValueError:
        return f"{prefix} {value}"


def rank_name(ref: common_pb2.RankRef) -> str:
    """ "engine/dp0/pp0/cp0/tp0", without the epoch."""
    from kvgrpc.wire import rank_id_from_pb  # of protobuf, which `kvgrpc --help` does without

    return str(rank_id_from_pb(ref.rank))


def incarnation_name(ref: common_pb2.RankRef) -> str:
    """ "engine/dp0/pp0/cp0/tp0@epoch"."""
    from kvgrpc.wire import rank_ref_from_pb

    return str(rank_ref_from_pb(ref))


def row_name(row: registry_service_pb2.RankRow) -> Name:
    """ "engine/dp0/pp0/cp0/tp0", and short "engine" where that engine has one rank."""
    name = rank_name(row.rank)
    return Name(name, short_rank(name, row.layout))


def short_rank(name: str, layout: common_pb2.Layout) -> str:
    """Without the coordinates that all ranks of the engine share; what is short already, or behind a blank, stays."""
    rank, blank, behind = name.partition(" ")
    engine, *coordinates = rank.split("/")
    sizes = (layout.dp, layout.pp, layout.cp, layout.tp)
    if len(coordinates) < len(sizes):
        return name
    told = [each for each, size in zip(coordinates, sizes, strict=True) if size > 1]
    return "/".join((engine, *told)) + blank + behind


def peer_name(ref: common_pb2.RankRef) -> Name:
    """ "engine/dp0/pp0/cp0/tp0@epoch", and short without the epoch."""
    return Name(incarnation_name(ref), rank_name(ref))


def role_name(role: common_pb2.Role.ValueType) -> str:
    from kvgrpc.v1 import common_pb2

    return "" if not role else value_name(common_pb2.Role, role).lower()


def tier_name(use: prefetch_service_pb2.CacheTierUse) -> str:
    """ "host", "storage" and the like."""
    from kvgrpc.v1 import common_pb2

    return value_name(common_pb2.Tier, use.tier).lower()


def reason_name(failure: common_pb2.Failure) -> str:
    from kvgrpc.v1 import error_reason_pb2

    return value_name(error_reason_pb2.ErrorReason, failure.reason)


def layout_name(layout: common_pb2.Layout) -> str:
    """ "dp1 pp1 cp1 tp4"."""
    return f"dp{layout.dp} pp{layout.pp} cp{layout.cp} tp{layout.tp}"


def pool_name(pool: common_pb2.PagePool) -> str:
    """ "kv", and with decode context parallelism "kv (token 1 of each 2)"."""
    from kvgrpc.transfer.layout.token_shares import shares_of

    shares = shares_of(pool.axes)
    return pool.name if shares == 1 else f"{pool.name} ({share_of_tokens(pool.head_start, shares)})"


def share_of_tokens(at: int, shares: int) -> str:
    """ "token 1 of each 2": the tokens of a prompt that a decode context parallel rank keeps, counted from 0."""
    return f"token {at} of each {shares}"


def model_name(model: common_pb2.ModelIdentity) -> str:
    """ "llama@main, bfloat16, MHA": what is said of it."""
    from kvgrpc.wire import model_from_pb

    known = model_from_pb(model)
    name = known.name + (f"@{known.revision}" if known.revision else "")
    return ", ".join(
        text for text in (name, known.cache_dtype, known.attention.name if known.attention else "") if text
    )


def seconds_of(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
