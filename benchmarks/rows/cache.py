"""cache.* and prefetch.*: what is left of a bare copy, and of bare file reads, after the hierarchical cache."""

from __future__ import annotations

import os
import shutil
import tempfile
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
COPY = "cache.copy"
PREFETCH = "prefetch.file"
Turn = Callable[[Desk], dict[str, float]]


def benchmarks(plan: Plan) -> list[Benchmark]:
    pages = max(4, plan.bulk_bytes // MIB)
    copies = tuple(f"{COPY}.{what}.{pages_are}" for what in ("down", "up") for pages_are in ("adjacent", "scattered"))
    return [
        Benchmark(
            metrics=tuple(Metric(name, "GB/s", "higher", "raw torch copy", Target(ratio=0.9)) for name in copies),
            ours=lambda: Side(_open_copies, _turn_copies, pages // 4),
            baseline=lambda: Side(_open_copies, _turn_raw_copies, pages // 4),
        ),
        Benchmark(
            metrics=(Metric(PREFETCH, "GB/s", "higher", "raw pread, one thread", Target(ratio=0.9)),),
            ours=lambda: Side(_open_prefetch, _turn_prefetch, pages),
            baseline=lambda: Side(_open_prefetch, _turn_raw_files, pages),
        ),
    ]


class Side:
    """One side in a process of its own; each turn compares every byte."""

    def __init__(self, start: Callable[[Desk, int], None], turn: Turn, pages: int) -> None:
        self._turn = turn
        self._worker = Worker("cache")
        self._worker.call(start, pages)

    def turn(self) -> Figures:
        return self._worker.call(self._turn)

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.call(_close)
        self._worker.close()


def _shape() -> Any:
    from kvgrpc.prefetch.pools.shape import PageShape

    return PageShape.mha(LAYERS, PAGE_TOKENS, HEADS, HEAD_DIM, "bfloat16")


def _open_copies(desk: Desk, pages: int) -> None:
    import torch

    from kvgrpc.prefetch.copies.engine import CopyEngine
    from kvgrpc.prefetch.copies.paths import IoBackend
    from kvgrpc.prefetch.pools.device import DevicePool
    from kvgrpc.prefetch.pools.host import HostPool

    torch.set_num_threads(1)
    host, device = HostPool(_shape(), pages), DevicePool.allocate(_shape(), pages)
    noise = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        for component in "kv":
            device.rows(layer, component).random_(0, 256, generator=noise)
    desk.items["noise"] = {(layer, c): device.rows(layer, c).clone() for layer in range(LAYERS) for c in "kv"}
    desk.items["copies"] = CopyEngine(device, host, backend=IoBackend.DIRECT)
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
                view[number].copy_(rows[page])
        return np.arange(len(pages))

    def up(numbers: Any, pages: Any) -> None:
        for name, view in views.items():
            rows = device.rows(*name)
            for number, page in enumerate(pages.tolist()):
                rows[page].copy_(view[number])

    return _timed_copies(desk, down, up, lambda numbers: None)


def _timed_copies(
    desk: Desk, down: Callable[[Any], Any], up: Callable[[Any, Any], None], free: Callable[[Any], object]
) -> dict[str, float]:
    import torch

    device = desk.items["copies"].device
    figures = {}
    nbytes = device.pages * device.shape.page_bytes
    for name, pages in desk.items["orders"].items():
        began = time.perf_counter()
        host = down(pages)
        written = time.perf_counter()
        for layer in range(LAYERS):
            for component in "kv":
                device.rows(layer, component).zero_()
        zeroed = time.perf_counter()
        up(host, pages)
        loaded = time.perf_counter()
        free(host)
        figures[f"{COPY}.down.{name}"] = nbytes / (written - began) / 1e9
        figures[f"{COPY}.up.{name}"] = nbytes / (loaded - zeroed) / 1e9
        for (layer, component), expected in desk.items["noise"].items():
            if not torch.equal(device.rows(layer, component), expected):
                raise AssertionError("the bytes that came back are not those that left")
    return figures


def _open_prefetch(desk: Desk, pages: int) -> None:
    from kvgrpc.prefetch.controller.controller import CacheController
    from kvgrpc.prefetch.model import PrefetchLimits, Short
    from kvgrpc.prefetch.pools.host import HostPool
    from kvgrpc.prefetch.storage import open_backend

    desk.items["folder"] = folder = tempfile.mkdtemp()
    host = HostPool(_shape(), pages)
    backend = open_backend("file", {"path": folder})
    limits = PrefetchLimits(threshold_tokens=1, occupancy=1.0, operation_timeout=SECONDS, storage_timeout=SECONDS)
    controller = CacheController(host, backend, str, limits=limits)
    desk.items.update(host=host, backend=backend, controller=controller)
    noise = np.random.default_rng(1).integers(0, 256, host.nbytes, dtype=np.uint8)
    desk.items["noise"], desk.items["hashes"] = noise, [f"{number:064x}" for number in range(pages)]
    taken = host.table.take(pages)
    assert not isinstance(taken, Short)
    _memory(host)[:] = noise
    host.table.commit(taken)
    assert controller.write_storage(desk.items["hashes"], taken).wait(SECONDS)
    _write_raw(desk)
    host.table.release(taken)


def _turn_prefetch(desk: Desk) -> dict[str, float]:
    host, controller = desk.items["host"], desk.items["controller"]
    _memory(host)[:] = 0
    began = time.perf_counter()
    operation = controller.prefetch(desk.items["hashes"])
    assert operation.wait(SECONDS)
    seconds = time.perf_counter() - began
    (landed,) = controller.keeper.take()
    _check(desk, landed.pages)
    host.table.release(landed.pages)
    return {PREFETCH: host.nbytes / seconds / 1e9}


def _write_raw(desk: Desk) -> None:
    host = desk.items["host"]
    os.mkdir(f"{desk.items['folder']}/raw")
    for page, name in enumerate(desk.items["hashes"]):
        with open(f"{desk.items['folder']}/raw/{name}", "wb") as file:
            file.write(host.flat(page).tobytes())


def _turn_raw_files(desk: Desk) -> dict[str, float]:
    host, folder = desk.items["host"], desk.items["folder"]
    memory = memoryview(_memory(host))
    _memory(host)[:] = 0
    views = []
    for page in range(host.pages):
        starts = [(address - host.address, nbytes) for address, nbytes in host.page_buffers(page)]
        views.append([memory[start : start + nbytes] for start, nbytes in starts])
    began = time.perf_counter()
    for name, buffers in zip(desk.items["hashes"], views, strict=True):
        descriptor = os.open(f"{folder}/raw/{name}", os.O_RDONLY)
        os.preadv(descriptor, buffers, 0)
        os.close(descriptor)
    seconds = time.perf_counter() - began
    _check(desk, np.arange(host.pages))
    return {PREFETCH: host.nbytes / seconds / 1e9}


def _memory(host: Any) -> Any:
    import ctypes

    return np.frombuffer(
        memoryview((ctypes.c_uint8 * host.nbytes).from_address(host.address)).cast("B"), dtype=np.uint8
    )


def _check(desk: Desk, pages: Any) -> None:
    """Page ``i`` of the prompt lies in ``pages[i]`` now."""
    host, noise = desk.items["host"], desk.items["noise"]
    for number in range(0, host.pages, 7):
        expected = [
            noise[address - host.address : address - host.address + nbytes]
            for address, nbytes in host.page_buffers(number)
        ]
        if not np.array_equal(host.flat(int(pages[number])), np.concatenate(expected)):
            raise AssertionError("the bytes that came back are not those that were written")


def _close(desk: Desk) -> None:
    for name in ("copies", "controller", "backend"):
        if name in desk.items:
            desk.items[name].close(10.0)
    if "folder" in desk.items:
        shutil.rmtree(desk.items["folder"], ignore_errors=True)
