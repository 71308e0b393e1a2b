"""pull.*: pages of another engine's host cache, from the prefetch that wants them until they lie in the own one.

The baseline moves the same bytes by the bare data plane: no question, no copies on either side, no room.
``limit.pull.copies.*``: what a pull over shared memory copies and nothing else, so the most that it can come to.
``limit.pull.mooncake.*``: a question, a copy, a write and a copy, one after the other, and none of our code.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.baselines.raw import BareMooncake, Descriptors, allocate_shared, copy
from benchmarks.harness.plan import KIB, MIB, Plan
from benchmarks.harness.rounds import Benchmark, Contender, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows.dataplane import RawCopy, RawMooncake
from benchmarks.sides.memory import Memory, Shape

LATENCY, COPIES, BARE = "pull.latency", "limit.pull.copies", "limit.pull.mooncake"
# Of a prefetch.
BATCH_PAGES = 128
PAGE_BYTES = 32 * KIB
# 16 tokens of a model of eight billion parameters have twice as much.
LARGE_PAGES, LARGE_PAGE_BYTES = 100, 1024 * KIB
SECONDS = 120.0
RANK, SERVER = "rank", "registry"
PLANE, STAGING, SOURCE, DESTINATION = "plane", "staging", "source", "destination"
ENGINE, CACHE, SERVICE = "engine", "cache", "service"
BARE_SERVICE, BARE_METHOD = "bench.Pages", "Write"


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
            _copies(size, pages, page_bytes),
            _bare(size, pages, page_bytes, missing),
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


def _copies(size: str, pages: int, page_bytes: int) -> Benchmark:
    name, shape = f"{COPIES}.{size}", Shape(regions=1, pages=pages, page_bytes=page_bytes, aux_items=1)
    return Benchmark(
        metrics=(Metric(name, "GB/s", "higher", "raw memcpy", Target()),),
        ours=lambda: Copied(name, pages, page_bytes),
        baseline=lambda: RawCopy(name, shape, 1),
    )


def _bare(size: str, pages: int, page_bytes: int, missing: str) -> Benchmark:
    name, shape = f"{BARE}.{size}", Shape(regions=1, pages=pages, page_bytes=page_bytes, aux_items=1)
    return Benchmark(
        metrics=(Metric(name, "GB/s", "higher", "raw Mooncake", Target()),),
        ours=lambda: BarePull(name, shape),
        baseline=lambda: RawMooncake(name, shape, 1),
        missing=missing,
    )


class Copied:
    """Each page three times in one process, a batch at a time: out of the cache, over the plane, into the cache."""

    def __init__(self, name: str, pages: int, page_bytes: int) -> None:
        self._name, self._nbytes = name, pages * page_bytes
        self._worker = Worker("pull-copies")
        self._worker.call(_open_caches, pages, page_bytes)

    def turn(self) -> Figures:
        return {self._name: self._nbytes / self._worker.call(_copy_thrice) / 1e9}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.call(_close_plane)
        self._worker.close()


class BarePull:
    """A question of bare gRPC; whoever is asked copies its pages into registered memory, has the bare engine write it,
    and answers; whoever asked copies them out."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._name, self._nbytes, self._generation = name, shape.region_bytes, 0
        self._holder, self._taker = Worker("bare-holder"), Worker("bare-taker")
        landing = self._taker.call(_open_bare, shape)
        self._holder.call(_open_bare, shape)
        self._taker.call(_dial_bare, self._holder.call(_serve_bare, *landing))

    def turn(self) -> Figures:
        self._generation += 1
        self._holder.call(_fill_bare, self._generation)
        return {self._name: self._nbytes / self._taker.call(_pull_bare, self._generation) / 1e9}

    def peak_rss(self) -> int:
        return self._holder.peak_rss() + self._taker.peak_rss()

    def close(self) -> None:
        self._taker.close()
        self._holder.close()


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


