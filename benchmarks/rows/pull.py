"""pull.*: pages of another engine's host cache, from the prefetch that wants them until they lie in the own one.

The baseline moves the same bytes by the bare data plane: no question, no copies on either side, no room.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.harness.plan import KIB, Plan
from benchmarks.harness.rounds import Benchmark, Contender, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows.dataplane import RawCopy, RawMooncake
from benchmarks.sides.memory import Shape

LATENCY = "pull.latency"
PAGE_BYTES = 32 * KIB
# 16 tokens of a model of eight billion parameters have twice as much.
LARGE_PAGES, LARGE_PAGE_BYTES = 100, 1024 * KIB
SECONDS = 120.0
RANK, SERVER = "rank", "registry"


def benchmarks(plan: Plan) -> list[Benchmark]:
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    sizes = [(f"{pages}", pages, PAGE_BYTES) for pages in plan.pull_pages]
    sizes += [(f"{LARGE_PAGES}x1MiB", LARGE_PAGES, LARGE_PAGE_BYTES)] if LARGE_PAGES in plan.pull_pages else []
    return [
        row
        for size, pages, page_bytes in sizes
        for row in (
            _row(f"shm.{size}", pages, page_bytes, "raw memcpy", RawCopy, ""),
            _row(f"mooncake.{size}", pages, page_bytes, "raw Mooncake", RawMooncake, missing),
        )
    ]


def _row(
    size: str,
    pages: int,
    page_bytes: int,
    baseline: str,
    raw: Callable[[str, Shape, int], Contender],
    missing: str,
) -> Benchmark:
    name, plane = f"{LATENCY}.{size}", size.partition(".")[0]
    shape = Shape(regions=1, pages=pages, page_bytes=page_bytes, aux_items=1)
    target = Target(ratio=0.8) if pages >= 100 else Target()
    return Benchmark(
        metrics=(Metric(name, "GB/s", "higher", baseline, target),),
        ours=lambda: Pulled(name, plane, pages, page_bytes),
        baseline=lambda: raw(name, shape, 1),
        missing=missing,
    )


class Pulled:
    """A rank that has the prompt, one that has nothing, and the registry by which they know each other."""

    def __init__(self, name: str, plane: str, pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self._name, self._pages, self._page_bytes = name, pages, page_bytes
        self._registry, self._holder, self._taker = Worker("pull-registry"), Worker("pull-holder"), Worker("pull-taker")
        registry = self._registry.call(_serve)
        for worker, engine in ((self._holder, "holder"), (self._taker, "taker")):
            worker.call(_open, engine, registry, plane, pages, page_bytes)
        self._holder.call(_fill, pages)
        self._taker.call(_until_known)

    def turn(self) -> Figures:
        return {self._name: self._pages * self._page_bytes / self._taker.call(_pull, self._pages) / 1e9}

    def peak_rss(self) -> int:
        return self._holder.peak_rss() + self._taker.peak_rss()

    def close(self) -> None:
        for worker in (self._taker, self._holder):
            worker.call(_close)
        for worker in (self._taker, self._holder, self._registry):
            worker.close()


def _serve(desk: Desk) -> str:
    from kvgrpc.server import RegistryServer

    desk.items[SERVER] = server = RegistryServer(["127.0.0.1:0"]).open()
    return server.address


def _open(desk: Desk, engine: str, registry: str, plane: str, pages: int, page_bytes: int) -> None:
    from kvgrpc.prefetch.model import PrefetchLimits
    from kvgrpc.prefetch.pools.shape import PageShape
    from kvgrpc.pull.model import PullConfig
    from tests.support import cache_serving

    a_layer = PageShape.mha(layers=1, page_tokens=cache_serving.PAGE_TOKENS, heads=8, head_dim=64, dtype="float16")
    layers = page_bytes // a_layer.page_bytes
    shape = PageShape.mha(layers=layers, page_tokens=cache_serving.PAGE_TOKENS, heads=8, head_dim=64, dtype="float16")
    assert shape.page_bytes == page_bytes
    cache_serving.SHAPE = shape
    # What an engine has unless it says otherwise, but for the time that a turn may take.
    limits = replace(PrefetchLimits(), threshold_tokens=1, occupancy=1.0, operation_timeout=SECONDS)
    desk.items[RANK] = cache_serving.open_cache_rank(
        Path(tempfile.gettempdir()),
        storage=None,
        plane_name=plane,
        engine=engine,
        registry=registry,
        shape=shape,
        host_pages=pages + 16,
        limits=replace(limits, storage_timeout=SECONDS),
        pull=PullConfig(),
    )


def _hashes(pages: int) -> list[str]:
    from tests.support.cache_serving import hashes_of, prompt

    return hashes_of(prompt(pages))


def _fill(desk: Desk, pages: int) -> None:
    desk.items[RANK].fill(_hashes(pages))


def _until_known(desk: Desk) -> None:
    holders, end = desk.items[RANK].rank._parts.cache_peer._holders, time.monotonic() + 20.0
    while not holders.candidates():
        assert time.monotonic() < end, "the taker does not know the holder"
        time.sleep(0.01)  # until the registry's word has come


def _pull(desk: Desk, pages: int) -> float:
    from kvgrpc.prefetch.model import OperationKind

    rank: Any = desk.items[RANK]
    hashes = _hashes(pages)
    began = time.perf_counter()
    operation = rank.start(OperationKind.PREFETCH, hashes)
    assert operation.wait(SECONDS)
    seconds = time.perf_counter() - began
    row = rank.manager.controller.book.row(operation)
    if row.completed != pages:
        raise AssertionError(f"{row.completed} of {pages} pages came: {row.failure or row.stop}")
    rank.assert_bytes(hashes)
    assert rank.evict() == pages
    return seconds


def _close(desk: Desk) -> None:
    desk.items[RANK].close()
