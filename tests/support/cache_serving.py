"""A real rank with a hierarchical cache on a real file backend, without torch: pages go in through the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvgrpc.dataplane
from kvgrpc.client import SyncClient
from kvgrpc.hashing import page_hashes, storage_seed
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.model import NotEnoughPages, OperationKind, PrefetchLimits
from kvgrpc.prefetch.pools.host import Bytes
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.server import Rank, RankConfig, open_rank
from kvgrpc.v1 import prefetch_service_pb2 as pb

PAGE_TOKENS = 4
SHAPE = PageShape.mha(layers=3, page_tokens=PAGE_TOKENS, heads=2, head_dim=8, dtype="float16")
# As large a page, the same bytes at every tensor-parallel rank.
REPLICATED = PageShape.mla(layers=3, page_tokens=PAGE_TOKENS, latent_dim=32, dtype="float16")
LIMITS = PrefetchLimits(threshold_tokens=PAGE_TOKENS, batch_pages=4, storage_timeout=5.0)


def prompt(pages: int, first: int = 0) -> list[int]:
    return list(range(first * 1000, first * 1000 + pages * PAGE_TOKENS))


def hashes_of(tokens: Sequence[int], extra_key: str | None = None) -> list[str]:
    return [each.hex() for each in page_hashes(tokens, PAGE_TOKENS, after=storage_seed(extra_key))]


def bytes_of(page_hash: str) -> Bytes:
    """What the page with this hash holds in every test: no two pages alike."""
    return np.random.default_rng(int(page_hash[:16], 16)).integers(0, 256, SHAPE.page_bytes, dtype=np.uint8)


@dataclass
class CacheRank:
    """A rank with a cache, and ways to put pages on its host and look at them."""

    rank: Rank[Any]
    plane: Any

    @property
    def manager(self) -> PrefetchManager:
        assert self.rank.prefetch is not None
        return self.rank.prefetch

    @property
    def address(self) -> str:
        return self.rank.address

    def fill(self, hashes: Sequence[str], extra_key: str = "") -> None:
        """The host has these pages, as if an engine had written them."""
        manager = self.manager
        pages = manager.host.table.take(len(hashes))
        assert not isinstance(pages, NotEnoughPages)
        for page, each in zip(pages, hashes, strict=True):
            manager.host.set_flat(int(page), bytes_of(each))
        manager.host.table.commit(pages)
        manager.known_cache().keep(hashes, 0, pages, extra_key)

    def back_up(self, hashes: Sequence[str]) -> Operation:
        """This rank's own write of pages that its host has, as a write policy begins it; other ranks are not asked."""
        controller = self.manager.controller
        order = Order(kind=OperationKind.BACKUP, hashes=tuple(hashes))
        return controller.start_backup(order, self.manager.known_cache().pages_of(hashes))

    def start(self, kind: OperationKind, hashes: Sequence[str], extra_key: str = "") -> Operation:
        """At all ranks of the replica, as a remote client starts it."""
        return self.manager.start(Order(kind=kind, hashes=tuple(hashes), extra_key=extra_key))

    def evict(self) -> int:
        return self.manager.known_cache().evict_host(self.manager.host.pages)

    def assert_bytes(self, hashes: Sequence[str]) -> None:
        """The host has all of them, with the right bytes."""
        manager = self.manager
        pages = manager.known_cache().pages_of(hashes)
        try:
            assert len(pages) == len(hashes)
            for page, each in zip(pages, hashes, strict=True):
                assert (manager.host.flat(int(page)) == bytes_of(each)).all()
        finally:
            manager.host.table.end_read(pages)

    def store(self, hashes: Sequence[str], extra_key: str = "") -> None:
        """Storage has these pages, and nothing else has."""
        self.fill(hashes, extra_key)
        operation = self.start(OperationKind.BACKUP, hashes, extra_key)
        assert operation.wait(20)
        self.evict()

    def close(self) -> None:
        self.rank.close(5.0)
        self.plane.close(1.0)


def open_cache_rank(path: Path, storage: Any = "file", **changes: Any) -> CacheRank:
    """``around``: makes of a data plane the one that hand-offs use."""
    around = changes.pop("around", lambda plane: plane)
    plane = around(kvgrpc.dataplane.open_plane(changes.pop("plane_name", "shm")))
    pool = Pool("kv", PoolKind.KV, 16, 8, "x", (Region(0, "kv", plane.allocate(8 * 4096), 4096, 4096),))
    config = {key: changes.pop(key) for key in list(changes) if key not in _PREFETCH}
    settings = {"model": "test/model", "shape": SHAPE, "host_pages": 64, "limits": LIMITS, **changes}
    if storage == "file":
        settings["storage_config"] = {"path": str(path)}
    prefetch = PrefetchConfig(storage=storage, **settings)
    settings = {
        "engine": "E",
        "role": Role.PREFILL,
        "pools": (pool,),
        "data_plane": plane,
        "prefetch": prefetch,
        **config,
    }
    return CacheRank(open_rank(RankConfig(**settings)), plane)


_PREFETCH = set(PrefetchConfig.__dataclass_fields__)


def ended(client: SyncClient, operation: pb.CacheOperation) -> pb.CacheOperation:
    """The operation in its last state."""
    for message in client.watch_operations([operation.operation_id]):
        for each in message.operations:
            operation = each
    assert operation.quiescent
    return operation
