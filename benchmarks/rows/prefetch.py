"""prefetch.*: what is left of bare reads after the cache's controller; limit.prefetch.*: what its parts need alone.

The limits are no claim about kvgrpc: their ratio is the most that prefetch.file could reach if the rest were free, and
prefetch.mooncake that of limit.prefetch.mooncake.backend: the process that has the Store's client, and no controller.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.harness.plan import MIB, Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows.cache import page_shape
from benchmarks.rows.storage import start_store

SECONDS = 120.0
FILE, MOONCAKE, LIMIT = "prefetch.file", "prefetch.mooncake", "limit.prefetch"
CONTROLLER = "prefetch.controller"
# The controller's own batch.
BATCH_PAGES = 128
_NO_TARGET = Target()
RAW = "raw pread, one thread"
PageBuffers = tuple[tuple[int, int], ...]
Start = Callable[[Desk, int], None]
Turn = Callable[[Desk], float]


def benchmarks(plan: Plan) -> list[Benchmark]:
    row = functools.partial(_row, pages=plan.prefetch_pages)
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    return [
        row(FILE, RAW, (_open_files, _turn_controller), (_open_raw, _turn_raw), Target(ratio=0.9)),
        row(f"{FILE}.no_checksum", RAW, (_open_unchecked, _turn_controller), (_open_raw, _turn_raw)),
        row(f"{LIMIT}.backend", RAW, (_open_files, _turn_backend), (_open_raw, _turn_raw)),
        row(f"{LIMIT}.checksum", RAW, (_open_raw, _turn_raw_checked), (_open_raw, _turn_raw)),
        row(
            MOONCAKE,
            "bare batch_get_into",
            (_open_mooncake, _turn_controller),
            (_open_bare, _turn_bare),
            Target(ratio=0.9),
            missing=missing,
        ),
        row(
            f"{LIMIT}.mooncake.backend",
            "bare batch_get_into",
            (_open_mooncake, _turn_backend),
            (_open_bare, _turn_bare),
            missing=missing,
        ),
        Benchmark(
            metrics=(Metric(CONTROLLER, "us/page", "lower", "its storage's calls alone", Target(value=10)),),
            ours=lambda: Costs(CONTROLLER, _open_instant, _turn_instant_prefetch, plan.controller_pages),
            baseline=lambda: Costs(CONTROLLER, _open_instant, _turn_instant_reads, plan.controller_pages),
        ),
    ]


def _row(
    name: str,
    baseline: str,
    ours: tuple[Start, Turn],
    raw: tuple[Start, Turn],
    target: Target = _NO_TARGET,
    *,
    pages: int,
    missing: str = "",
) -> Benchmark:
    return Benchmark(
        metrics=(Metric(name, "GB/s", "higher", baseline, target),),
        ours=lambda: Side(name, *ours, pages),
        baseline=lambda: Side(name, *raw, pages),
        missing=missing,
    )


class Side:
    """Reads all pages into zeroed host memory, in a process of its own; every page's bytes are compared."""

    def __init__(self, name: str, start: Start, turn: Turn, pages: int) -> None:
        self._name, self._turn, self._pages = name, turn, pages
        self._worker = Worker("prefetch")
        self._worker.call(start, pages)

    def turn(self) -> Figures:
        return {self._name: self._pages * MIB / self._worker.call(self._turn) / 1e9}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.call(_close)
        self._worker.close()


class Costs(Side):
    """CPU of a page where storage answers at once and moves nothing."""

    def turn(self) -> Figures:
        return {self._name: self._worker.call(self._turn) / self._pages * 1e6}


class InstantStorage:
    """A StorageBackend that has every page, as far as it says."""

    name = "instant"

    def register(self, memory: Sequence[Any]) -> None: ...

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return len(keys)

    def read(self, keys: Sequence[str], pages: Sequence[Any], timeout: float) -> list[Any]:
        from kvgrpc.prefetch.storage.base import OK

        return [OK] * len(keys)

    def on_removed(self, removed: Any) -> None: ...

    def close(self, timeout: float) -> bool:
        return True


