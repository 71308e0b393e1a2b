"""KV-cache events and their batches, as engines and consumers handle them; ``codec`` puts them on the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvgrpc.events.log.digest import DEVICE, medium_key

BlockHash = int | bytes
Token = int | str | list[int]
# Of one frame of a publisher, many times what a journal takes (4 MiB): what is between is told as lost, and its
# connection goes on.
LARGEST_MESSAGE = 64 * 1024 * 1024
# What a uint32 of the contract holds: an event of any other group cannot be read.
Group = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Something that happened to blocks of a KV cache."""


class BlockStored(KVCacheEvent):
    """Blocks came into a tier, each the child of the one before it.

    Everything from ``lora_id`` on may be absent; which of it a payload can carry depends on its encoding and dialect.
    ``docs/events.md`` says where each engine writes it.
    """

    block_hashes: Sequence[BlockHash]
    """Opaque: integers from -2^63 to 2^64 - 1, or digests."""
    parent_block_hash: BlockHash | None = None
    """The block before the first; None: there is none."""
    token_ids: Sequence[Token] = []
    """Of all blocks, ``block_size`` each; numbers, or pairs of them (EAGLE). [] where the engine names none."""
    block_size: int = 0
    """Tokens in a block; 0 where the engine does not say."""
    lora_id: int | None = None
    medium: str | None = None
    """The engine's name for the tier ("GPU", "CPU_PINNED", "STORAGE", ...); None: the device's."""
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """For each block, what went into its hash besides tokens; vLLM."""
    group_idx: Group | None = None
    """Cache group; None: the engine has one."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    unknown_keys: dict[str, Any] | None = msgspec.field(default=None, name="kvgrpc.unknown_keys")
    """Keys of a map that no known version has; they are written back."""


class BlockRemoved(KVCacheEvent):
    """Blocks left the tier that ``medium`` names, one copy of each; None means the device's."""

    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: Group | None = None
    locality: str | None = None
    ownership: str | None = None
    unknown_keys: dict[str, Any] | None = msgspec.field(default=None, name="kvgrpc.unknown_keys")


class AllBlocksCleared(KVCacheEvent):
    """Nothing is cached any more, in any tier."""

    unknown_keys: dict[str, Any] | None = msgspec.field(default=None, name="kvgrpc.unknown_keys")


class TierBlocksCleared(KVCacheEvent):
    """All blocks, of every group, left the tier that ``medium`` names; the others keep theirs."""

    medium: str
    ownership: str | None = None
    """Which secondary tier it is about; nobody counts blocks by it, so those of the others go too."""
    unknown_keys: dict[str, Any] | None = msgspec.field(default=None, name="kvgrpc.unknown_keys")


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event of another kind, or that cannot be read: its bytes, and what it calls itself."""

    name: str
    raw: bytes

    @property
    def may_remove(self) -> bool:
        """True if blocks may have gone with it: not with what only brings some."""
        return self.name != BlockStored.__name__


Event = BlockStored | BlockRemoved | AllBlocksCleared | TierBlocksCleared | UnknownEvent


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events in the order in which they happened. ``ts``: Unix seconds, for people; order comes from the sequence.

    A rank of None is filled in by the publisher, in the bytes and not in the object.
    """

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


def on_device(event: BlockStored | BlockRemoved | TierBlocksCleared) -> bool:
    """True if it concerns the device tier."""
    return medium_key(event.medium) == DEVICE
