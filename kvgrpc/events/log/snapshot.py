"""The present state of a cache, folded from its events, and cuts of it that stay as they are. Pure.

A block costs about 350 bytes with the 16 tokens that engines name for it. A cut costs nothing at first: it shares the
state's shards, and the state copies a shard before it changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvgrpc.events.log.digest import DigestCounter, StateDigest, hash_key, medium_key
from kvgrpc.events.model import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    TierBlocksCleared,
    Token,
)

# A shard of a million blocks is copied in about a tenth of a millisecond.
SHARDS = 256
RUN_BLOCKS = 256
RUN_BYTES = 256 * 1024

TierName = tuple[str, int]

_encode = msgspec.msgpack.Encoder().encode


class About(msgspec.Struct, frozen=True, gc=False):
    """The values that the blocks of one event have in common."""

    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None
    locality: str | None
    ownership: str | None
    session_id: str | None
    cache_salt: str | None
    unknown_keys: dict[str, Any] | None


class CachedBlock(msgspec.Struct, frozen=True, gc=False):
    """One block in one tier and group.

    ``tokens``: a msgpack array, b"" where the event did not give each block its own. ``extra``: its entries of
    ``extra_keys`` and ``lookahead_token_ids``.
    """

    block_hash: BlockHash
    parent: BlockHash | None
    tokens: bytes
    about: About
    extra: tuple[Any, Any] | None
    copies: int


class CacheState:
    """Folds events into what is cached: copies of each block in each tier and group. Not thread-safe."""

    def __init__(self) -> None:
        self.next_sequence = 0
        self.copies = 0
        """Copies of all blocks together."""
        self.doubtful = False
        """An event came that may have been a removal and that cannot be read, and nothing cleared everything since."""
        self._digest = DigestCounter()
        self._tiers: dict[TierName, _Tier] = {}

    def apply(self, events: Iterable[Event]) -> int:
        """The events of one batch, in order; how many were passed over, of an unknown kind or of too many places.

        What is removed without having been stored changes nothing.
        """
        unknown = 0
        for event in events:
            if isinstance(event, BlockStored):
                unknown += not self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._tiers, self.copies, self.doubtful = {}, 0, False
                self._digest.clear()
            elif isinstance(event, TierBlocksCleared):
                self._clear(medium_key(event.medium))
            else:
                unknown += 1
                self.doubtful = self.doubtful or event.may_remove
        return unknown

    def digest(self) -> StateDigest:
        """The digest of the state as it is now."""
        return self._digest.digest(self.next_sequence, doubtful=self.doubtful)

    def cut(self) -> Cut:
        """The state as it is now; takes microseconds, whatever its size."""
        tiers = {name: tier.share() for name, tier in self._tiers.items()}
        return Cut(self.next_sequence, self.copies, self.digest(), tiers)

    def _store(self, event: BlockStored) -> bool:
        name = (medium_key(event.medium), event.group_idx or 0)
        hashes, size = event.block_hashes, event.block_size
        if not hashes:
            return True
        if not self._digest.admits(*name):
            return False
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = _Tier()
        about = _about(event)
        tokens = _tokens_of_each(event.token_ids, size, len(hashes))
        extras = _extras_of_each(event)
        parent, keys, new = event.parent_block_hash, [hash_key(block_hash) for block_hash in hashes], 0
        for index, (key, block_hash) in enumerate(zip(keys, hashes, strict=True)):
            known = tier.get(key)
            if known is None:
                new += 1
                extra = extras[index] if extras else None
                tier.put(key, CachedBlock(block_hash, parent, tokens[index] if tokens else b"", about, extra, 1))
            else:
                tier.put(key, _with_copies(known, known.copies + 1))
            parent = block_hash
        self.copies += len(hashes)
        self._digest.add(*name, keys, new)
        return True

    def _clear(self, medium: str) -> None:
        for name in [name for name in self._tiers if name[0] == medium]:
            gone = self._tiers.pop(name)
            self.copies -= sum(block.copies for shard in gone.share() for block in shard.values())
        self._digest.clear(medium)

    def _remove(self, event: BlockRemoved) -> None:
        name = (medium_key(event.medium), event.group_idx or 0)
        tier = self._tiers.get(name)
        if tier is None:
            return
        removed, gone = [], 0
        for block_hash in event.block_hashes:
            key = hash_key(block_hash)
            known = tier.get(key)
            if known is None:
                continue
            removed.append(key)
            if known.copies > 1:
                tier.put(key, _with_copies(known, known.copies - 1))
            else:
                tier.remove(key)
                gone += 1
        self.copies -= len(removed)
        self._digest.remove(*name, removed, gone)
        if not self._digest.holds(*name):
            del self._tiers[name]


@dataclass(frozen=True, slots=True)
class Cut:
    """A state that does not change any more: that after all batches before ``next_sequence``."""

    next_sequence: int
    copies: int
    digest: StateDigest
    tiers: dict[TierName, tuple[dict[int, CachedBlock], ...]]

    def runs(self) -> Iterator[list[CachedBlock]]:
        """All blocks, those of a tier and group together, parents before children.

        The blocks of a run follow each other, parent by child, and are about the same; a run has at most RUN_BLOCKS of
        them, and RUN_BYTES of tokens unless it is one. A block with several copies comes once for each.
        """
        for shards in self.tiers.values():
            yield from _runs(shards)


class _Tier:
    """Blocks by key, in shards that are copied before a change once a cut has them."""

    __slots__ = ("_shards", "_shared")

    def __init__(self) -> None:
        # One empty shard is shared until something comes into it.
        self._shards: list[dict[int, CachedBlock]] = [{}] * SHARDS
        self._shared = bytearray(b"\x01") * SHARDS

    def get(self, key: int) -> CachedBlock | None:
        return self._shards[key % SHARDS].get(key)

    def put(self, key: int, block: CachedBlock) -> None:
        self._own(key % SHARDS)[key] = block

    def remove(self, key: int) -> None:
        del self._own(key % SHARDS)[key]

    def share(self) -> tuple[dict[int, CachedBlock], ...]:
        self._shared = bytearray(b"\x01") * SHARDS
        return tuple(self._shards)

    def _own(self, index: int) -> dict[int, CachedBlock]:
        if self._shared[index]:
            self._shards[index] = self._shards[index].copy()
            self._shared[index] = 0
        return self._shards[index]


def stored_event(run: list[CachedBlock]) -> BlockStored:
    """The event that says a run. Its ``token_ids`` are msgspec.Raw, which an encoder writes as they are."""
    extras = [block.extra for block in run] if run[0].extra is not None else None
    return _event(run, run[0].parent, _joined([block.tokens for block in run]), extras)


def named_event(run: list[CachedBlock]) -> BlockStored:
    """The event that names the blocks of a run and says no more of them than where they lie."""
    return _event(run, None, [], None)


def _event(run: list[CachedBlock], parent: BlockHash | None, tokens: Any, extras: list[Any] | None) -> BlockStored:
    about = run[0].about
    return BlockStored(
        [block.block_hash for block in run],
        parent,
        tokens,
        about.block_size,
        about.lora_id,
        about.medium,
        about.lora_name,
        _column(extras, 0),
        about.group_idx,
        about.kv_cache_spec_kind,
        about.kv_cache_spec_sliding_window,
        about.locality,
        about.ownership,
        about.session_id,
        _column(extras, 1),
        about.cache_salt,
        about.unknown_keys,
    )


def _runs(shards: tuple[dict[int, CachedBlock], ...]) -> Iterator[list[CachedBlock]]:
    several: list[CachedBlock] = []
    yield from _grouped(_in_order(shards, several))
    copies = 1
    while several:
        yield from _grouped(several)
        copies += 1
        several = [block for block in several if block.copies > copies]


def _in_order(shards: tuple[dict[int, CachedBlock], ...], several: list[CachedBlock]) -> Iterator[CachedBlock]:
    """Each block once, parents first; what has several copies goes into ``several`` too."""
    told: set[int] = set()
    for shard in shards:
        for key, block in shard.items():
            if key in told:
                continue
            for ancestor in _path(shards, key, block, told):
                if ancestor.copies > 1:
                    several.append(ancestor)
                yield ancestor


def _grouped(blocks: Iterable[CachedBlock]) -> Iterator[list[CachedBlock]]:
    run: list[CachedBlock] = []
    size = 0
    for block in blocks:
        size += len(block.tokens)
        if run and not (len(run) < RUN_BLOCKS and size < RUN_BYTES and _follows(run[-1], block)):
            yield run
            run, size = [], len(block.tokens)
        run.append(block)
    if run:
        yield run


def _path(
    shards: tuple[dict[int, CachedBlock], ...], key: int, block: CachedBlock, told: set[int]
) -> list[CachedBlock]:
    """The block and those of its ancestors that are there and were not told, the oldest first. Ends in a circle too."""
    path = []
    current: CachedBlock | None = block
    while current is not None and key not in told:
        told.add(key)
        path.append(current)
        if current.parent is None:
            break
        key = hash_key(current.parent)
        current = shards[key % SHARDS].get(key)
    path.reverse()
    return path


def _follows(before: CachedBlock, block: CachedBlock) -> bool:
    return (
        block.parent == before.block_hash
        and (block.about is before.about or block.about == before.about)
        and bool(block.tokens) == bool(before.tokens)
        and (block.extra is None) == (before.extra is None)
    )


def _with_copies(block: CachedBlock, copies: int) -> CachedBlock:
    return CachedBlock(block.block_hash, block.parent, block.tokens, block.about, block.extra, copies)


def _about(event: BlockStored) -> About:
    return About(
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.ownership,
        event.session_id,
        event.cache_salt,
        event.unknown_keys,
    )


def _tokens_of_each(tokens: Sequence[Token], size: int, blocks: int) -> list[bytes] | None:
    """None where they cannot be shared out: sparse groups name the tokens of blocks that they do not have."""
    if not size or len(tokens) != size * blocks:
        return None
    return [_encode(tokens[first : first + size]) for first in range(0, len(tokens), size)]


def _extras_of_each(event: BlockStored) -> list[tuple[Any, Any]] | None:
    if event.extra_keys is None and event.lookahead_token_ids is None:
        return None
    columns = []
    for column in (event.extra_keys, event.lookahead_token_ids):
        fits = column is not None and len(column) == len(event.block_hashes)
        columns.append(column if fits and column is not None else [None] * len(event.block_hashes))
    return list(zip(*columns, strict=True))


def _column(extras: list[Any] | None, index: int) -> list[Any] | None:
    if extras is None:
        return None
    column = [extra[index] for extra in extras]
    return None if all(entry is None for entry in column) else column


def _joined(arrays: list[bytes]) -> msgspec.Raw:
    """One msgpack array of the elements of several."""
    if len(arrays) == 1:
        return msgspec.Raw(arrays[0] or b"\x90")
    count, bodies = 0, []
    for array in arrays:
        length, start = _array_header(array)
        count += length
        bodies.append(array[start:])
    return msgspec.Raw(_header_of(count) + b"".join(bodies))


def _array_header(array: bytes) -> tuple[int, int]:
    """Length and size of the header of an array that our encoder wrote."""
    if not array:
        return 0, 0
    if array[0] == 0xDC:
        return int.from_bytes(array[1:3], "big"), 3
    if array[0] == 0xDD:
        return int.from_bytes(array[1:5], "big"), 5
    return array[0] & 0x0F, 1


def _header_of(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 2**16 else b"\xdd" + count.to_bytes(4, "big")