def _open_instant(desk: Desk, pages: int) -> None:
    from kvgrpc.prefetch.model import PrefetchLimits
    from kvgrpc.prefetch.pools.host import HostPool
    from kvgrpc.prefetch.pools.shape import PageShape
    from kvgrpc.prefetch.runtime.controller import CacheController

    shape = PageShape.mha(layers=1, page_tokens=1, heads=1, head_dim=64, dtype="float16")
    desk.items["host"] = host = HostPool(shape, pages)
    desk.items["hashes"] = [f"{number:064x}" for number in range(pages)]
    desk.items["backend"] = storage = cast(Any, InstantStorage())
    limits = PrefetchLimits(threshold_tokens=1, occupancy=1.0, operation_timeout=SECONDS, storage_timeout=SECONDS)
    desk.items["controller"] = CacheController(host, storage, lambda page_hash, extra_key: page_hash, limits=limits)


def _turn_instant_prefetch(desk: Desk) -> float:
    host, controller = desk.items["host"], desk.items["controller"]
    began = time.process_time()
    operation = controller.prefetch(desk.items["hashes"])
    assert operation.wait(SECONDS)
    seconds = time.process_time() - began
    (landed,) = controller.keeper.take()
    assert len(landed.pages) == host.pages
    host.table.release(landed.pages)
    return seconds


def _turn_instant_reads(desk: Desk) -> float:
    host, backend, hashes = desk.items["host"], desk.items["backend"], desk.items["hashes"]
    began = time.process_time()
    for first in range(0, host.pages, BATCH_PAGES):
        some = range(first, min(first + BATCH_PAGES, host.pages))
        backend.read(hashes[first : first + BATCH_PAGES], [host.page_buffers(page) for page in some], SECONDS)
    return time.process_time() - began


def _open_pool(desk: Desk, pages: int) -> Any:
    """A host pool whose page i holds what ``_content(i)`` says."""
    from kvgrpc.prefetch.model import NotEnoughPages
    from kvgrpc.prefetch.pools.host import HostPool

    desk.items["host"] = host = HostPool(page_shape(), pages)
    desk.items["hashes"] = [f"{number:064x}" for number in range(pages)]
    taken = host.table.take(pages)
    assert not isinstance(taken, NotEnoughPages)
    for page in range(pages):
        host.set_flat(page, _content(page))
    return taken


def _content(page: int) -> Any:
    return np.random.default_rng(page).integers(0, 256, MIB, dtype=np.uint8)


def _open_cache(desk: Desk, pages: int, name: str, config: dict[str, object]) -> None:
    """Storage has all pages, the host none."""
    from kvgrpc.prefetch.model import PrefetchLimits
    from kvgrpc.prefetch.runtime.controller import CacheController
    from kvgrpc.prefetch.storage import open_backend

    taken = _open_pool(desk, pages)
    host = desk.items["host"]
    desk.items["backend"] = backend = open_backend(name, config)
    limits = PrefetchLimits(threshold_tokens=1, occupancy=1.0, operation_timeout=SECONDS, storage_timeout=SECONDS)
    controller = CacheController(host, backend, lambda page_hash, extra_key: page_hash, limits=limits)
    desk.items["controller"] = controller
    host.table.commit(taken)
    backup = controller.write_storage(desk.items["hashes"], taken)
    assert backup.wait(SECONDS) and backup.completed == pages
    host.table.release(taken)


def _open_files(desk: Desk, pages: int, checksum: bool = True) -> None:
    desk.items["folder"] = folder = tempfile.mkdtemp()
    _open_cache(desk, pages, "file", {"path": folder, "checksum": checksum})


def _open_unchecked(desk: Desk, pages: int) -> None:
    _open_files(desk, pages, checksum=False)


def _open_mooncake(desk: Desk, pages: int) -> None:
    _open_cache(desk, pages, "mooncake", {"master": start_store(desk, pages * MIB)})


def _turn_controller(desk: Desk) -> float:
    host, controller = desk.items["host"], desk.items["controller"]
    _memory(host)[:] = 0
    began = time.perf_counter()
    operation = controller.prefetch(desk.items["hashes"])
    assert operation.wait(SECONDS)
    seconds = time.perf_counter() - began
    (landed,) = controller.keeper.take()
    _check(host, landed.pages)
    host.table.release(landed.pages)
    return seconds


