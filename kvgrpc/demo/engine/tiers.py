"""The hierarchical cache of the demo's decode rank: a finished conversation goes to storage, and comes back to go
on."""

from __future__ import annotations

import time

import torch

from kvgrpc.demo.engine.config import EngineConfig
from kvgrpc.demo.engine.engine import DemoEngine
from kvgrpc.demo.protocol import Offload, Offloaded, Open, Resume, Resumed
from kvgrpc.hashing import page_hashes
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.model import NotEnoughPages, PrefetchLimits
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.tree.keeper import CompletionQueue

SECONDS = 20.0


def config_of(config: EngineConfig, engine: DemoEngine, wanted: Open) -> PrefetchConfig:
    """The engine's own pages as device tier, as many on the host, and the storage that is wanted, if any.

    The engine keeps its own prefix cache, so it uses the controller and the copies alone.
    """
    model = config.model
    shape = PageShape.mha(model.layers, config.page_tokens, model.kv_heads, model.head_dim, "float32")
    names = [(layer, component) for layer in range(model.layers) for component in "kv"]
    device = DevicePool(shape, config.pages, {name: engine.memory.region(*name) for name in names})
    return PrefetchConfig(
        model="demo-llama",
        shape=shape,
        host_pages=config.pages,
        device=device,
        own_radix_cache=True,
        storage=wanted.storage or None,
        storage_config=wanted.storage_config if wanted.storage else None,
        limits=PrefetchLimits(threshold_tokens=config.page_tokens, occupancy=1.0),
    )


class Tiers:
    """Device pages to storage and back, for the thread that owns the engine. Blocks: the engine does nothing else
    then."""

    def __init__(self, engine: DemoEngine, prefetch: PrefetchManager) -> None:
        assert prefetch.copies is not None and isinstance(prefetch.controller.keeper, CompletionQueue)
        self._engine = engine
        self._controller = prefetch.controller
        self._copies = prefetch.copies
        self._landed = prefetch.controller.keeper

    def offload(self, order: Offload) -> Offloaded:
        """Writes the cached pages of a prompt to host and storage, and drops them from both device and host."""
        began = time.monotonic()
        engine = self._engine
        pages = engine.cache.match(order.prompt)
        hashes = self._hashes(order.prompt)[: len(pages)]
        host = self._copies.write(pages)
        assert not isinstance(host, NotEnoughPages) and self._copies.wait_idle(SECONDS)
        copied = time.monotonic()
        operation = self._controller.write_storage(hashes, host)
        assert operation.wait(SECONDS)
        stored = time.monotonic()
        self._copies.evict_host(host)
        engine.pages.release(pages)
        engine.cache.clear()
        # Whoever took these bytes for the prompt's would answer nonsense.
        for layer in range(engine.config.model.layers):
            for component in "kv":
                engine.memory.region(layer, component)[torch.tensor(pages)] = torch.nan
        return Offloaded(len(pages), operation.completed, operation.nbytes, copied - began, stored - copied)

    def resume(self, order: Resume) -> Resumed:
        """Loads what was prefetched, computes the rest of the prompt meanwhile layer by layer, and answers again."""
        began = time.monotonic()
        engine = self._engine
        landed = self._landed.take()
        pages = engine.take_pages(sum(len(each.pages) for each in landed))
        done = 0
        for each in landed:
            part = torch.tensor(pages[done : done + len(each.pages)]).numpy()
            self._copies.load(each.pages, device_pages=part)
            done += len(each.pages)
        signal = self._copies.start_loading()
        engine.cache.insert(order.prompt[: done * engine.config.page_tokens], pages)
        engine.pages.release(pages)
        if signal is not None:
            engine.memory.before_layer = lambda layer: signal.wait(layer, SECONDS)
        run = engine.admit_to_compute(order.prompt)
        extra = engine.config.pages_for(len(order.prompt) + order.answer_tokens) - len(run.pages)
        run.pages += engine.take_pages(max(0, extra))
        tokens = []
        while not run.prompt_computed:
            token = engine.compute_chunk(run)
        tokens.append(token)
        first = time.monotonic()
        engine.memory.before_layer = None
        while len(tokens) < order.answer_tokens:
            tokens.append(engine.compute_token(run, tokens[-1]))
        engine.release(run)
        assert self._copies.wait_idle(SECONDS)
        for each in landed:
            self._copies.evict_host(each.pages)
        return Resumed(tokens, done, run.reused, first - began)

    def _hashes(self, prompt: list[int]) -> list[str]:
        size = self._engine.config.page_tokens
        whole = len(prompt) // size * size
        return [each.hex() for each in page_hashes(prompt[:whole], size)]
