"""event_service.proto <-> model, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvgrpc.errors import Violation
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.log.digest import StateDigest, hash_key, medium_key
from kvgrpc.events.log.journal import CHUNK_BYTES, MAX_BATCH_BYTES, Batches, DroppedRange
from kvgrpc.events.log.stream import StreamState
from kvgrpc.events.model import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    TierBlocksCleared,
    UnknownEvent,
)
from kvgrpc.events.watch import Part, SnapshotPart, WatchBegins, WatchHeartbeat, WatchMode, WatchOrder
from kvgrpc.model import raise_if
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.wire import load_to_pb, rank_ref_to_pb

# Some milliseconds to decode and build, and a message far below 4 MiB: none is more than eleven times its payload.
TYPED_CHUNK_BYTES = 128 * 1024
# A hash is eleven bytes of a message, though it was one: of more hashes and events together no message is begun.
MAX_TYPED_ITEMS = MAX_BATCH_BYTES // 11
HOST_MEDIA = frozenset(("CPU", "CPU_PINNED"))
_MAX_TOKEN = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a reader wants batches: as they are, or typed and of which tiers and groups (empty: all)."""

    typed: bool = False
    tiers: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def lets_through(self, event: Event) -> bool:
        """True if the filters do; what concerns all tiers always passes."""
        if isinstance(event, TierBlocksCleared):
            return not self.tiers or tier_of(event.medium) in self.tiers
        if not isinstance(event, BlockStored | BlockRemoved):
            return True
        if self.groups and (event.group_idx or 0) not in self.groups:
            return False
        return not self.tiers or tier_of(event.medium) in self.tiers


def order_from_pb(request: pb.WatchRequest) -> tuple[WatchOrder, Form]:
    """Raises InvalidRequest for values that are none of ours, and for filters without TYPED."""
    found = []
    if request.mode not in WatchMode._value2member_map_:
        rule = f"one of {', '.join(f'WATCH_MODE_{mode.name}' for mode in WatchMode)}"
        found.append(Violation("mode", rule, request.mode))
    if request.encoding not in pb.WatchEncoding.values():
        found.append(Violation("encoding", "WATCH_ENCODING_RAW or WATCH_ENCODING_TYPED", request.encoding))
    typed = request.encoding == pb.WATCH_ENCODING_TYPED
    for name, chosen in (("tiers", request.tiers), ("groups", request.groups)):
        if chosen and not typed:
            found.append(Violation(name, "empty unless encoding is WATCH_ENCODING_TYPED", list(chosen)))
    if any(
        tier not in (common_pb2.TIER_DEVICE, common_pb2.TIER_HOST, common_pb2.TIER_STORAGE) for tier in request.tiers
    ):
        found.append(Violation("tiers", "TIER_DEVICE, TIER_HOST or TIER_STORAGE", list(request.tiers)))
    raise_if(found)
    order = WatchOrder(
        WatchMode(request.mode),
        request.log_id,
        request.from_sequence if request.HasField("from_sequence") else None,
        request.end_sequence if request.HasField("end_sequence") else None,
        TYPED_CHUNK_BYTES if typed else CHUNK_BYTES,
        request.without_tokens,
    )
    return order, Form(typed, frozenset(request.tiers), frozenset(request.groups))


def stream_to_pb(state: StreamState) -> pb.EventStream:
    message = pb.EventStream(
        engine=state.publisher.rank.engine,
        dp=state.publisher.rank.dp,
        log_id=state.log_id,
        oldest_sequence=state.oldest_sequence,
        next_sequence=state.next_sequence,
        pub_endpoint=state.pub_endpoint,
        topic=state.topic,
        dropped_batches=state.dropped_batches,
        journal_bytes=state.journal_bytes,
        publisher=rank_ref_to_pb(state.publisher),
        replay_endpoint=state.replay_endpoint,
        connects_to=state.connects_to,
        listened_at=state.listened_at,
    )
    if state.state is not None:
        message.state.CopyFrom(digest_to_pb(state.state))
    return message


def digest_to_pb(digest: StateDigest) -> pb.StateDigest:
    return pb.StateDigest(
        next_sequence=digest.next_sequence,
        kind=pb.DIGEST_KIND_MIX64_SUM,
        doubtful=digest.doubtful,
        tiers=[
            pb.TierDigest(
                tier=tier_of(tier.medium),
                medium=tier.medium,
                group=tier.group,
                blocks=tier.blocks,
                mixed_hashes=tier.mixed_hashes,
            )
            for tier in digest.tiers
        ],
    )


def part_to_pb(part: Part, form: Form) -> pb.WatchResponse:
    # Filled in place: a message that is handed to a constructor is copied, with all its payloads.
    response = pb.WatchResponse()
    if isinstance(part, Batches):
        _fill_batches(response, part, form)
    elif isinstance(part, WatchHeartbeat):
        response.heartbeat.next_sequence = part.next_sequence
        if part.state is not None:
            response.heartbeat.state.CopyFrom(digest_to_pb(part.state))
        if part.load is not None:
            response.heartbeat.load.CopyFrom(load_to_pb(part.load))
    elif isinstance(part, DroppedRange):
        response.dropped.first_sequence = part.first
        response.dropped.last_sequence = part.last
        response.dropped.cause = part.cause
    elif isinstance(part, SnapshotPart):
        _fill_snapshot(response.snapshot, part, form)
    elif isinstance(part, WatchBegins):
        response.begin.stream.CopyFrom(stream_to_pb(part.state))
        response.begin.first_sequence = part.first
    return response