def _turn_backend(desk: Desk) -> float:
    """The storage backend by itself, a batch of the controller's size at a time."""
    host, backend, hashes = desk.items["host"], desk.items["backend"], desk.items["hashes"]
    _memory(host)[:] = 0
    buffers = [host.page_buffers(page) for page in range(host.pages)]
    began = time.perf_counter()
    for first in range(0, host.pages, BATCH_PAGES):
        part = slice(first, first + BATCH_PAGES)
        assert all(result.ok for result in backend.read(hashes[part], buffers[part], SECONDS))
    seconds = time.perf_counter() - began
    _check(host, range(host.pages))
    return seconds


def _open_raw(desk: Desk, pages: int) -> None:
    desk.items["folder"] = folder = tempfile.mkdtemp()
    _open_pool(desk, pages)
    for page, name in enumerate(desk.items["hashes"]):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(_content(page).tobytes())


def _turn_raw(desk: Desk, after: Callable[[PageBuffers], object] = lambda page: None) -> float:
    host, folder = desk.items["host"], desk.items["folder"]
    memory = memoryview(_memory(host))
    _memory(host)[:] = 0
    pages, views = [host.page_buffers(page) for page in range(host.pages)], []
    for page in pages:
        starts = [(address - host.address, nbytes) for address, nbytes in page]
        views.append([memory[start : start + nbytes] for start, nbytes in starts])
    began = time.perf_counter()
    for name, page, buffers in zip(desk.items["hashes"], pages, views, strict=True):
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
        os.preadv(descriptor, buffers, 0)
        os.close(descriptor)
        after(page)
    seconds = time.perf_counter() - began
    _check(host, range(host.pages))
    return seconds


def _turn_raw_checked(desk: Desk) -> float:
    from kvgrpc.prefetch.storage.base import views
    from kvgrpc.prefetch.storage.file.io import xxh3

    return _turn_raw(desk, lambda page: xxh3(views(page)))


def _open_bare(desk: Desk, pages: int) -> None:
    from kvgrpc.dataplane.mooncake.environment import DEFAULTS

    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    master = start_store(desk, pages * MIB)
    _open_pool(desk, pages)
    host = desk.items["host"]
    desk.items["client"] = client = MooncakeDistributedStore()
    if client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) != 0:
        raise RuntimeError("the bare client did not start")
    client.register_buffer(host.address, host.nbytes)
    assert max(client.batch_put_from_multi_buffers(desk.items["hashes"], *_addresses(host))) == 0


def _turn_bare(desk: Desk) -> float:
    host, client, hashes = desk.items["host"], desk.items["client"], desk.items["hashes"]
    _memory(host)[:] = 0
    addresses, sizes = _addresses(host)
    began = time.perf_counter()
    for first in range(0, host.pages, BATCH_PAGES):
        part = slice(first, first + BATCH_PAGES)
        assert min(client.batch_get_into_multi_buffers(hashes[part], addresses[part], sizes[part])) == MIB
    seconds = time.perf_counter() - began
    _check(host, range(host.pages))
    return seconds


def _addresses(host: Any) -> tuple[list[list[int]], list[list[int]]]:
    pages = [host.page_buffers(page) for page in range(host.pages)]
    return [[address for address, _ in page] for page in pages], [[nbytes for _, nbytes in page] for page in pages]


def _memory(host: Any) -> Any:
    whole = (ctypes.c_uint8 * host.nbytes).from_address(host.address)
    return np.frombuffer(memoryview(whole).cast("B"), dtype=np.uint8)


def _check(host: Any, pages: Any) -> None:
    """Page ``i`` of the prompt lies in ``pages[i]`` now."""
    for number in range(host.pages):
        if not np.array_equal(host.flat(int(pages[number])), _content(number)):
            raise AssertionError("the bytes that came back are not those that were written")


def _close(desk: Desk) -> None:
    for name in ("controller", "backend"):
        if name in desk.items:
            desk.items[name].close(10.0)
    if "store" in desk.items:
        desk.items["store"].close()
    if "folder" in desk.items:
        shutil.rmtree(desk.items["folder"], ignore_errors=True)
