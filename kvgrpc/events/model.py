"""KV-cache events and their batches, in the positional form of the seeds.

A struct is an array on the wire, an event's class name its first element. One class serves every positional dialect:
``codec`` leaves fields out where the dialect has none, and an array that lacks the last ones is read with defaults.
"""

from __future__ import annotations

import msgspec

MEDIUM_DEVICE = "GPU"


class KVCacheEvent(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Something that happened to blocks of a KV cache."""


class BlockStored(KVCacheEvent):
    """Blocks came into a tier, each the child of the one before it.

    ``block_hashes`` are opaque: integers from -2^63 to 2^64 - 1, or bytes. ``parent_block_hash`` is that of the block
    before the first, None: there is none. ``token_ids`` are those of all blocks, ``block_size`` tokens each. ``medium``
    names the tier, None means the device's.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks left the tier that ``medium`` names; None means the device's."""

    block_hashes: list[int | bytes]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is cached any more, in any tier."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events in the order in which they happened. ``ts``: Unix seconds, for people; order comes from the sequence.

    A rank of None is filled in by the publisher, in the bytes and not in the object.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def on_device(event: KVCacheEvent) -> bool:
    """Whether it concerns the device tier; engines write the tier in either case, or not at all."""
    medium: str | None = getattr(event, "medium", None)
    return medium is None or medium.casefold() == MEDIUM_DEVICE.casefold()
