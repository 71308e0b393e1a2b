"""What one cache holds by what its events said: where a snapshot, or a log from its beginning, leads to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvgrpc.events.following.index import BlockIndex, BlockSet
from kvgrpc.events.log.digest import DigestCounter, StateDigest, hash_key, medium_key
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored

# Prefixes are matched in the group of full attention, which engines number first; the others hold parts of a sequence.
PREFIX_GROUP = 0


class CacheContents:
    """The contents of one cache, part of an index from the moment it is shown. Belongs to one thread.

    ``next_sequence``: all batches before it are in. ``page_size``: tokens of a block as last told, 0 before. ``whole``:
    False where the log began before the first batch that was seen, and nothing cleared the cache since; then there may
    be more blocks, and never fewer.
    """

    def __init__(self, index: BlockIndex, next_sequence: int = 0, *, whole: bool = True) -> None:
        self.next_sequence = next_sequence
        self.page_size = 0
        self.whole = whole
        self.blocks: BlockSet = index.cache()
        self._digest = DigestCounter()
        # Copies of the blocks of other groups, which no prefix needs and the digest counts.
        self._others: dict[tuple[str, int], dict[int, int]] = {}

    def apply(self, events: Iterable[object]) -> None:
        """What happened, in its order. Kinds of events that this version does not know change nothing."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(medium_key(event.medium), _group(event), _keys(event.block_hashes))
                self.page_size = event.block_size or self.page_size
            elif isinstance(event, BlockRemoved):
                self._removed(medium_key(event.medium), _group(event), _keys(event.block_hashes))
            elif isinstance(event, AllBlocksCleared):
                self.clear()

    def clear(self) -> None:
        """Nothing is cached any more."""
        self.whole = True
        self.blocks.cleared()
        self._digest.clear()
        self._others.clear()

    def digest(self) -> StateDigest:
        """What a publisher with the same state says at ``next_sequence``."""
        return self._digest.digest(self.next_sequence)

    def _stored(self, medium: str, group: int, keys: Sequence[int]) -> None:
        if group == PREFIX_GROUP:
            appeared: Sequence[int] = self.blocks.stored(medium, keys)
        else:
            copies = self._others.setdefault((medium, group), {})
            appeared = _add(copies, keys)
        self._digest.add(medium, group, appeared)

    def _removed(self, medium: str, group: int, keys: Sequence[int]) -> None:
        if group == PREFIX_GROUP:
            vanished: Sequence[int] = self.blocks.removed(medium, keys)
        else:
            vanished = _subtract(self._others.get((medium, group), {}), keys)
        self._digest.remove(medium, group, vanished)


def _group(event: object) -> int:
    return getattr(event, "group_idx", None) or 0


def _keys(hashes: Sequence[int | bytes]) -> list[int]:
    return [hash_key(block) for block in hashes]


def _add(copies: dict[int, int], keys: Sequence[int]) -> list[int]:
    appeared = []
    for key in keys:
        before = copies.get(key, 0)
        copies[key] = before + 1
        if not before:
            appeared.append(key)
    return appeared


def _subtract(copies: dict[int, int], keys: Sequence[int]) -> list[int]:
    vanished = []
    for key in keys:
        before = copies.get(key, 0)
        if before > 1:
            copies[key] = before - 1
        elif before:
            del copies[key]
            vanished.append(key)
    return vanished
