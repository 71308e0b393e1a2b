"""Events as positional arrays: how the seeds write them, and everything that was appended to them later. Pure."""

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
    Group,
    KVCacheEvent,
    TierBlocksCleared,
    Token,
    UnknownEvent,
    on_device,
)


class _Array(msgspec.Struct, array_like=True, gc=False):
    """An event whose first element is its tag."""


class _Seed000Stored(_Array, tag="BlockStored"):
    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[Token]
    block_size: int
    lora_id: int | None


class _Seed000Removed(_Array, tag="BlockRemoved"):
    block_hashes: Sequence[BlockHash]


class _Seed001Stored(_Seed000Stored, tag="BlockStored"):
    medium: str | None


class _Seed001Removed(_Seed000Removed, tag="BlockRemoved"):
    medium: str | None


class _Cleared(_Array, tag="AllBlocksCleared"):
    pass


class AnyStored(_Array, tag="BlockStored", forbid_unknown_fields=True):
    """The elements of any version. Element 7 became the adapter's name in vLLM and a map of metadata in SGLang."""

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[Token]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    name_or_metadata: str | dict[str, Any] | None = None
    extra_keys: list[Any] | None = None
    group_idx: Group | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _AnyRemoved(_Array, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: Group | None = None
    locality: str | None = None


class _AnyCleared(_Array, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class _AnyTierCleared(_Array, tag="TierBlocksCleared", forbid_unknown_fields=True):
    medium: str
    ownership: str | None = None


AnyArray = AnyStored | _AnyRemoved | _AnyCleared | _AnyTierCleared
_ANY = {
    "BlockStored": AnyStored,
    "BlockRemoved": _AnyRemoved,
    "AllBlocksCleared": _AnyCleared,
    "TierBlocksCleared": _AnyTierCleared,
}
_CLEARED = _Cleared()


def seed_000(event: Event) -> object | None:
    """SGLang's first form. It has neither medium nor group, so a reader takes every event for one of the device's
    first group: others are None, which leaves them out."""
    if isinstance(event, BlockStored):
        if not _is_plain(event) or not on_device(event):
            return None
        return _Seed000Stored(
            event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id
        )
    if isinstance(event, BlockRemoved):
        return _Seed000Removed(event.block_hashes) if _is_plain(event) and on_device(event) else None
    if isinstance(event, TierBlocksCleared) and not on_device(event):
        return None
    # Its readers know no clear but that of everything: they then know too little, never too much.
    return _CLEARED if isinstance(event, AllBlocksCleared | TierBlocksCleared) else _other(event)


def seed_001(event: Event) -> object | None:
    """vLLM's first form, with a medium; events of other groups than the first are left out."""
    if isinstance(event, BlockStored):
        if not _is_plain(event):
            return None
        return _Seed001Stored(
            event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id, event.medium
        )
    if isinstance(event, BlockRemoved):
        return _Seed001Removed(event.block_hashes, event.medium) if _is_plain(event) else None
    # Its readers know no clear but that of everything: they then know too little, never too much.
    return _CLEARED if isinstance(event, AllBlocksCleared | TierBlocksCleared) else _other(event)


def event_of(array: AnyArray) -> Event:
    """The event of a decoded array."""
    if isinstance(array, AnyStored):
        name, salt = array.name_or_metadata, None
        if isinstance(name, dict):
            salt, name = name.get("cache_salt"), None
        return BlockStored(
            array.block_hashes,
            array.parent_block_hash,
            array.token_ids,
            array.block_size,
            array.lora_id,
            array.medium,
            name,
            array.extra_keys,
            array.group_idx,
            array.kv_cache_spec_kind,
            array.kv_cache_spec_sliding_window,
            array.locality,
            cache_salt=salt if isinstance(salt, str) else None,
        )
    if isinstance(array, _AnyRemoved):
        return BlockRemoved(array.block_hashes, array.medium, array.group_idx, array.locality)
    if isinstance(array, _AnyTierCleared):
        return TierBlocksCleared(array.medium, array.ownership)
    return AllBlocksCleared()


def read_array(values: list[Any]) -> Event | None:
    """An event of an array that the typed decoder refused: longer than any known version, or with nil for tokens or
    size. None: it cannot be read."""
    known = _ANY.get(values[0]) if values and isinstance(values[0], str) else None
    if known is None:
        return None
    if known is AnyStored and _holds_images(values):
        values = [*values[:9], *values[10:]]
    fields = values[1 : 1 + len(known.__struct_fields__)]
    if known is AnyStored and len(fields) >= 4:
        fields[2:4] = [fields[2] if fields[2] is not None else [], fields[3] if fields[3] is not None else 0]
    try:
        return event_of(msgspec.convert([values[0], *fields], known, builtin_types=(bytes,)))
    except msgspec.ValidationError:
        return None


def _holds_images(values: list[Any]) -> bool:
    """True if position 9 is Dynamo's list of images, or nil in its place, and the group comes behind it."""
    if len(values) > 10 and values[9] is None:
        return type(values[10]) is int
    return len(values) > 9 and isinstance(values[9], list)


def _is_plain(event: BlockStored | BlockRemoved) -> bool:
    return not event.group_idx


def _other(event: object) -> object:
    if isinstance(event, UnknownEvent):
        return msgspec.Raw(event.raw)
    if isinstance(event, KVCacheEvent):
        return event
    raise TypeError(f"an event is one of kvgrpc.events.model, not {type(event).__name__}")
