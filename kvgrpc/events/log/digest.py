"""The contents of a cache in a few numbers, so that a follower and its publisher can compare. Pure.

For each tier and group: how many distinct blocks there are, and the sum of a 64-bit mix of their hashes, each as often
as the cache has copies of the block. docs/events.md has the formula and vectors.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MASK = 2**64 - 1
DEVICE = "GPU"

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CAPITALS = str.maketrans(string.ascii_lowercase, string.ascii_uppercase)
# Under load a publisher's digest is older than what its readers have by then: both keep those of multiples of this.
CHECKPOINT_BATCHES = 64
# A cache holds blocks in so many tiers and groups at most, whose names have so many bytes at most (engines have a dozen
# groups and five tiers): what names another one is passed over by every reader.
MAX_PLACES = 1024
MAX_MEDIUM_BYTES = 128
# Above it numpy's own cost no longer matters, and the memory of what waits does not yet.
_MIXED_TOGETHER = 4096


@dataclass(frozen=True, slots=True)
class TierDigest:
    """One tier and group: ``blocks`` distinct hashes, ``mixed_hashes`` the sum of ``mix`` of each copy, modulo 2^64."""

    medium: str
    group: int
    blocks: int
    mixed_hashes: int


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state after all batches before ``next_sequence``; tiers without a block are left out, the others in order.

    ``doubtful``: an event came that may have been a removal and that its publisher cannot read. It is not compared:
    whoever passes over the same event comes to the same numbers.
    """

    next_sequence: int
    tiers: tuple[TierDigest, ...] = ()
    doubtful: bool = field(default=False, compare=False)


def hash_key(block_hash: int | bytes) -> int:
    """The 64 bits that identify a block: an integer modulo 2^64, a digest's last eight bytes, big-endian."""
    if isinstance(block_hash, int):
        return block_hash & MASK
    return int.from_bytes(block_hash[-8:], "big")


def medium_key(medium: str | None) -> str:
    """The name under which a tier is counted: a to z in capitals, "GPU" where the engine named none."""
    return medium.translate(_CAPITALS) if medium else DEVICE


def mix(key: int) -> int:
    """The finalizer of splitmix64: 64 bits that all depend on each bit of ``key``."""
    value = (key + _STEP) & MASK
    value = ((value ^ (value >> 30)) * _FIRST) & MASK
    value = ((value ^ (value >> 27)) * _SECOND) & MASK
    return value ^ (value >> 31)


def mix_all(keys: Sequence[int]) -> int:
    """The sum of ``mix`` of each, modulo 2^64."""
    value = np.array(keys, dtype=np.uint64)
    value += np.uint64(_STEP)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    return int(np.add.reduce(value ^ (value >> np.uint64(31)), dtype=np.uint64, initial=np.uint64(0)))


class DigestCounter:
    """Keeps the digest of a set of blocks that changes. Not thread-safe."""

    def __init__(self) -> None:
        self._tiers: dict[tuple[str, int], _Tier] = {}

    def add(self, medium: str, group: int, keys: Sequence[int], blocks: int) -> None:
        """A copy of each key came; ``blocks`` of them were not there. ``medium`` as ``medium_key`` gives it."""
        if keys:
            self._tier(medium, group).add(keys, blocks)

    def remove(self, medium: str, group: int, keys: Sequence[int], blocks: int) -> None:
        """A copy of each key, which was there, went; of ``blocks`` of them it was the last."""
        if keys:
            tier = self._tiers[medium, group]
            tier.remove(keys, blocks)
            if not tier.blocks:
                del self._tiers[medium, group]

    def holds(self, medium: str, group: int) -> bool:
        """True if a block is there."""
        return (medium, group) in self._tiers

    def admits(self, medium: str, group: int) -> bool:
        """True if blocks may come there: not into one place more than MAX_PLACES, nor into one with a longer name."""
        if (medium, group) in self._tiers:
            return True
        # Characters have four bytes at most.
        short = len(medium) <= MAX_MEDIUM_BYTES // 4 or len(medium.encode()) <= MAX_MEDIUM_BYTES
        return short and len(self._tiers) < MAX_PLACES

    def clear(self, medium: str | None = None) -> None:
        """Nothing is there any more; of one medium, in any group."""
        self._tiers = {} if medium is None else {key: tier for key, tier in self._tiers.items() if key[0] != medium}

    def digest(self, next_sequence: int, *, doubtful: bool = False) -> StateDigest:
        """The digest as it stands."""
        ordered = sorted(self._tiers.items())
        return StateDigest(
            next_sequence,
            tuple(TierDigest(*names, tier.blocks, tier.mixed()) for names, tier in ordered),
            doubtful,
        )

    def _tier(self, medium: str, group: int) -> _Tier:
        tier = self._tiers.get((medium, group))
        if tier is None:
            tier = self._tiers[medium, group] = _Tier()
        return tier


class _Tier:
    """Keys wait until there are many: mixing a thousand together costs little more than mixing one."""

    __slots__ = ("_came", "_mixed", "_went", "blocks")

    def __init__(self) -> None:
        self.blocks = 0
        self._mixed = 0
        self._came: list[int] = []
        self._went: list[int] = []

    def add(self, keys: Sequence[int], blocks: int) -> None:
        self.blocks += blocks
        self._came.extend(keys)
        if len(self._came) >= _MIXED_TOGETHER:
            self.mixed()

    def remove(self, keys: Sequence[int], blocks: int) -> None:
        self.blocks -= blocks
        self._went.extend(keys)
        if len(self._went) >= _MIXED_TOGETHER:
            self.mixed()

    def mixed(self) -> int:
        if self._came or self._went:
            self._mixed = (self._mixed + mix_all(self._came) - mix_all(self._went)) & MASK
            self._came.clear()
            self._went.clear()
        return self._mixed
