"""storage.*: pages in files beside SGLang's way with them, and what is left of a bare Mooncake Store after its backend;
page cache and loopback. ``limit.storage.file.*``: what the kernel's calls for a file need by themselves.
"""

from __future__ import annotations

import glob
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.harness.plan import KIB, MIB, Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Better, Metric, Target
from benchmarks.harness.worker import Desk, Worker

SIZES = {"1MiB": MIB, "64KiB": 64 * KIB}
SECONDS = 120.0
FILE, DIRECT, MOONCAKE, LIMIT = "storage.file", "storage.file.direct", "storage.mooncake", "limit.storage.file"
# Beside SGLang's files: rates of reading, and what a page may take of its CPU for a page, 1.2 times.
AS_FAST, AS_CHEAP = Target(ratio=1), Target(ratio=0.83)
_NO_TARGET = Target()


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of all pages together; ``cpu`` of reading them, ``looked``: for each."""

    write: float
    read: float
    cpu: float
    looked: float


Start = Callable[[Desk, int, int], None]
Turn = Callable[[Desk], Took]


def benchmarks(plan: Plan) -> list[Benchmark]:
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    ours, raw, bare = (_open_file, _turn), (_open_raw, _turn_raw), (_open_bare, _turn_bare)
    theirs, hicache = (_open_tensor_files, _turn_tensors), "HiCacheFile's calls"
    if plan.against == "sglang":
        theirs, hicache = (_open_hicache, _turn_tensors), "SGLang's HiCacheFile"
    of_files = [_benchmark(FILE, size, plan, hicache, ours, theirs, is_all=True) for size in SIZES]
    if plan.against == "sglang":
        return of_files
    direct, cached = (_open_direct, _turn_cold), (_open_cached, _turn_cold)
    return [
        *of_files,
        *(_benchmark(LIMIT, size, plan, hicache, raw, theirs, is_all=True) for size in SIZES),
        *(_benchmark(DIRECT, size, plan, "with the page cache", direct, cached) for size in SIZES),
        *(
            _benchmark(MOONCAKE, size, plan, "bare client", (_open_mooncake, _turn), bare, missing=missing)
            for size in SIZES
        ),
    ]


def _benchmark(
    family: str,
    size: str,
    plan: Plan,
    baseline: str,
    ours: tuple[Start, Turn],
    theirs: tuple[Start, Turn],
    *,
    is_all: bool = False,
    missing: str = "",
) -> Benchmark:
    """``is_all``: what a read takes of the CPU, and a look whether a page is there, too."""
    pages, aimed = max(2, plan.bulk_bytes // 4 // SIZES[size]), family == FILE

    def metric(what: str, unit: str, better: Better, target: Target = _NO_TARGET) -> Metric:
        return Metric(f"{family}.{what}", unit, better, baseline, target if aimed else _NO_TARGET)

    metrics = {
        "write": metric(f"write.{size}", "GB/s", "higher"),
        "read": metric(f"read.{size}", "GB/s", "higher", AS_FAST),
    }
    if is_all:
        metrics["cpu"] = metric(f"read.{size}.cpu", "us/page", "lower", AS_CHEAP)
        metrics["looked"] = metric(f"exists.{size}", "us/page", "lower")
    names = {what: each.name for what, each in metrics.items()}
    return Benchmark(
        metrics=tuple(metrics.values()),
        ours=lambda: Side(names, pages, SIZES[size], *ours),
        baseline=lambda: Side(names, pages, SIZES[size], *theirs),
        missing=missing,
    )


class Side:
    """Writes all pages, looks whether each is there, and reads them into zeroed memory, in a process of its own; the
    bytes are compared. ``names``: of the figures that are wanted.
    """

    def __init__(self, names: Mapping[str, str], pages: int, page_bytes: int, start: Start, turn: Turn) -> None:
        self._names, self._pages, self._nbytes, self._turn = names, pages, pages * page_bytes, turn
        self._worker = Worker("storage")
        self._worker.call(start, pages, page_bytes)

    def turn(self) -> Figures:
        took = self._worker.call(self._turn)
        figures = {
            "write": self._nbytes / took.write / 1e9,
            "read": self._nbytes / took.read / 1e9,
            "cpu": took.cpu / self._pages * 1e6,
            "looked": took.looked / self._pages * 1e6,
        }
        return {name: figures[what] for what, name in self._names.items()}

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


def _turn(desk: Desk, between: Callable[[], None] = lambda: None) -> Took:
    backend, memory = desk.items["backend"], desk.items["memory"]
    backend.clear()
    return _timed(
        memory,
        lambda: backend.write(memory.keys, memory.pages, SECONDS),
        lambda: backend.read(memory.keys, memory.pages, SECONDS),
        lambda results: all(result.ok for result in results),
        lambda: backend.contains(memory.keys, SECONDS),
        between,
    )


def _turn_cold(desk: Desk) -> Took:
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


def _turn_raw(desk: Desk) -> Took:
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
        lambda: [os.path.exists(f"{folder}/{key}") for key in memory.keys],
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


def _open_tensor_files(desk: Desk, pages: int, page_bytes: int) -> None:
    """As ``_open_hicache``, without SGLang."""
    import torch

    from benchmarks.baselines.hicache import TensorFiles

    desk.items["folder"], desk.items["memory"] = folder, memory = tempfile.mkdtemp(), Memory(pages, page_bytes)
    desk.items["storage"] = TensorFiles(folder)
    rows = torch.from_numpy(memory.bytes).view(pages, page_bytes)
    desk.items["tensors"] = [rows[number] for number in range(pages)]


def _turn_tensors(desk: Desk) -> Took:
    storage, memory, tensors = desk.items["storage"], desk.items["memory"], desk.items["tensors"]
    storage.clear()
    return _timed(
        memory,
        lambda: [storage.set(key, tensor) for key, tensor in zip(memory.keys, tensors, strict=True)],
        lambda: [each is not None for each in storage.batch_get(memory.keys, tensors)],
        all,
        lambda: [storage.exists(key) for key in memory.keys],
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


def _turn_bare(desk: Desk) -> Took:
    client, memory = desk.items["client"], desk.items["memory"]
    client.remove_all(True)
    buffers: list[Any] = [[[part[place] for part in page] for page in memory.pages] for place in (0, 1)]
    return _timed(
        memory,
        lambda: client.batch_put_from_multi_buffers(memory.keys, *buffers),
        lambda: client.batch_get_into_multi_buffers(memory.keys, *buffers),
        lambda codes: min(codes) >= 0,
        lambda: [client.is_exist(key) == 1 for key in memory.keys],
    )


def _timed(
    memory: Memory,
    write: Callable[[], Any],
    read: Callable[[], Any],
    right: Callable[[Any], bool],
    look: Callable[[], Sequence[bool]],
    between: Callable[[], None] = lambda: None,
) -> Took:
    def timed(call: Callable[[], Any]) -> tuple[float, float]:
        began, used = time.perf_counter(), time.process_time()
        result = call()
        took = time.perf_counter() - began, time.process_time() - used
        if not right(result):
            raise AssertionError(f"pages were not moved: {result[:3]}")
        return took

    memory.fill()
    written, _ = timed(write)
    began = time.perf_counter()
    there = look()
    looked = time.perf_counter() - began
    memory.clear()
    between()
    done, cpu = timed(read)
    memory.check()
    if not all(there):
        raise AssertionError("a page that was written is not there")
    return Took(written, done, cpu, looked)


def _close(desk: Desk) -> None:
    if "backend" in desk.items:
        desk.items["backend"].close(10.0)
    if "store" in desk.items:
        desk.items["store"].close()
    if "folder" in desk.items:
        shutil.rmtree(desk.items["folder"], ignore_errors=True)
