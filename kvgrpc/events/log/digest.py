"""What a cache holds in a few numbers, so that a follower and its publisher can compare. Pure.

For each tier and group: how many distinct blocks there are, and the exclusive or of a 64-bit mix of their hashes.
docs/events.md has the formula and vectors.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MASK = 2**64 - 1
DEVICE = "GPU"

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CAPITALS = str.maketrans(string.ascii_lowercase, string.ascii_uppercase)
# Above it numpy's own cost no longer matters, and the memory of what waits does not yet.
_MIXED_TOGETHER = 4096


@dataclass(frozen=True, slots=True)
class TierDigest:
    """One tier and group: ``blocks`` distinct hashes, ``mixed_hashes`` the exclusive or of ``mix`` of each."""

    medium: str
    group: int
    blocks: int
    mixed_hashes: int


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state after all batches before ``next_sequence``; tiers without a block are left out, the others in order."""

    next_sequence: int
    tiers: tuple[TierDigest, ...] = ()


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
    """The exclusive or of ``mix`` of each."""
    value = np.array(keys, dtype=np.uint64)
    value += np.uint64(_STEP)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    return int(np.bitwise_xor.reduce(value ^ (value >> np.uint64(31)), initial=np.uint64(0)))


class DigestCounter:
    """Keeps the digest of a set of blocks that changes. Not thread-safe."""

    def __init__(self) -> None:
        self._tiers: dict[tuple[str, int], _Tier] = {}

    def add(self, medium: str, group: int, keys: Iterable[int]) -> None:
        """These keys, which were not there, are now. ``medium`` as ``medium_key`` gives it."""
        self._tier(medium, group).change(keys, +1)

    def remove(self, medium: str, group: int, keys: Iterable[int]) -> None:
        """These keys, which were there, are not any more."""
        self._tier(medium, group).change(keys, -1)

    def clear(self) -> None:
        """Nothing is there any more."""
        self._tiers.clear()

    def digest(self, next_sequence: int) -> StateDigest:
        """The digest as it stands."""
        ordered = sorted(self._tiers.items())
        return StateDigest(
            next_sequence,
            tuple(TierDigest(*names, tier.blocks, tier.mixed()) for names, tier in ordered if tier.blocks),
        )

    def _tier(self, medium: str, group: int) -> _Tier:
        tier = self._tiers.get((medium, group))
        if tier is None:
            tier = self._tiers[medium, group] = _Tier()
        return tier


class _Tier:
    """Exclusive or undoes itself, so a key that comes and one that goes are mixed in alike."""

    __slots__ = ("_mixed", "_waiting", "blocks")

    def __init__(self) -> None:
        self.blocks = 0
        self._mixed = 0
        self._waiting: list[int] = []

    def change(self, keys: Iterable[int], sign: int) -> None:
        before = len(self._waiting)
        self._waiting.extend(keys)
        self.blocks += sign * (len(self._waiting) - before)
        if len(self._waiting) >= _MIXED_TOGETHER:
            self.mixed()

    def mixed(self) -> int:
        if self._waiting:
            self._mixed ^= mix_all(self._waiting)
            self._waiting.clear()
        return self._mixed
