"""common.proto <-> model, and nothing else. Decoders raise InvalidRequest, encoders never fail."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping

from google.protobuf.duration_pb2 import Duration

from kvgrpc.errors import MAX_MESSAGE_CHARS, Failure, InvalidRequest, Reason
from kvgrpc.model import Attention, EngineLoad, Layout, ModelIdentity, Pool, PoolKind, RankId, RankRef, Regions, Role
from kvgrpc.v1 import common_pb2 as pb
from kvgrpc.v1 import error_reason_pb2


def seconds_from_pb(field: str, message: Duration, longest: float, *, above_zero: bool = False) -> float:
    """Of a request. Raises InvalidRequest beyond 0 to ``longest``, and for nanos that no Duration of that sign has:
    protobuf carries them all the same."""
    seconds = message.seconds + message.nanos / 1e9
    well_formed = message.seconds >= 0 and 0 <= message.nanos < 10**9
    if not well_formed or seconds > longest or (above_zero and not seconds):
        least = "above 0, at most" if above_zero else "0 to"
        value = f"{message.seconds} s" + (f" {message.nanos:+} ns" if message.nanos else "")
        raise InvalidRequest.of(field, value, f"{least} {longest:g} seconds, nanos 0 to 999999999")
    return seconds


def rank_id_to_pb(rank: RankId) -> pb.RankId:
    return pb.RankId(engine=rank.engine, dp=rank.dp, pp=rank.pp, cp=rank.cp, tp=rank.tp)


def rank_id_from_pb(message: pb.RankId) -> RankId:
    return RankId(message.engine, message.dp, message.pp, message.cp, message.tp)


def rank_ref_to_pb(ref: RankRef) -> pb.RankRef:
    return pb.RankRef(rank=rank_id_to_pb(ref.rank), epoch=ref.epoch)


def rank_ref_from_pb(message: pb.RankRef) -> RankRef:
    return RankRef(rank_id_from_pb(message.rank), message.epoch)


def layout_to_pb(layout: Layout) -> pb.Layout:
    return pb.Layout(dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp)


def layout_from_pb(message: pb.Layout) -> Layout:
    return Layout(message.dp, message.pp, message.cp, message.tp)


def model_to_pb(model: ModelIdentity) -> pb.ModelIdentity:
    return pb.ModelIdentity(
        name=model.name,
        revision=model.revision,
        cache_dtype=model.cache_dtype,
        attention=pb.AttentionKind.ValueType(model.attention),
    )


def model_from_pb(message: pb.ModelIdentity) -> ModelIdentity:
    """A kind of attention that this version does not know is not said."""
    known = message.attention in Attention._value2member_map_
    attention = Attention(message.attention) if known else Attention.UNKNOWN
    return ModelIdentity(message.name, message.revision, message.cache_dtype, attention)


def role_from_pb(value: int, path: str = "role") -> Role:
    try:
        return Role(value)
    except ValueError:
        raise InvalidRequest.of(path, value, "ROLE_PREFILL, ROLE_DECODE or ROLE_UNIFIED") from None


def pool_to_pb(pool: Pool) -> pb.PagePool:
    return pb.PagePool(
        name=pool.name,
        kind=pb.PoolKind.ValueType(pool.kind),
        page_tokens=pool.page_tokens,
        pages=pool.pages,
        dtype=pool.dtype,
        axes=pool.axes,
        heads_total=pool.heads_total,
        head_start=pool.head_start,
        head_count=pool.head_count,
        location=pool.location,
        regions=[
            pb.PoolRegion(
                layer=region.layer,
                component=region.component,
                address=region.address,
                page_stride_bytes=region.page_stride_bytes,
                page_bytes=region.page_bytes,
            )
            for region in pool.regions
        ],
    )


def pool_from_pb(message: pb.PagePool, path: str = "pools[0]", *, addresses: bool = True) -> Pool:
    """``addresses`` False: without those of its regions, which mean nothing outside their process."""
    reading = pool_in_pieces(message, path, addresses=addresses)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            pool: Pool = end.value
            return pool


def pool_in_pieces(
    message: pb.PagePool, path: str = "pools[0]", *, addresses: bool = True
) -> Generator[None, None, Pool]:
    """``pool_from_pb`` that yields behind each half a millisecond of its work."""
    try:
        kind = PoolKind(message.kind)
    except ValueError:
        raise InvalidRequest.of(f"{path}.kind", message.kind, "POOL_KIND_KV or POOL_KIND_STATE") from None
    regions = list[tuple[int, str, int, int, int]]()
    for first in range(0, len(message.regions), REGIONS_OF_A_PIECE):
        if first:
            yield
        regions += [
            (r.layer, r.component, r.address if addresses else 0, r.page_stride_bytes, r.page_bytes)
            for r in message.regions[first : first + REGIONS_OF_A_PIECE]
        ]
    return Pool(
        name=message.name,
        kind=kind,
        page_tokens=message.page_tokens,
        pages=message.pages,
        dtype=message.dtype,
        regions=Regions(regions),
        axes=message.axes,
        heads_total=message.heads_total,
        head_start=message.head_start,
        head_count=message.head_count,
        location=message.location,
    )


def failure_to_pb(failure: Failure) -> pb.Failure:
    """At most 8 KiB, whatever the failure holds."""
    message = pb.Failure(
        reason=error_reason_pb2.ErrorReason.ValueType(failure.reason),
        message=_text(failure.message, MAX_MESSAGE_CHARS),
        metadata=_metadata(failure.metadata),
    )
    message.time.FromNanoseconds(int(min(max(failure.time, 0.0), _LAST_SECOND) * 1e9))
    origin = _parse_origin(failure.origin)
    if origin is not None:
        message.origin.CopyFrom(rank_ref_to_pb(origin))
    if failure.retry_after is not None:
        message.retry_after.FromMilliseconds(round(min(max(failure.retry_after, 0.0), _LONGEST_RETRY_SECONDS) * 1000))
    return message


def failure_from_pb(message: pb.Failure) -> Failure:
    """A reason that this version does not know becomes UNSPECIFIED; its text and metadata are kept."""
    known = message.reason in Reason._value2member_map_
    return Failure(
        Reason(message.reason) if known else Reason.UNSPECIFIED,
        message.message[:MAX_MESSAGE_CHARS],
        _metadata(message.metadata),
        str(rank_ref_from_pb(message.origin))[:MAX_MESSAGE_CHARS] if message.HasField("origin") else "",
        float(min(max(message.time.seconds, 0), _LAST_SECOND)) + message.time.nanos / 1e9,
        _retry_after(message) if message.HasField("retry_after") else None,
    )


def load_to_pb(load: EngineLoad) -> pb.EngineLoad:
    """The newest rates, as many as a message takes."""
    rates = load.pull_rates[:MAX_PULL_RATES]
    return pb.EngineLoad(
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        waiting_tokens=load.waiting_tokens,
        page_tokens=load.page_tokens,
        page_bytes=load.page_bytes,
        lent_pulls=load.lent_pulls,
        taken_pulls=load.taken_pulls,
        pull_rates=[pb.PullRate(engine=engine, bytes_per_second=rate) for engine, rate in rates],
        page_forms=load.page_forms[:MAX_PAGE_FORMS],
    )


def load_from_pb(message: pb.EngineLoad) -> EngineLoad:
    """Reads a load. Whatever a rank says, no number is one that cannot be calculated with."""
    rates = itertools.islice(message.pull_rates, MAX_PULL_RATES)
    return EngineLoad(
        prefill_tokens_per_second=_rate(message.prefill_tokens_per_second),
        waiting_tokens=message.waiting_tokens,
        page_tokens=message.page_tokens,
        page_bytes=message.page_bytes,
        lent_pulls=message.lent_pulls,
        taken_pulls=message.taken_pulls,
        pull_rates=tuple((each.engine, _rate(each.bytes_per_second)) for each in rates),
        page_forms=tuple(itertools.islice(message.page_forms, MAX_PAGE_FORMS)),
    )


def seconds_to_pb(message: Duration, seconds: float) -> None:
    """Fills a Duration, with microseconds."""
    micros = round(min(seconds, _LONGEST_SECONDS) * 1e6)
    message.seconds, message.nanos = micros // 1_000_000, micros % 1_000_000 * 1_000


def _rate(value: float) -> float:
    return min(value, 1e18) if value > 0 else 0.0  # neither is true of NaN


MAX_PULL_RATES = 64
MAX_PAGE_FORMS = 8
REGIONS_OF_A_PIECE = 512
_LONGEST_SECONDS = 1e9
_LAST_SECOND = 253_402_300_798  # what a Timestamp can say, less one
_LONGEST_RETRY_SECONDS = 3600.0
_METADATA_CHARS = 2048
_VALUE_CHARS = 1024


def _retry_after(message: pb.Failure) -> float:
    """Within an hour, whatever a peer says."""
    seconds = message.retry_after.seconds + message.retry_after.nanos / 1e9
    return min(max(seconds, 0.0), _LONGEST_RETRY_SECONDS)


def _metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The pairs that fit, long values cut: what a peer says is kept and told on."""
    kept, left = {}, _METADATA_CHARS
    for key, value in metadata.items():
        text = _text(value, _VALUE_CHARS)
        left -= len(key) + len(text)
        if left < 0:
            break
        kept[_text(key, _VALUE_CHARS)] = text
    return kept


def _text(text: str, size: int) -> str:
    """Texts of file names and of other people's errors may hold lone surrogates, which protobuf refuses."""
    return text[:size].encode(errors="replace").decode()


def _parse_origin(text: str) -> RankRef | None:
    try:
        rank, epoch = text.rsplit("@", 1)
        engine, dp, pp, cp, tp = rank.rsplit("/", 4)
        return RankRef(RankId(engine, int(dp[2:]), int(pp[2:]), int(cp[2:]), int(tp[2:])), int(epoch))
    except ValueError:
        return None
