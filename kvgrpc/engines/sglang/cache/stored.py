"""Answers PrefetchService about SGLang's third tier beside SGLang's own threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.errors import FeatureDisabled
from kvgrpc.model import Tier
from kvgrpc.prefetch.model import TierUse
from kvgrpc.prefetch.storage.base import StorageBackend, StorageDown
from kvgrpc.prefetch.storage.keys import Keys
from kvgrpc.pull.taking.peers import PeersBackend


class StoredPages:
    """A storage backend of kvgrpc's, and the names of one rank's pages there. Thread-safe."""

    def __init__(self, backend: StorageBackend, keys: Keys, page_bytes: int) -> None:
        self.name = backend.name
        self._backend = backend
        self._keys = keys
        self._page_bytes = page_bytes
        identity = keys.identity
        ranks = [identity.tp_rank] if identity.replicated else range(identity.tp_size)
        self._of_ranks = [Keys(keys.mode, replace(identity, tp_rank=rank)) for rank in ranks]

    def leading_at_all_ranks(self, hashes: Sequence[str], timeout: float) -> int:
        """Leading pages that are there for every tensor-parallel rank; of those that peers have this rank knows its own
        share, and each asks for its own when it comes to that. Raises StorageDown where peers have none either."""
        end = time.monotonic() + timeout
        near = 0
        if isinstance(self._backend, PeersBackend):
            near = self._backend.count_peers(self._keys.of_all(hashes), timeout)
        there = len(hashes)
        try:
            for keys in self._of_ranks:
                if there > near:
                    left = max(0.001, end - time.monotonic())
                    there = near + self._count_stored(keys.of_all(hashes[near:there]), left)
        except StorageDown:
            if not near:
                raise
            return near
        return there

    def _count_stored(self, names: Sequence[str], timeout: float) -> int:
        backend = self._backend
        if isinstance(backend, PeersBackend):
            return backend.count_stored(names, timeout)
        return backend.count_leading(names, timeout)

    def purge(self, timeout: float, *, dry_run: bool) -> int | None:
        """Drops this rank's pages, or counts them; None: it cannot count. Raises FeatureDisabled, StorageDown."""
        prefix = self._keys.prefix
        if prefix is None:
            remedy = "key_mode kvgrpc, or empty the store itself"
            raise FeatureDisabled(
                f"keys of the mode {self._keys.mode.value!r} do not tell whose pages they name: {remedy}",
                metadata={"feature": "purge of storage", "howToEnable": remedy},
            )
        return self._backend.count(prefix, timeout) if dry_run else self._backend.clear(prefix, timeout)

    @property
    def healthy(self) -> tuple[bool, str]:
        """True if it answers, and else why not."""
        stats = self._backend.stats()
        return stats.healthy, stats.detail

    def use(self) -> TierUse:
        stats = self._backend.stats()
        names = ("hits", "misses", "written", "failed", "timeouts", "evicted", "in_use")
        counts = {name: int(getattr(stats, name)) for name in names}
        most = (stats.capacity or 0) // self._page_bytes
        return TierUse(Tier.STORAGE, most, stats.pages or 0, 0, self._page_bytes, counts)