def _open_caches(desk: Desk, pages: int, page_bytes: int) -> None:
    from kvgrpc.dataplane import open_plane
    from kvgrpc.pull.staging import Staging

    desk.items[PLANE] = plane = open_plane("shm")
    desk.items[STAGING] = Staging(plane, 2 * BATCH_PAGES, page_bytes, 1, "float16")
    content = np.random.default_rng(1).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    desk.items[SOURCE], desk.items[DESTINATION] = content, np.zeros_like(content)


def _copy_thrice(desk: Desk) -> float:
    staging, source, destination = desk.items[STAGING], desk.items[SOURCE], desk.items[DESTINATION]
    pages, page_bytes = source.shape
    lent = staging.pool.regions[0].address
    landed = lent + BATCH_PAGES * page_bytes
    destination[:] = 0
    began = time.perf_counter()
    for first in range(0, pages, BATCH_PAGES):
        count = min(BATCH_PAGES, pages - first)
        staging.copy_in(range(count), _buffers(source, first, count))
        ctypes.memmove(landed, lent, count * page_bytes)  # as the plane does
        staging.copy_out(range(BATCH_PAGES, BATCH_PAGES + count), _buffers(destination, first, count))
    seconds = time.perf_counter() - began
    assert (destination == source).all()
    return seconds


def _buffers(cache: Any, first: int, count: int) -> Iterator[tuple[tuple[int, int]]]:
    page_bytes = cache.shape[1]
    for page in range(first, first + count):
        yield ((cache.ctypes.data + page * page_bytes, page_bytes),)


def _close_plane(desk: Desk) -> None:
    desk.items[STAGING].close(SECONDS)
    desk.items[PLANE].close(1.0)


def _open_bare(desk: Desk, shape: Shape) -> tuple[str, int]:
    desk.items[ENGINE] = engine = BareMooncake()
    desk.items[CACHE] = Memory(shape, lambda nbytes: allocate_shared(nbytes, desk.items.setdefault("maps", [])))
    desk.items[STAGING] = address = engine.allocate(shape.region_bytes)
    return engine.session, address


def _serve_bare(desk: Desk, session: str, landing: int) -> str:
    engine: BareMooncake = desk.items[ENGINE]
    cache, staging = desk.items[CACHE], desk.items[STAGING]
    nbytes = cache.shape.region_bytes

    def write(request: bytes, context: grpc.ServicerContext) -> bytes:
        copy(_in_pieces(cache.regions[0], staging, nbytes, cache.shape.page_bytes))
        engine.write(session, _in_pieces(staging, landing, nbytes, 8 * MIB))
        return b""

    handlers: dict[str, Any] = {BARE_METHOD: grpc.unary_unary_rpc_method_handler(write)}
    desk.items[SERVER] = server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(BARE_SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return f"127.0.0.1:{port}"


def _dial_bare(desk: Desk, address: str) -> None:
    channel = grpc.insecure_channel(address)
    ask: Callable[..., bytes] = channel.unary_unary(f"/{BARE_SERVICE}/{BARE_METHOD}")
    desk.items[SERVICE] = ask
    ask(b"", timeout=SECONDS)  # connects, and finds the fastest way to write


def _fill_bare(desk: Desk, generation: int) -> None:
    cache: Memory = desk.items[CACHE]
    cache.fill(generation, np.arange(cache.shape.pages))


def _pull_bare(desk: Desk, generation: int) -> float:
    cache: Memory = desk.items[CACHE]
    pages, nbytes = np.arange(cache.shape.pages), cache.shape.region_bytes
    cache.poison(pages)
    began = time.perf_counter()
    desk.items[SERVICE](b"", timeout=SECONDS)
    copy(_in_pieces(desk.items[STAGING], cache.regions[0], nbytes, cache.shape.page_bytes))
    seconds = time.perf_counter() - began
    cache.check(generation, pages, pages)
    return seconds


def _in_pieces(source: int, destination: int, nbytes: int, piece: int) -> Descriptors:
    firsts = range(0, nbytes, piece)
    lengths = [min(piece, nbytes - first) for first in firsts]
    return [source + first for first in firsts], [destination + first for first in firsts], lengths
