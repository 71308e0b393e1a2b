"""A whole engine without a model: three tiers of real memory, where a page's bytes follow from its hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.copies.paths import IoBackend
from kvgrpc.prefetch.model import NotEnoughPages, PrefetchLimits, WritePolicy
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.prefetch.runtime.controller import CacheController
from kvgrpc.prefetch.tree.cache import TieredCache
from tests.support.faults.storage import FaultyBackend, memory_backend

SHAPE = PageShape.mha(2, 4, 1, 8, "float16")
SECONDS = 20.0


def content(page_hash: str) -> Any:
    """The bytes of a page, component after component of each layer."""
    return np.random.default_rng(list(page_hash.encode())).integers(0, 256, SHAPE.page_bytes, dtype=np.uint8)


@dataclass
class Engine:
    """An engine that computes nothing: a page's bytes follow from its hash."""

    policy: WritePolicy
    device_pages: int = 24
    host_pages: int = 40
    storage: FaultyBackend = field(default_factory=lambda: FaultyBackend(memory_backend()))
    limits: PrefetchLimits = field(default_factory=lambda: PrefetchLimits(threshold_tokens=4, batch_pages=4))
    loaded: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        host = HostPool(SHAPE, self.host_pages, HostLayout.PAGE_FIRST_DIRECT)
        self.cache = TieredCache(host, write_policy=self.policy)
        device = DevicePool.allocate(SHAPE, self.device_pages)
        self.copies = CopyEngine(device, host, backend=IoBackend.DIRECT, on_ack=self.cache.on_ack)
        self.cache.copies = self.copies
        self.controller = CacheController(
            host, self.storage, lambda page_hash, extra_key: page_hash, keeper=self.cache, limits=self.limits
        )
        self.cache.attach(self.controller)

    def rows(self) -> list[torch.Tensor]:
        return [self.copies.device.rows(layer, name) for layer in range(SHAPE.layers) for name in "kv"]

    def compute(self, page: int, page_hash: str) -> None:
        data, start = torch.from_numpy(content(page_hash)), 0
        for rows in self.rows():
            rows[page] = data[start : start + rows.shape[1]]
            start += rows.shape[1]

    def check(self, page: int, page_hash: str) -> None:
        there = np.concatenate([rows[page].numpy() for rows in self.rows()])
        assert (there == content(page_hash)).all(), page_hash

    def request(self, hashes: list[str]) -> None:
        """One request from its match to its end."""
        held = self.cache.match(hashes)
        loaded = self.cache.load(held)
        pages = list(held.device)
        if not isinstance(loaded, NotEnoughPages):
            signal = self.cache.start_loading()
            if signal is not None:
                signal.wait(SHAPE.layers - 1, SECONDS)
            pages += loaded.tolist()
            self.loaded += len(loaded)
        for page, page_hash in zip(pages, hashes, strict=False):
            self.check(page, page_hash)
        fresh = self.cache.take_device(len(hashes) - len(pages))
        if not isinstance(fresh, NotEnoughPages):
            for page, page_hash in zip(fresh, hashes[len(pages) :], strict=True):
                self.compute(int(page), page_hash)
            self.computed += len(fresh)
            # A load's pages are the cache's when its ack has come.
            assert self.copies.wait_idle(SECONDS)
            self.cache.insert(hashes, [*pages, *fresh.tolist()])
        assert self.copies.wait_idle(SECONDS)
        self.cache.release(held)

    def close(self) -> None:
        assert self.controller.close(SECONDS) and self.copies.close(SECONDS)
        self.cache.clear()
        for table in (self.copies.device.table, self.copies.host.table):
            assert table.counts() == {"free": table.pages, "reserved": 0, "present": 0, "read": 0}