def tier_of(medium: str | None) -> common_pb2.Tier.ValueType:
    """The tier that an engine's medium is in."""
    key = medium_key(medium)
    if key == "GPU":
        return common_pb2.TIER_DEVICE
    return common_pb2.TIER_HOST if key in HOST_MEDIA else common_pb2.TIER_STORAGE


def _fill_batches(response: pb.WatchResponse, part: Batches, form: Form) -> None:
    if form.typed and _fill_typed(response, part, form):
        return
    # The oneof lets go of what was typed.
    response.raw.first_sequence = part.first
    response.raw.payloads.extend(part.payloads)


def _fill_typed(response: pb.WatchResponse, part: Batches, form: Form) -> bool:
    """False: it is too much for one message."""
    response.typed.first_sequence = part.first
    for payload in part.payloads:
        batch = _decoded(payload)
        events = _events_of(batch, form)
        if events is None:
            return False
        message = response.typed.batches.add()
        message.unix_seconds = batch.ts
        for event in events:
            _fill_event(message.events.add(), event)
    return sum(map(len, part.payloads)) <= TYPED_CHUNK_BYTES or response.ByteSize() <= MAX_BATCH_BYTES


def _fill_snapshot(message: pb.SnapshotPart, part: SnapshotPart, form: Form) -> None:
    message.next_sequence = part.snapshot.next_sequence
    message.index = part.index
    message.last = part.last
    message.total_blocks = part.snapshot.copies
    events = _events_of(_decoded(part.payload), form) if form.typed else None
    for event in events or ():
        _fill_event(message.events.add(), event)
    if events is None or message.ByteSize() > MAX_BATCH_BYTES:
        del message.events[:]
        message.payloads.append(part.payload)
    if part.last:
        message.state.CopyFrom(digest_to_pb(part.snapshot.digest))


def _events_of(batch: KVEventBatch, form: Form) -> list[Event] | None:
    """Those that the filters let through; None: they are more than a message takes."""
    events = [event for event in batch.events if form.lets_through(event)]
    hashes = (len(event.block_hashes) for event in events if isinstance(event, BlockStored | BlockRemoved))
    return events if len(events) + sum(hashes) <= MAX_TYPED_ITEMS else None


def _decoded(payload: bytes) -> KVEventBatch:
    try:
        return decode_batch(payload)
    except msgspec.DecodeError:
        # The publisher lets no such payload in.
        return KVEventBatch(0.0, [UnknownEvent("", payload)])


def _fill_event(message: pb.KvEvent, event: Event) -> None:
    if isinstance(event, BlockStored):
        _fill_stored(message.stored, event)
    elif isinstance(event, BlockRemoved):
        message.removed.block_hashes.extend(map(_hash_to_pb, event.block_hashes))
        message.removed.tier = tier_of(event.medium)
        message.removed.medium = event.medium or ""
        message.removed.group = _unsigned(event.group_idx)
    elif isinstance(event, AllBlocksCleared):
        message.cleared.scope = pb.CLEAR_SCOPE_ALL
    elif isinstance(event, TierBlocksCleared):
        message.cleared.scope = pb.CLEAR_SCOPE_MEDIUM
        message.cleared.tier = tier_of(event.medium)
        message.cleared.medium = event.medium
        message.cleared.ownership = event.ownership or ""
    else:
        message.unknown = event.raw


def _fill_stored(message: pb.BlocksStored, event: BlockStored) -> None:
    message.block_hashes.extend(map(_hash_to_pb, event.block_hashes))
    if event.parent_block_hash is not None:
        message.parent_block_hash.CopyFrom(_hash_to_pb(event.parent_block_hash))
    try:
        message.token_ids.extend(event.token_ids)  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError):
        del message.token_ids[:]
    message.page_tokens = _unsigned(event.block_size)
    message.tier = tier_of(event.medium)
    message.medium = event.medium or ""
    message.group = _unsigned(event.group_idx)
    if event.lora_id is not None and -(2**63) <= event.lora_id < 2**63:
        message.lora_id = event.lora_id
    if event.kv_cache_spec_sliding_window is not None:
        message.sliding_window = _unsigned(event.kv_cache_spec_sliding_window)
    message.lora_name = event.lora_name or ""
    message.cache_salt = event.cache_salt or ""
    message.cache_kind = event.kv_cache_spec_kind or ""
    message.session_id = event.session_id or ""
    message.locality = event.locality or ""
    message.ownership = event.ownership or ""


def _hash_to_pb(block_hash: BlockHash) -> pb.BlockHash:
    return (
        pb.BlockHash(digest=block_hash) if isinstance(block_hash, bytes) else pb.BlockHash(value=hash_key(block_hash))
    )


def _unsigned(value: int | None) -> int:
    """Into what a uint32 holds: nobody but a hostile writer is beyond it."""
    return min(max(value or 0, 0), _MAX_TOKEN)
