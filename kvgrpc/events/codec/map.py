"""Events as tagged maps, as both engines write them today: "type" names the class, every other key a field. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvgrpc.events.model import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    KVCacheEvent,
    TierBlocksCleared,
    Token,
    UnknownEvent,
)


class _Map(msgspec.Struct, omit_defaults=True, gc=False):
    """An event whose fields stand in the order of the engine's own class: msgspec writes them in it, and chooses the
    width of the header by their number."""


class _SglangStored(_Map, tag="BlockStored"):
    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[Token]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class _SglangRemoved(_Map, tag="BlockRemoved"):
    block_hashes: Sequence[BlockHash]
    medium: str | None = None


class _VllmStored(_Map, tag="BlockStored"):
    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[Token]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class _VllmRemoved(_Map, tag="BlockRemoved"):
    block_hashes: Sequence[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Cleared(_Map, tag="AllBlocksCleared"):
    pass


KNOWN: dict[str, type[KVCacheEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared, TierBlocksCleared)
}
_NOT_IN_SGLANG = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_NOT_IN_SGLANG_STORED = (*_NOT_IN_SGLANG, "locality", "ownership", "lookahead_token_ids")
_NOT_IN_SGLANG_REMOVED = ("group_idx", "locality", "ownership")
_CLEARED = _Cleared()


def sglang_0_5(event: Event) -> object:
    """An event as SGLang 0.5.23 writes it. What its class has no field for is a further key, which readers skip."""
    if isinstance(event, BlockStored):
        known = _SglangStored(
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.cache_salt,
            event.session_id,
            event.lora_name,
        )
        return _extended(known, event, _NOT_IN_SGLANG_STORED)
    if isinstance(event, BlockRemoved):
        return _extended(_SglangRemoved(event.block_hashes, event.medium), event, _NOT_IN_SGLANG_REMOVED)
    return _cleared(event)


def vllm_0_33(event: Event) -> object:
    """An event as vLLM 0.33.0 writes it. What its class has no field for is a further key, which readers skip."""
    if isinstance(event, BlockStored):
        known = _VllmStored(
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.locality,
            event.ownership,
            event.session_id,
            event.lookahead_token_ids,
        )
        return _extended(known, event, ("cache_salt",))
    if isinstance(event, BlockRemoved):
        removed = _VllmRemoved(event.block_hashes, event.medium, event.group_idx, event.locality, event.ownership)
        return _extended(removed, event, ())
    return _cleared(event)


def read_map(values: dict[Any, Any]) -> Event | None:
    """An event of a map that the typed decoder refused: with keys that no version has, or with nil for tokens or size.
    None: it cannot be read."""
    kind = KNOWN.get(values["type"]) if isinstance(values.get("type"), str) else None
    if kind is None or not all(isinstance(key, str) for key in values):
        return None
    names = set(kind.__struct_fields__) - {"unknown_keys"}
    known = {key: value for key, value in values.items() if key in names}
    for key in ("token_ids", "block_size"):
        if known.get(key, 0) is None:
            del known[key]
    unknown = {key: value for key, value in values.items() if key not in names and key != "type"}
    try:
        event: Any = msgspec.convert(known | {"type": values["type"]}, kind, builtin_types=(bytes,))
    except msgspec.ValidationError:
        return None
    event.unknown_keys = unknown or None
    return event  # type: ignore[no-any-return]


def _extended(known: _Map, event: BlockStored | BlockRemoved, missing: tuple[str, ...]) -> object:
    more = {name: value for name in missing if (value := getattr(event, name)) is not None}
    if not more and not event.unknown_keys:
        return known
    # Not through a conversion of values: what the encoder makes of arrays and numbers stays its own affair.
    tag = known.__struct_config__.tag
    fields = {name: getattr(known, name) for name in known.__struct_fields__}
    optional = known.__struct_defaults__
    for name in known.__struct_fields__[len(fields) - len(optional) :]:
        if fields[name] is None:
            del fields[name]
    return {"type": tag, **fields, **more, **(event.unknown_keys or {})}


def _cleared(event: object) -> object:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared", **event.unknown_keys} if event.unknown_keys else _CLEARED
    if isinstance(event, TierBlocksCleared):
        owner = {} if event.ownership is None else {"ownership": event.ownership}
        return {"type": "TierBlocksCleared", "medium": event.medium, **owner, **(event.unknown_keys or {})}
    if isinstance(event, UnknownEvent):
        return msgspec.Raw(event.raw)
    raise TypeError(f"an event is one of kvgrpc.events.model, not {type(event).__name__}")
