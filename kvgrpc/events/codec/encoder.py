"""Batch -> payload."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvgrpc.events.codec.decoder import check_batch
from kvgrpc.events.codec.map import sglang_0_5, vllm_0_33
from kvgrpc.events.codec.positional import seed_000, seed_001
from kvgrpc.events.model import AllBlocksCleared, Event, KVEventBatch

# SGLang's name and vLLM's.
RANK_FIELDS = ("attn_dp_rank", "data_parallel_rank")


class Dialect(enum.Enum):
    """Whose events our own batches look like; an engine's own batches go as they are."""

    SGLANG = "sglang"
    """Arrays of the first form (no medium, so only the device tier), or maps of SGLang 0.5.23."""
    VLLM = "vllm"
    """Arrays with a medium, or maps of vLLM 0.33.0, which SGLang's typed readers take too."""


class Encoding(enum.Enum):
    """The form of an event on the wire."""

    ARRAY = "array"
    """A positional array: for consumers from before June 2026."""
    MAP = "map"
    """A tagged map, as both engines write today."""


_WRITERS: dict[tuple[Dialect, Encoding], Callable[[Event], object | None]] = {
    (Dialect.SGLANG, Encoding.ARRAY): seed_000,
    (Dialect.VLLM, Encoding.ARRAY): seed_001,
    (Dialect.SGLANG, Encoding.MAP): sglang_0_5,
    (Dialect.VLLM, Encoding.MAP): vllm_0_33,
}


class BatchEncoder:
    """Encodes what engines publish. Not thread-safe: one for each publisher thread."""

    def __init__(self, dialect: Dialect, encoding: Encoding, rank: int) -> None:
        self._write = _WRITERS[dialect, encoding]
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_list)

    def encode(self, batch: object) -> bytes:
        """The payload of one batch: a KVEventBatch, an engine's own msgspec.Struct, or bytes that are a payload.

        The object itself is not changed. Raises what msgspec raises for what cannot be encoded, msgspec.DecodeError for
        bytes that are no batch, TypeError for anything else.
        """
        if isinstance(batch, KVEventBatch):
            return self._own(batch.ts, batch.events, batch.data_parallel_rank)
        if isinstance(batch, bytes):
            payload = batch
        elif isinstance(batch, msgspec.Struct):
            payload = self._encoder.encode(self._with_rank(batch))
        else:
            raise TypeError(f"a batch is a msgspec.Struct or its bytes, not {type(batch).__name__} {batch!r:.40}")
        check_batch(payload)
        return payload

    def clear(self) -> bytes:
        """A batch that says AllBlocksCleared, now."""
        return self._own(time.time(), [AllBlocksCleared()], self._rank)

    def _own(self, ts: float, events: Sequence[Event], rank: int | None) -> bytes:
        # Not even empty batches are left out: a sequence without a batch would read as a loss.
        written = [form for event in events if (form := self._write(event)) is not None]
        return self._encoder.encode((ts, written, self._rank if rank is None else rank))

    def _with_rank(self, batch: msgspec.Struct) -> msgspec.Struct:
        for name in RANK_FIELDS:
            if name in batch.__struct_fields__ and getattr(batch, name) is None:
                return msgspec.structs.replace(batch, **{name: self._rank})
        return batch


def _as_list(value: Any) -> Any:
    """For numpy arrays and scalars, which engines use for hashes and tokens."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be part of a batch")
