"""storage.*: what is left of files and of a bare Mooncake Store after the storage backends; page cache and loopback."""

from __future__ import annotations

import glob
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.harness.plan import KIB, MIB, Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric
from benchmarks.harness.worker import Desk, Worker

SIZES = {"1MiB": MIB, "64KiB": 64 * KIB}
SECONDS = 120.0
Start = Callable[[Desk, int, int], None]
Turn = Callable[[Desk], tuple[float, float]]


def benchmarks(plan: Plan) -> list[Benchmark]:
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    if plan.against == "sglang":
        ours, theirs = (_open_file, _turn), (_open_hicache, _turn_hicache)
        return [
            _benchmark("file", size, nbytes, plan, "SGLang's HiCacheFile", ours, theirs, "")
            for size, nbytes in SIZES.items()
        ]
    return [
        _benchmark(family, size, nbytes, plan, baseline, ours, raw, lacks)
        for family, baseline, ours, raw, lacks in (
            ("file", "raw files, one thread", (_open_file, _turn), (_open_raw, _turn_raw), ""),
            ("file.direct", "with the page cache", (_open_direct, _turn_cold), (_open_cached, _turn_cold), ""),
            ("mooncake", "bare client", (_open_mooncake, _turn), (_open_bare, _turn_bare), missing),
        )
        for size, nbytes in SIZES.items()
    ]


def _benchmark(
    family: str,
    size: str,
    page_bytes: int,
    plan: Plan,
    baseline: str,
    ours: tuple[Start, Turn],
    raw: tuple[Start, Turn],
    missing: str,
) -> Benchmark:
    name, pages = f"storage.{family}", max(2, plan.bulk_bytes // 4 // page_bytes)
    metrics = tuple(Metric(f"{name}.{what}.{size}", "GB/s", "higher", baseline) for what in ("write", "read"))
    names = metrics[0].name, metrics[1].name
    return Benchmark(
        metrics=metrics,
        ours=lambda: Side(names, pages, page_bytes, *ours),
        baseline=lambda: Side(names, pages, page_bytes, *raw),
        missing=missing,
    )


class Side:
    """Writes all pages, then reads them into zeroed memory, in a process of its own; the bytes are compared."""

    def __init__(self, names: tuple[str, str], pages: int, page_bytes: int, start: Start, turn: Turn) -> None:
        self._names, self._nbytes, self._turn = names, pages * page_bytes, turn
        self._worker = Worker("storage")
        self._worker.call(start, pages, page_bytes)

    def turn(self) -> Figures:
        took = self._worker.call(self._turn)
        return {name: self._nbytes / seconds / 1e9 for name, seconds in zip(self._names, took, strict=True)}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.call(_close)
        self._worker.close()


class Memory:
    """Pages of two buffers, as K and V lie, in memory that other processes can map."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        half = page_bytes // 2
        descriptor = os.memfd_create("pages")
        os.ftruncate(descriptor, pages * page_bytes)
        self.mapping = mmap.mmap(descriptor, pages * page_bytes)
        os.close(descriptor)
        self.bytes = np.frombuffer(self.mapping, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        starts = [[number * half, (pages + number) * half] for number in range(pages)]
        self.pages = [tuple((self.address + start, half) for start in pair) for pair in starts]
        self.views = [[memoryview(self.mapping)[start : start + half] for start in pair] for pair in starts]
        self.noise = np.random.default_rng(1).integers(0, 256, pages * page_bytes, dtype=np.uint8)
        self.keys = [f"page-{number}" for number in range(pages)]

    def fill(self) -> None:
        self.bytes[:] = self.noise

    def clear(self) -> None:
        self.bytes[:] = 0

    def check(self) -> None:
        if not np.array_equal(self.bytes, self.noise):
            raise AssertionError("the bytes that came back are not those that were written")


def _open(desk: Desk, pages: int, page_bytes: int, name: str, config: dict[str, object]) -> None:
    from kvgrpc.prefetch.storage import open_backend
    from kvgrpc.prefetch.storage.base import MemoryRange

    desk.items["memory"] = memory = Memory(pages, page_bytes)
    desk.items["backend"] = backend = open_backend(name, config)
    backend.register([MemoryRange(memory.address, len(memory.bytes))])


def _open_file(desk: Desk, pages: int, page_bytes: int) -> None:
    desk.items["folder"] = folder = tempfile.mkdtemp()
    _open(desk, pages, page_bytes, "file", {"path": folder})


def _open_cached(desk: Desk, pages: int, page_bytes: int) -> None:
    # On a disk: /tmp may be memory.
    desk.items["folder"] = folder = tempfile.mkdtemp(dir=".")
    _open(desk, pages, page_bytes, "file", {"path": folder})


def _open_direct(desk: Desk, pages: int, page_bytes: int) -> None:
    desk.items["folder"] = folder = tempfile.mkdtemp(dir=".")
    _open(desk, pages, page_bytes, "file", {"path": folder, "direct": True})


def _open_mooncake(desk: Desk, pages: int, page_bytes: int) -> None:
    _open(desk, pages, page_bytes, "mooncake", {"master": start_store(desk, pages * page_bytes)})


def start_store(desk: Desk, nbytes: int) -> str:
    from kvgrpc.prefetch.storage.mooncake.local import LocalStore

    desk.items["store"] = store = LocalStore(owners=1, owner_bytes=2 * nbytes + 64 * MIB)
    store.__enter__()
    return store.address


def _turn(desk: Desk, between: Callable[[], None] = lambda: None) -> tuple[float, float]:
    backend, memory = desk.items["backend"], desk.items["memory"]
    backend.clear()
    return _timed(
        memory,
        lambda: backend.write(memory.keys, memory.pages, SECONDS),
        lambda: backend.read(memory.keys, memory.pages, SECONDS),
        lambda results: all(result.ok for result in results),
        between,
    )


def _turn_cold(desk: Desk) -> tuple[float, float]:
    """Reads what the page cache does not hold."""
    folder = desk.items["folder"]

    def forget() -> None:
        for path in glob.iglob(f"{folder}/*/*.kv"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    return _turn(desk, forget)


def _open_raw(desk: Desk, pages: int, page_bytes: int) -> None:
    desk.items["folder"], desk.items["memory"] = tempfile.mkdtemp(), Memory(pages, page_bytes)


def _turn_raw(desk: Desk) -> tuple[float, float]:
    folder, memory = desk.items["folder"], desk.items["memory"]
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")

    def move(flags: int, call: Callable[..., int]) -> list[int]:
        done = []
        for key, views in zip(memory.keys, memory.views, strict=True):
            descriptor = os.open(f"{folder}/{key}", flags)
            done.append(call(descriptor, views, 0))
            os.close(descriptor)
        return done

    return _timed(
        memory,
        lambda: move(os.O_WRONLY | os.O_CREAT, os.pwritev),
        lambda: move(os.O_RDONLY, os.preadv),
        lambda done: sum(done) == len(memory.bytes),
    )


def _open_hicache(desk: Desk, pages: int, page_bytes: int) -> None:
    """SGLang's own backend of files; a page is one tensor, as its host pool gives them."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    desk.items["folder"], desk.items["memory"] = folder, memory = tempfile.mkdtemp(), Memory(pages, page_bytes)
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
    )
    desk.items["storage"] = HiCacheFile(config, folder)
    rows = torch.from_numpy(memory.bytes).view(pages, page_bytes)
    desk.items["tensors"] = [rows[number] for number in range(pages)]


