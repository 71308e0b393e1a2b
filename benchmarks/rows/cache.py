"""cache.*: what is left of a bare copy between device and host after the copy engine. ``limit.cache.copy.token.*``: the
same rows by gather and scatter of numpy.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness.plan import MIB, Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker

SECONDS = 120.0
LAYERS, PAGE_TOKENS, HEADS, HEAD_DIM = 16, 16, 8, 128  # 1 MiB a page in bfloat16
COPY, TOKEN = "cache.copy", "cache.copy.token"
ORDERS = ("adjacent", "scattered")
Turn = Callable[[Desk], dict[str, float]]


def benchmarks(plan: Plan) -> list[Benchmark]:
    pages = max(4, plan.bulk_bytes // MIB) // 4
    return [
        _copies(COPY, "cpu", "direct", "raw torch copy", pages),
        _copies(f"{COPY}.kernel", "cpu", "kernel", "raw torch copy", pages),
        *_tokens(PAGE_TOKENS * pages),
        *(
            _copies(f"{COPY}.cuda.{io}", "cuda", io, "raw torch copy, pinned", pages, _without_cuda())
            for io in ("direct", "kernel")
        ),
    ]


def _copies(name: str, device: str, io: str, baseline: str, pages: int, missing: str = "") -> Benchmark:
    names = tuple(f"{name}.{way}.{order}" for way in ("down", "up") for order in ORDERS)
    return Benchmark(
        metrics=tuple(Metric(each, "GB/s", "higher", baseline, Target(ratio=0.9)) for each in names),
        ours=lambda: Side(_turn_copies, pages, name, device, io),
        baseline=lambda: Side(_turn_raw_copies, pages, name, device, io),
        missing=missing,
    )


def _tokens(pages: int) -> list[Benchmark]:
    """Pages of one token: rows of 2 KiB."""

    def row(name: str, turn: Turn, target: Target) -> Benchmark:
        names = tuple(f"{name}.{way}.{order}" for way in ("down", "up") for order in ORDERS)
        return Benchmark(
            metrics=tuple(Metric(each, "GB/s", "higher", "memcpy of as many bytes", target) for each in names),
            ours=lambda: Side(turn, pages, name, "cpu", "kernel", page_tokens=1),
            baseline=lambda: Side(_turn_memcpy, pages, name, "cpu", "kernel", page_tokens=1),
        )

    return [row(TOKEN, _turn_copies, Target(ratio=0.5)), row(f"limit.{TOKEN}", _turn_gather, Target())]


def _without_cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch cannot be imported"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


class Side:
    """One side in a process of its own; each turn compares every byte."""

    def __init__(self, turn: Turn, pages: int, name: str, device: str, io: str, page_tokens: int = PAGE_TOKENS) -> None:
        self._turn = turn
        self._worker = Worker("cache")
        self._worker.call(_open_copies, pages, name, device, io, page_tokens)

    def turn(self) -> Figures:
        return self._worker.call(self._turn)

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.call(_close)
        self._worker.close()


def page_shape(page_tokens: int = PAGE_TOKENS) -> Any:
    from kvgrpc.prefetch.pools.shape import PageShape

    return PageShape.mha(LAYERS, page_tokens, HEADS, HEAD_DIM, "bfloat16")


def _open_copies(desk: Desk, pages: int, name: str, device: str, io: str, page_tokens: int) -> None:
    import torch

    from kvgrpc.prefetch.copies.engine import CopyEngine
    from kvgrpc.prefetch.copies.paths import IoBackend
    from kvgrpc.prefetch.pools.device import DevicePool
    from kvgrpc.prefetch.pools.host import HostPool

    torch.set_num_threads(1)
    shape = page_shape(page_tokens)
    host, pool = HostPool(shape, pages), DevicePool.allocate(shape, pages, device)
    noise = torch.Generator(device).manual_seed(1)
    for layer in range(LAYERS):
        for component in "kv":
            pool.rows(layer, component).random_(0, 256, generator=noise)
    desk.items["noise"] = {(layer, c): pool.rows(layer, c).clone() for layer in range(LAYERS) for c in "kv"}
    desk.items["copies"] = CopyEngine(pool, host, backend=IoBackend(io))
    desk.items["name"] = name
    order = np.random.default_rng(1).permutation(pages)
    desk.items["orders"] = {"adjacent": np.arange(pages), "scattered": order}


def _turn_copies(desk: Desk) -> dict[str, float]:
    copies = desk.items["copies"]

    def down(device: Any) -> Any:
        host = copies.write(device)
        assert copies.wait_idle(SECONDS)
        return host

    def up(host: Any, device: Any) -> None:
        copies.load(host, device_pages=device)
        signal = copies.start_loading()
        for layer in range(LAYERS):
            signal.wait(layer, SECONDS)
        assert copies.wait_idle(SECONDS)

    return _timed_copies(desk, down, up, copies.evict_host)


def _turn_raw_copies(desk: Desk) -> dict[str, float]:
    """The same pages, layer by layer, each with one call of torch on tensors that were made before."""
    import torch

    copies = desk.items["copies"]
    host, device = copies.host, copies.device
    views = {
        (layer, block.component.name): torch.as_strided(
            torch.from_numpy(host.block_memory(number)),
            (host.pages, block.row_bytes),
            (block.page_stride, 1),
            torch.from_numpy(host.block_memory(number)).storage_offset() + layer * block.layer_stride,
        )
        for number, block in enumerate(host.blocks)
        for layer in range(LAYERS)
    }

    def down(pages: Any) -> Any:
        for name, view in views.items():
            rows = device.rows(*name)
            for number, page in enumerate(pages.tolist()):
                view[number].copy_(rows[page], non_blocking=True)
        _finish(device)
        return np.arange(len(pages))

    def up(numbers: Any, pages: Any) -> None:
        for name, view in views.items():
            rows = device.rows(*name)
            for number, page in enumerate(pages.tolist()):
                rows[page].copy_(view[number], non_blocking=True)
        _finish(device)

    return _timed_copies(desk, down, up, lambda numbers: None)


def _turn_memcpy(desk: Desk) -> dict[str, float]:
    """As many bytes of each layer and component, from one place to another and back, each with one call."""
    device = desk.items["copies"].device
    rows = {(layer, c): device.rows(layer, c).numpy().reshape(-1) for layer in range(LAYERS) for c in "kv"}
    saved = desk.items.setdefault("saved", {name: np.empty_like(each) for name, each in rows.items()})

    def down(pages: Any) -> Any:
        for name, each in rows.items():
            np.copyto(saved[name], each)
        return pages

    def up(numbers: Any, pages: Any) -> None:
        for name, each in rows.items():
            np.copyto(each, saved[name])

    return _timed_copies(desk, down, up, lambda numbers: None)


def _turn_gather(desk: Desk) -> dict[str, float]:
    """The rows of each layer and component into one block, and back where they were, each with one call of numpy."""
    device = desk.items["copies"].device
    rows = {(layer, c): device.rows(layer, c).numpy() for layer in range(LAYERS) for c in "kv"}
    saved = desk.items.setdefault("saved", {name: np.empty_like(each) for name, each in rows.items()})

    def down(pages: Any) -> Any:
        for name, each in rows.items():
            np.take(each, pages, axis=0, out=saved[name], mode="clip")
        return pages

    def up(numbers: Any, pages: Any) -> None:
        for name, each in rows.items():
            each[pages] = saved[name]

    return _timed_copies(desk, down, up, lambda numbers: None)


def _timed_copies(
    desk: Desk, down: Callable[[Any], Any], up: Callable[[Any, Any], None], free: Callable[[Any], object]
) -> dict[str, float]:
    import torch

    device = desk.items["copies"].device
    prefix, figures = desk.items["name"], {}
    nbytes = device.pages * device.shape.page_bytes
    for name, pages in desk.items["orders"].items():
        began = time.perf_counter()
        host = down(pages)
        written = time.perf_counter()
        for layer in range(LAYERS):
            for component in "kv":
                device.rows(layer, component).zero_()
        _finish(device)
        zeroed = time.perf_counter()
        up(host, pages)
        loaded = time.perf_counter()
        free(host)
        figures[f"{prefix}.down.{name}"] = nbytes / (written - began) / 1e9
        figures[f"{prefix}.up.{name}"] = nbytes / (loaded - zeroed) / 1e9
        for (layer, component), expected in desk.items["noise"].items():
            if not torch.equal(device.rows(layer, component), expected):
                raise AssertionError("the bytes that came back are not those that left")
    return figures


def _finish(device: Any) -> None:
    """Waits for what was queued; on a CPU nothing is."""
    if device.device.type == "cuda":
        import torch

        torch.cuda.synchronize(device.device)


def _close(desk: Desk) -> None:
    desk.items["copies"].close(10.0)
