"""Who holds the beginning of a request: the contents of many caches in one table that answers all of them at once.

Pure: no clock, thread or socket; belongs to one thread. A block that several caches hold is one entry, about 100 bytes
(a dictionary slot and the hash), whoever holds it; the sets of holders are shared by all blocks that have the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LEAST_GARBAGE = 4096
_NOBODY = (0, 0, 0)

# The caches that hold a block on the device, on the host, in storage; a bit for each cache.
Holders = tuple[int, int, int]


class Tier(enum.IntEnum):
    """Where a block is, the fastest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks of a request one cache holds.

    ``device`` of them lie on the device without a gap, ``host`` on device or host, ``storage`` anywhere at all; so
    ``device <= host <= storage``.
    """

    device: int
    host: int
    storage: int


class PrefixIndex:
    """Hash of a block (unsigned, ``hashing.canonical_hash``) -> which caches hold it in which tier."""

    def __init__(self) -> None:
        # Blocks refer to sets of holders by number, so that a cache that empties changes the sets and no block.
        self._numbers: dict[int, int] = {}
        self._holders: list[Holders] = [_NOBODY]
        self._number_of: dict[Holders, int] = {_NOBODY: 0}
        self._caches: list[CachedBlocks | None] = []
        self._shown = 0
        self._garbage = 0
        self._sweep_at = LEAST_GARBAGE

    @property
    def blocks(self) -> int:
        """Different blocks that somebody holds; for some time after a cache emptied, more."""
        return len(self._numbers)

    def cache(self) -> CachedBlocks:
        """Room for the contents of one more cache, which ``score`` does not see before it is shown."""
        slot = self._caches.index(None) if None in self._caches else len(self._caches)
        if slot == len(self._caches):
            self._caches.append(None)
        cache = self._caches[slot] = CachedBlocks(self, slot)
        return cache

    def score(self, hashes: Sequence[int]) -> dict[CachedBlocks, Match]:
        """For each shown cache that holds the first block, how many leading blocks of ``hashes`` it holds."""
        here = [self._shown] * len(Tier)
        ends: list[dict[int, int]] = [{} for _ in Tier]
        before: int | None = 0
        for position, number in enumerate(map(self._numbers.get, hashes)):
            if number == before and position:
                continue
            before = number
            device, host, storage = _NOBODY if number is None else self._holders[number]
            for tier, holding in enumerate((device, device | host, device | host | storage)):
                gone = here[tier] & ~holding
                if gone:
                    here[tier] &= holding
                    _note(ends[tier], gone, position)
            if not here[Tier.STORAGE]:
                break
        for tier in Tier:
            _note(ends[tier], here[tier], len(hashes))
        return {
            cache: Match(ends[Tier.DEVICE][slot], ends[Tier.HOST][slot], longest)
            for slot, longest in ends[Tier.STORAGE].items()
            if longest and (cache := self._caches[slot]) is not None
        }

    def number_of(self, holders: Holders) -> int:
        """The number of a set of holders, made where it is new. For CachedBlocks."""
        number = self._number_of.get(holders)
        if number is None:
            number = self._number_of[holders] = len(self._holders)
            self._holders.append(holders)
        return number

    def tables(self) -> tuple[dict[int, int], list[Holders]]:
        """Blocks -> numbers, and numbers -> holders. For CachedBlocks."""
        return self._numbers, self._holders

    def show(self, slot: int, instead_of: int | None) -> None:
        """From now on ``score`` sees this cache and not the other. For CachedBlocks."""
        self._shown |= 1 << slot
        if instead_of is not None:
            self._shown &= ~(1 << instead_of)

    def empty(self, slot: int, blocks: int) -> None:
        """Nothing is in this cache any more: the sets lose it, and the blocks stay as they are. For CachedBlocks."""
        if not blocks:
            return
        others = ~(1 << slot)
        for number, (device, host, storage) in enumerate(self._holders):
            self._holders[number] = (device & others, host & others, storage & others)
        self._number_of = {}
        for number, holders in enumerate(self._holders):
            self._number_of.setdefault(holders, number)
        self._forget_steps()
        self._garbage += blocks
        if self._garbage > max(LEAST_GARBAGE, len(self._numbers) // 2):
            self._sweep()

    def tidy(self) -> None:
        """Sets that no block has any more are forgotten now and then. For CachedBlocks, between two events."""
        if len(self._holders) > self._sweep_at:
            self._sweep()

    def free(self, slot: int) -> None:
        """The room is for another cache. For CachedBlocks."""
        self._shown &= ~(1 << slot)
        self._caches[slot] = None

    def _sweep(self) -> None:
        """Forgets blocks that nobody holds and sets that no block has."""
        before = self._holders
        self._holders, self._number_of = [_NOBODY], {_NOBODY: 0}
        self._numbers = {
            block: self.number_of(before[number])
            for block, number in self._numbers.items()
            if before[number] != _NOBODY
        }
        self._garbage = 0
        self._sweep_at = max(2 * len(self._holders), len(self._numbers) // 4) + LEAST_GARBAGE
        self._forget_steps()

    def _forget_steps(self) -> None:
        for cache in self._caches:
            if cache is not None:
                cache.forget_steps()


class CachedBlocks:
    """The contents of one cache: what its events said so far.

    A block that is stored twice is there until it is removed twice (engines keep several copies); what is removed and
    was not there is left alone.
    """

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self._index = index
        self._slot = slot
        self._counts = [0] * len(Tier)
        self._copies: list[dict[int, int]] = [{} for _ in Tier]
        # Number of a set of holders -> number of the same with us, and without us, for each tier.
        self._with: list[dict[int, int]] = [{} for _ in Tier]
        self._without: list[dict[int, int]] = [{} for _ in Tier]

    def __len__(self) -> int:
        """Placements: a block in two tiers counts twice."""
        return sum(self._counts)

    def count(self, tier: Tier) -> int:
        """Different blocks in a tier."""
        return self._counts[tier]

    def stored(self, tier: Tier, hashes: Iterable[int], appeared: Callable[[int], object] | None = None) -> None:
        """Blocks came into a tier; ``appeared`` is called for each that was not there."""
        numbers, _ = self._index.tables()
        steps, copies, count = self._with[tier], self._copies[tier], 0
        for block in hashes:
            before = numbers.get(block, 0)
            after = steps.get(before)
            if after is None:
                after = steps[before] = self._step(before, tier, present=True)
            if after == before:
                copies[block] = copies.get(block, 1) + 1
                continue
            numbers[block] = after
            count += 1
            if appeared is not None:
                appeared(block)
        self._counts[tier] += count
        self._index.tidy()

    def removed(self, tier: Tier, hashes: Iterable[int], vanished: Callable[[int], object] | None = None) -> None:
        """Blocks left a tier; ``vanished`` is called for each of which it was the last copy there."""
        numbers, _ = self._index.tables()
        steps, copies, count = self._without[tier], self._copies[tier], 0
        for block in hashes:
            before = numbers.get(block, 0)
            after = steps.get(before)
            if after is None:
                after = steps[before] = self._step(before, tier, present=False)
            if after == before:
                continue
            if block in copies:
                copies[block] -= 1
                if copies[block] == 1:
                    del copies[block]
                continue
            if after:
                numbers[block] = after
            else:
                del numbers[block]
            count += 1
            if vanished is not None:
                vanished(block)
        self._counts[tier] -= count
        self._index.tidy()

    def cleared(self) -> None:
        """Nothing is cached any more, in any tier."""
        self._index.empty(self._slot, len(self))
        self._counts = [0] * len(Tier)
        self._copies = [{} for _ in Tier]
        self.forget_steps()

    def show(self, instead_of: CachedBlocks | None = None) -> None:
        """From now on the index answers with this, in one step in place of the other, which is dropped."""
        self._index.show(self._slot, None if instead_of is None else instead_of._slot)
        if instead_of is not None:
            instead_of.drop()

    def drop(self) -> None:
        """Takes it out of the index. It must not be used afterwards."""
        self.cleared()
        self._index.free(self._slot)

    def tiers_of(self, block: int) -> frozenset[Tier]:
        """Where the block is in this cache."""
        numbers, holders = self._index.tables()
        planes = holders[numbers.get(block, 0)]
        return frozenset(tier for tier in Tier if planes[tier] >> self._slot & 1)

    def forget_steps(self) -> None:
        """Sets of holders got other numbers. For PrefixIndex."""
        for steps in (*self._with, *self._without):
            steps.clear()

    def _step(self, number: int, tier: Tier, *, present: bool) -> int:
        """The number of the set that has us in the tier or not; the same number where it is so already."""
        _, holders = self._index.tables()
        planes, bit = list(holders[number]), 1 << self._slot
        if bool(planes[tier] & bit) == present:
            return number
        planes[tier] ^= bit
        return self._index.number_of((planes[0], planes[1], planes[2]))


def _note(ends: dict[int, int], slots: int, position: int) -> None:
    while slots:
        lowest = slots & -slots
        ends[lowest.bit_length() - 1] = position
        slots ^= lowest
