"""prefetch_service.proto <-> model, and nothing else. Decoders raise InvalidRequest, encoders never fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Tier
from kvgrpc.prefetch.model import Namespace, OperationKind, OperationRow, Stop, TierUse
from kvgrpc.prefetch.protocol.order import MAX_PAGES, MAX_TIMEOUT, Order
from kvgrpc.prefetch.protocol.votes import Decision, Stage, Vote
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.wire import failure_to_pb, seconds_from_pb

MAX_TOKENS = 1 << 20
MAX_TEXT = 128
# Of extra_key and cache_salt, which are kept with the pages that they name.
MAX_KEY_TEXT = 1024
_HASH_BYTES = 32


class HashesTokens(Protocol):
    """The way in which a cache names pages (``ServedCache.hash_tokens``)."""

    def __call__(
        self, tokens: Sequence[int], *, extra_key: str | None, cache_salt: str | None, bigram: bool
    ) -> Sequence[bytes]: ...


def pages_from_pb(message: pb.PromptPages, page_tokens: int, hash_tokens: HashesTokens) -> tuple[str, ...]:
    """The page hashes of a prompt in hexadecimal, hashed here where tokens were sent."""
    for field in ("extra_key", "cache_salt"):
        if len(getattr(message, field)) > MAX_KEY_TEXT:
            text = f"{len(getattr(message, field))} characters"
            raise InvalidRequest.of(f"pages.{field}", text, f"at most {MAX_KEY_TEXT} characters")
    if bool(message.tokens) == bool(message.page_hashes):
        given = "both" if message.tokens else "neither"
        raise InvalidRequest.of("pages", given, "tokens or page_hashes, one of the two")
    if message.page_hashes:
        if len(message.page_hashes) > MAX_PAGES:
            raise InvalidRequest.of("pages.page_hashes", f"{len(message.page_hashes)} hashes", f"at most {MAX_PAGES}")
        wrong = next((i for i, each in enumerate(message.page_hashes) if len(each) != _HASH_BYTES), None)
        if wrong is not None:
            text = f"{len(message.page_hashes[wrong])} bytes"
            raise InvalidRequest.of(f"pages.page_hashes[{wrong}]", text, f"{_HASH_BYTES} bytes")
        return tuple(each.hex() for each in message.page_hashes)
    return _hashed(message, page_tokens, hash_tokens)


def _hashed(message: pb.PromptPages, page_tokens: int, hash_tokens: HashesTokens) -> tuple[str, ...]:
    count = len(message.tokens)
    if count > MAX_TOKENS:
        raise InvalidRequest.of("pages.tokens", f"{count} tokens", f"at most {MAX_TOKENS}")
    words = count - 1 if message.bigram else count
    whole = words // page_tokens * page_tokens
    if whole < 1:
        raise InvalidRequest.of("pages.tokens", f"{count} tokens", f"at least one page of {page_tokens}")
    hashes = hash_tokens(
        message.tokens[: whole + 1 if message.bigram else whole],
        extra_key=message.extra_key if message.HasField("extra_key") else None,
        cache_salt=message.cache_salt or None,  # as engines' requests have it; an empty extra key is one
        bigram=message.bigram,
    )
    if len(hashes) > MAX_PAGES:
        raise InvalidRequest.of("pages.tokens", f"{len(hashes)} pages", f"at most {MAX_PAGES} pages")
    return tuple(each.hex() for each in hashes)


def order_from_pb(
    kind: OperationKind, message: pb.StartPrefetchRequest | pb.StartBackupRequest, hashes: tuple[str, ...]
) -> Order:
    """``hashes``: those of its pages, which may have taken a while."""
    timeout = None
    request_id = text_from_pb("request_id", message.request_id)
    tenant = text_from_pb("tenant", message.tenant)
    if message.HasField("timeout"):
        timeout = seconds_from_pb("timeout", message.timeout, MAX_TIMEOUT, above_zero=True)
    return Order(
        kind=kind,
        hashes=hashes,
        request_id=request_id,
        priority=message.priority,
        tenant=tenant or message.pages.extra_key[:MAX_TEXT],
        extra_key=message.pages.extra_key,
        timeout=timeout,
        engines=tuple(message.engines) if isinstance(message, pb.StartPrefetchRequest) else (),
    )


def text_from_pb(field: str, text: str) -> str:
    if len(text) > MAX_TEXT:
        raise InvalidRequest.of(field, text, f"at most {MAX_TEXT} characters")
    return text


def tiers_from_pb(values: list[int]) -> list[Tier]:
    unknown = [value for value in values if value not in Tier._value2member_map_]
    if unknown or not values:
        raise InvalidRequest.of("tiers", unknown or "none", "at least one of TIER_DEVICE, _HOST, _STORAGE")
    return [Tier(value) for value in values]


def seconds_to_pb(seconds: float) -> Duration:
    message = Duration()
    message.FromMicroseconds(max(0, round(seconds * 1e6)))
    return message


def operation_to_pb(row: OperationRow, now: float) -> pb.CacheOperation:
    """``now``: Unix seconds."""
    message = pb.CacheOperation(
        operation_id=row.operation_id,
        request_id=row.request_id,
        kind=pb.OperationKind.ValueType(row.kind),
        state=pb.OperationState.ValueType(row.state),
        stop=pb.OperationStop.ValueType(row.stop),
        revision=row.revision,
        asked_pages=row.asked,
        covered_pages=row.covered,
        hit_pages=row.hit,
        agreed_pages=row.agreed,
        completed_pages=row.completed,
        bytes=row.nbytes,
        retries=row.retries,
        priority=row.priority,
        tenant=row.tenant,
        quiescent=row.quiescent,
        page_outcomes=[pb.PageOutcome.ValueType(each) for each in row.outcomes],
        took=seconds_to_pb(row.took_seconds),
        used_pages=row.used,
        wasted_pages=row.wasted,
    )
    message.start_time.FromMicroseconds(round((now - row.age_seconds) * 1e6))
    if row.failure is not None:
        message.failure.CopyFrom(failure_to_pb(row.failure))
    return message


def namespace_to_pb(namespace: Namespace) -> pb.CacheNamespace:
    return pb.CacheNamespace(
        model=namespace.model, dtype=namespace.dtype, layout=namespace.layout, page_tokens=namespace.page_tokens
    )


def use_to_pb(use: TierUse) -> pb.CacheTierUse:
    return pb.CacheTierUse(
        tier=common_pb2.Tier.ValueType(use.tier),
        pages=use.pages,
        used_pages=use.used,
        reserved_pages=use.reserved,
        page_bytes=use.page_bytes,
        counts=use.details,
    )


def vote_to_pb(vote: Vote) -> pb.AgreementVote:
    return pb.AgreementVote(
        operation_id=vote.key,
        stage=pb.AgreementStage.ValueType(vote.stage),
        pages=vote.pages,
        stop=pb.OperationStop.ValueType(vote.stop),
        beat=beat_to_pb(vote.beat),
    )


def vote_from_pb(message: pb.AgreementVote) -> Vote:
    key = text_from_pb("votes.operation_id", message.operation_id)
    return Vote(key, _stage(message.stage), message.pages, _stop(message.stop), beat_from_pb(message.beat))


def beat_to_pb(seconds: float) -> int:
    return max(0, int(seconds * 1e6))


def beat_from_pb(microseconds: int) -> float:
    return microseconds / 1e6


def decision_to_pb(decision: Decision) -> pb.AgreementDecision:
    return pb.AgreementDecision(
        operation_id=decision.key,
        stage=pb.AgreementStage.ValueType(decision.stage),
        pages=decision.pages,
        stop=pb.OperationStop.ValueType(decision.stop),
    )


def decision_from_pb(message: pb.AgreementDecision) -> Decision:
    return Decision(message.operation_id, _stage(message.stage), message.pages, _stop(message.stop))


def kind_from_pb(value: int) -> OperationKind:
    """Of a start: what this version does not know is no backup."""
    return OperationKind.BACKUP if value == OperationKind.BACKUP else OperationKind.PREFETCH


def _stage(value: int) -> Stage:
    try:
        return Stage(value)
    except ValueError:
        raise InvalidRequest.of("stage", value, "one of AGREEMENT_STAGE_HITS, _RESERVED, _COMPLETED") from None


def _stop(value: int) -> Stop:
    """A reason that this version does not know is none that it could act on."""
    return Stop(value) if value in Stop._value2member_map_ else Stop.NONE
