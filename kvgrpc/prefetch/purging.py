"""Drops the pages of one cache that nobody uses, from every tier, or counts what would go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from kvgrpc.errors import FeatureDisabled
from kvgrpc.model import Tier
from kvgrpc.prefetch.model import Purged
from kvgrpc.prefetch.runtime.controller import CacheController
from kvgrpc.prefetch.storage.base import StorageBackend, StorageDown
from kvgrpc.prefetch.storage.keys import Keys
from kvgrpc.prefetch.tree.cache import TieredCache

_DELETED_AT_ONCE = 1024
# The rest is for what clears a whole prefix, which may be one quick call.
_PART_FOR_KNOWN_PAGES = 0.25


class Purger:
    """Of one rank. ``cache`` None: the engine keeps its own radix cache, and its pages.

    ``told``: hears the hashes that storage does not have any more; ``tells_of_clears``: the backend does not say what a
    ``clear`` drops, and somebody wants to hear it.
    """

    def __init__(
        self,
        cache: TieredCache | None,
        controller: CacheController,
        keys: Keys,
        told: Callable[[Sequence[str]], None],
        tells_of_clears: bool,
    ) -> None:
        self._cache = cache
        self._controller = controller
        self._keys = keys
        self._told = told
        self._tells_of_clears = tells_of_clears

    def purge(self, tiers: Sequence[Tier], extra_key: str | None, *, dry_run: bool, timeout: float) -> Purged:
        """Drops what nobody uses, or counts it. Blocks for about ``timeout`` seconds.

        Of storage the pages of this namespace go, whoever wrote them; with an ``extra_key`` that the keys do not tell,
        those that device and host know. Where the keys do tell it, these go first: storage may hold more than one call
        comes to. Raises FeatureDisabled, StorageDown.
        """
        storage = self._controller.storage if Tier.STORAGE in tiers else None
        prefix = None if storage is None else self._prefix(extra_key)
        known_only = storage is not None and prefix is None
        if known_only or set(tiers) - {Tier.STORAGE}:
            known_cache(self._cache)
        # Before device and host forget them.
        deleted = not dry_run and storage is not None and (extra_key is not None or self._tells_of_clears)
        names = self._names(extra_key) if known_only or deleted else []
        near, kept = self._purge_near(tiers, extra_key, dry_run)
        far: int | None
        if storage is None:
            far = 0
        elif prefix is None:
            far = self._controller.present_in_storage(names, timeout) if dry_run else self._delete(names, timeout)
        elif dry_run:
            far = storage.count(prefix, timeout)
        else:
            far = self._clear(storage, prefix, names, extra_key, timeout)
        return Purged(near, far, kept, known_only)

    def _prefix(self, extra_key: str | None) -> str | None:
        if extra_key is not None:
            return self._keys.prefix_of(extra_key)
        if self._keys.prefix is None:
            raise FeatureDisabled(
                f"keys of the mode {self._keys.mode.value!r} do not tell this cache's pages from those of others",
                metadata={"feature": "purge of storage", "howToEnable": "key_mode 'kvgrpc', or empty the store itself"},
            )
        return self._keys.prefix

    def _names(self, extra_key: str | None) -> list[str]:
        if self._cache is None:
            return []
        both = self._cache.hashes(Tier.DEVICE, extra_key) + self._cache.hashes(Tier.HOST, extra_key)
        return list(dict.fromkeys(both))

    def _purge_near(self, tiers: Sequence[Tier], extra_key: str | None, dry_run: bool) -> tuple[dict[Tier, int], int]:
        cache = self._cache
        near: dict[Tier, int] = {}
        kept = 0
        if cache is not None:
            for tier in (Tier.DEVICE, Tier.HOST):
                if tier in tiers and (tier is Tier.HOST or cache.copies is not None):
                    hashes, stay = cache.purge(tier, extra_key, dry_run=dry_run)
                    near[tier], kept = len(hashes), kept + stay
        return near, kept

    def _delete(self, names: list[str], timeout: float) -> int:
        try:
            return self._controller.delete_from_storage(names, timeout)
        finally:
            # Also when storage did not answer: nobody knows which of them are there yet.
            self._told(names)

    def _clear(
        self, storage: StorageBackend, prefix: str, names: list[str], extra_key: str | None, timeout: float
    ) -> int:
        end, gone, untold = time.monotonic() + timeout, 0, names
        try:
            if extra_key is not None:
                gone, untold = self._delete_first(names, extra_key, timeout * _PART_FOR_KNOWN_PAGES)
            return gone + storage.clear(prefix, max(0.0, end - time.monotonic()))
        finally:
            if self._tells_of_clears:
                self._told(untold)

    def _delete_first(self, names: list[str], extra_key: str, timeout: float) -> tuple[int, list[str]]:
        """Deletes as many as the time is enough for; how many were there, and those that were not come to."""
        end, gone, done = time.monotonic() + timeout, 0, 0
        with contextlib.suppress(StorageDown):  # what clears the rest says so, too
            while done < len(names) and (left := end - time.monotonic()) > 0:
                part = names[done : done + _DELETED_AT_ONCE]
                try:
                    gone += self._controller.delete_from_storage(part, left, extra_key)
                finally:
                    done += len(part)
                    self._told(part)
        return gone, names[done:]


def known_cache(cache: TieredCache | None) -> TieredCache:
    """Raises FeatureDisabled where the engine has its own radix cache."""
    if cache is None:
        raise FeatureDisabled(
            "the engine keeps its own radix cache: purge and pin there",
            metadata={"feature": "prefix tree", "howToEnable": "own_radix_cache=False"},
        )
    return cache