def _turn_hicache(desk: Desk) -> tuple[float, float]:
    storage, memory, tensors = desk.items["storage"], desk.items["memory"], desk.items["tensors"]
    storage.clear()
    return _timed(
        memory,
        lambda: [storage.set(key, tensor) for key, tensor in zip(memory.keys, tensors, strict=True)],
        lambda: [each is not None for each in storage.batch_get(memory.keys, tensors)],
        all,
    )


def _open_bare(desk: Desk, pages: int, page_bytes: int) -> None:
    from kvgrpc.dataplane.mooncake.environment import DEFAULTS

    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    desk.items["memory"] = memory = Memory(pages, page_bytes)
    master = start_store(desk, pages * page_bytes)
    desk.items["client"] = client = MooncakeDistributedStore()
    if client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) != 0:
        raise RuntimeError("the bare client did not start")
    client.register_buffer(memory.address, len(memory.bytes))


def _turn_bare(desk: Desk) -> tuple[float, float]:
    client, memory = desk.items["client"], desk.items["memory"]
    client.remove_all(True)
    buffers: list[Any] = [[[part[place] for part in page] for page in memory.pages] for place in (0, 1)]
    return _timed(
        memory,
        lambda: client.batch_put_from_multi_buffers(memory.keys, *buffers),
        lambda: client.batch_get_into_multi_buffers(memory.keys, *buffers),
        lambda codes: min(codes) >= 0,
    )


def _timed(
    memory: Memory,
    write: Callable[[], Any],
    read: Callable[[], Any],
    right: Callable[[Any], bool],
    between: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    took = []
    for prepare, call in ((memory.fill, write), (memory.clear, read)):
        prepare()
        if call is read:
            between()
        began = time.perf_counter()
        result = call()
        took.append(time.perf_counter() - began)
        if not right(result):
            raise AssertionError(f"pages were not moved: {result[:3]}")
    memory.check()
    return took[0], took[1]


def _close(desk: Desk) -> None:
    if "backend" in desk.items:
        desk.items["backend"].close(10.0)
    if "store" in desk.items:
        desk.items["store"].close()
    if "folder" in desk.items:
        shutil.rmtree(desk.items["folder"], ignore_errors=True)
