"""Batches <-> the payload of a PUB message, the bytes that journal, replay and PUB share."""

from __future__ import annotations

import enum
import time
from typing import Any

import msgspec

from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch, on_device

RANK_FIELDS = ("attn_dp_rank", "data_parallel_rank")


class Dialect(enum.Enum):
    """What our own batches look like on the wire; an engine's batches go as they are."""

    SGLANG = "sglang"
    """Seed 000: no medium, therefore only events of the device tier."""
    VLLM = "vllm"
    """Seed 001: with medium."""


class BatchEncoder:
    """Encodes what engines publish. Not thread-safe: one for each publisher thread."""

    def __init__(self, dialect: Dialect, rank: int) -> None:
        self._dialect = dialect
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_list)

    def encode(self, batch: object) -> bytes:
        """The payload of one batch: a KVEventBatch, an engine's own msgspec.Struct, or bytes that are a payload.

        The object itself is not changed. Raises whatever msgspec raises for what cannot be encoded, TypeError for what
        is no batch.
        """
        if isinstance(batch, bytes) and batch:
            return batch
        if not isinstance(batch, msgspec.Struct):
            raise TypeError(f"a batch is a msgspec.Struct or its bytes, not {type(batch).__name__} {batch!r:.40}")
        if isinstance(batch, KVEventBatch) and self._dialect is Dialect.SGLANG:
            batch = _without_medium(batch)
        return self._encoder.encode(self._with_rank(batch))

    def clear(self, like: bytes) -> bytes:
        """A batch that says AllBlocksCleared, now, in the encoding of the payload ``like`` (empty: ours)."""
        event = {"type": "AllBlocksCleared"} if _holds_maps(like) else AllBlocksCleared()
        return self._encoder.encode([time.time(), [event], self._rank])

    def _with_rank(self, batch: msgspec.Struct) -> msgspec.Struct:
        for name in RANK_FIELDS:
            if name in batch.__struct_fields__ and getattr(batch, name) is None:
                return msgspec.structs.replace(batch, **{name: self._rank})
        return batch


def decode_batch(payload: bytes) -> KVEventBatch:
    """The batch of a payload in one of our dialects. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(payload)


class _StoredWithoutMedium(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class _RemovedWithoutMedium(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]


class _BatchWithoutMedium(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None


_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def _without_medium(batch: KVEventBatch) -> _BatchWithoutMedium:
    # Not even empty batches are left out: a sequence without a batch would read as a loss.
    events = [_shorten(event) for event in batch.events if on_device(event)]
    return _BatchWithoutMedium(batch.ts, events, batch.data_parallel_rank)


def _shorten(event: KVCacheEvent) -> KVCacheEvent:
    if isinstance(event, BlockStored):
        return _StoredWithoutMedium(
            event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id
        )
    if isinstance(event, BlockRemoved):
        return _RemovedWithoutMedium(event.block_hashes)
    return event


def _as_list(value: Any) -> Any:
    """For numpy arrays and scalars, which engines use for hashes and tokens."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be part of a batch")


def _holds_maps(payload: bytes) -> bool:
    try:
        events = msgspec.msgpack.decode(payload)[1]
        return isinstance(events[0], dict)
    except (msgspec.DecodeError, LookupError, TypeError):
        return False
