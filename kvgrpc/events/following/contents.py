"""The contents of one cache, as its events said: where a snapshot, or a log from its beginning, leads to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from kvgrpc.events.following.groups import CacheGroup, usable
from kvgrpc.events.following.index import BlockIndex, BlockSet, Match, Reached, reach_of
from kvgrpc.events.following.saved import SavedCache, SavedPlace
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES, DigestCounter, StateDigest, hash_key, medium_key
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, TierBlocksCleared, UnknownEvent

# Prefixes are matched in the group of full attention, which engines number first; the others hold parts of a sequence.
PREFIX_GROUP = 0
# A heartbeat is compared with the past: so much of it is kept.
_CHECKPOINTS = 64
# Folded in one step.
SLICE_BLOCKS = 2048
_MOST_GROUPS = 64
_LARGEST_PAGE = 2**32 - 1


class CacheContents:
    """The contents of one cache, part of an index from the moment it is shown. Belongs to one thread.

    ``next_sequence``: all batches before it are in. ``page_tokens``: tokens of a block as last told, 0 before.
    ``whole``: False where the log began before the first batch that was seen, and nothing cleared the cache since; then
    there may be more blocks, and never fewer. ``doubtful_at``: the last batch with an event that cannot be read here
    and that may have been a removal, so that there may be fewer; None: there was none since everything was cleared.
    """

    def __init__(self, index: BlockIndex, next_sequence: int = 0, *, whole: bool = True) -> None:
        self.next_sequence = next_sequence
        self.page_tokens = 0
        self.whole = whole
        self.doubtful_at: int | None = None
        self.blocks: BlockSet = index.cache()
        self._index = index
        self._digest = DigestCounter()
        self._checkpoints: dict[int, StateDigest] = {}
        # Copies of the blocks of other groups, and of tiers that the index does not tell apart: no prefix needs them,
        # and the digest counts them.
        self._others: dict[tuple[str, int], dict[int, int]] = {}
        self._groups: dict[int, CacheGroup] = {}

    def match(self, match: Match, hashes: Sequence[int], step: int) -> Match:
        """Returns what of a match of group 0 is of use, where the other groups of the model are here too.

        ``hashes`` and ``step`` as in ``groups.usable``.
        """
        if not self._groups:
            return match
        found = [
            usable(prefix, self.page_tokens, hashes, step, self._groups, partial(self._holds, reached))
            for reached, prefix in zip(Reached, match, strict=True)
        ]
        return Match(*found)

    def saved(self, engine: str, dp: int, log_id: str) -> SavedCache:
        """Returns what it is now, to be packed with the cut of its index."""
        places = [
            SavedPlace(medium, group, list(copies), {block: count for block, count in copies.items() if count > 1})
            for (medium, group), copies in self._others.items()
        ]
        return SavedCache(
            engine,
            dp,
            log_id,
            self.digest(),
            self.page_tokens,
            dict(self._groups),
            places,
            self.blocks.slot,
            self.blocks.media(),
        )

    def restore(self, saved: SavedCache) -> Iterator[None]:
        """Takes what was saved, in steps between which others have their turn. ``digest`` says whether it is all."""
        self.page_tokens, self._groups = saved.page_tokens, dict(saved.groups)
        self._index.note_page(self.page_tokens)
        for medium, group, hashes, copies in saved.places:
            for begin in range(0, len(hashes), SLICE_BLOCKS):
                self._stored(medium, group, np.array(hashes[begin : begin + SLICE_BLOCKS], np.uint64).tolist())
                yield
            for block, count in copies.items():
                self._stored(medium, group, [block] * (count - 1))

    def apply(self, events: Iterable[object]) -> int:
        """Returns what happened, in its order. How many events changed nothing because nobody here knows their kind, or
        because they name a place beyond what a cache may have."""
        unknown = 0
        for event in events:
            if isinstance(event, BlockStored):
                unknown += not self._stored(medium_key(event.medium), _group(event), _keys(event.block_hashes))
                self._learn(event)
            elif isinstance(event, BlockRemoved):
                self._removed(medium_key(event.medium), _group(event), _keys(event.block_hashes))
            elif isinstance(event, AllBlocksCleared):
                self.clear()
            elif isinstance(event, TierBlocksCleared):
                self._clear(medium_key(event.medium))
            else:
                unknown += 1
                if isinstance(event, UnknownEvent) and event.may_remove:
                    self.doubtful_at = self.next_sequence
        return unknown

    def _learn(self, event: BlockStored) -> None:
        """Sizes and kinds, as the last event told them."""
        size = event.block_size if 0 < event.block_size <= _LARGEST_PAGE else 0
        group = _group(event)
        if group == PREFIX_GROUP:
            if size and size != self.page_tokens:
                self.page_tokens = size
                self._index.note_page(size)
        elif group in self._groups or len(self._groups) < _MOST_GROUPS:
            known = self._groups.get(group)
            kind = event.kv_cache_spec_kind or (known.kind if known else "")
            window = event.kv_cache_spec_sliding_window or (known.window if known else 0)
            self._groups[group] = CacheGroup(kind, window, size or (known.page_tokens if known else 0))

    def _holds(self, reached: Reached, group: int, key: int) -> bool:
        return any(
            key in copies
            for (medium, number), copies in self._others.items()
            if number == group and reach_of(medium) <= reached
        )

    def clear(self) -> None:
        """Nothing is cached any more."""
        self.whole, self.doubtful_at = True, None
        self.blocks.cleared()
        self._digest.clear()
        self._others.clear()

    def advance(self, next_sequence: int) -> None:
        """All batches before it are in from now on."""
        self.next_sequence = next_sequence
        if next_sequence % CHECKPOINT_BATCHES == 0 and self.whole:
            self._checkpoints[next_sequence] = self.digest()
            if len(self._checkpoints) > _CHECKPOINTS:
                del self._checkpoints[next(iter(self._checkpoints))]

    def digest_at(self, next_sequence: int) -> StateDigest | None:
        """Returns what it came to when all before that sequence were in; None where that is not known any more."""
        return self.digest() if next_sequence == self.next_sequence else self._checkpoints.get(next_sequence)

    def digest(self) -> StateDigest:
        """Returns what a publisher with the same state says at ``next_sequence``."""
        return self._digest.digest(self.next_sequence)

    def _clear(self, medium: str) -> None:
        self.blocks.cleared(medium)
        self._digest.clear(medium)
        self._others = {key: copies for key, copies in self._others.items() if key[0] != medium}

    def _stored(self, medium: str, group: int, keys: Sequence[int]) -> bool:
        if not keys:
            return True
        if not self._digest.admits(medium, group):
            return False
        if group == PREFIX_GROUP and self.blocks.tells(medium):
            appeared = self.blocks.stored(medium, keys)
        else:
            appeared = _add(self._others.setdefault((medium, group), {}), keys)
        self._digest.add(medium, group, keys, appeared)
        return True

    def _removed(self, medium: str, group: int, keys: Sequence[int]) -> None:
        if not self._digest.holds(medium, group):
            return
        if group == PREFIX_GROUP and self.blocks.tells(medium):
            gone, vanished = self.blocks.removed(medium, keys)
        else:
            gone, vanished = _subtract(self._others[medium, group], keys)
        self._digest.remove(medium, group, gone, vanished)
        if not self._digest.holds(medium, group):
            self._others.pop((medium, group), None)
            if group == PREFIX_GROUP:
                self.blocks.forget(medium)


def portions(events: Iterable[object]) -> Iterator[list[object]]:
    """Events, so many blocks at a time as a turn may take."""
    portion: list[object] = []
    blocks = 0
    for event in events:
        portion.append(event)
        blocks += len(getattr(event, "block_hashes", ()))
        if blocks >= SLICE_BLOCKS:
            yield portion
            portion, blocks = [], 0
    yield portion


def _group(event: object) -> int:
    return getattr(event, "group_idx", None) or 0


def _keys(hashes: Sequence[int | bytes]) -> list[int]:
    return [hash_key(block) for block in hashes]


def _add(copies: dict[int, int], keys: Sequence[int]) -> int:
    """Counts a copy of each; how many were not there."""
    before = len(copies)
    for key in keys:
        copies[key] = copies.get(key, 0) + 1
    return len(copies) - before


def _subtract(copies: dict[int, int], keys: Sequence[int]) -> tuple[list[int], int]:
    """Takes a copy of each away: those that were there, and how many are not any more."""
    before, gone = len(copies), []
    for key in keys:
        count = copies.get(key, 0)
        if count > 1:
            copies[key] = count - 1
        elif count:
            del copies[key]
        if count:
            gone.append(key)
    return gone, before - len(copies)
