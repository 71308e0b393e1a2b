"""dataplane.*: how much of the bare data plane is left after the whole stack."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.baselines.raw import BareMooncake, Descriptors, allocate_shared, copy
from benchmarks.harness.plan import KIB, MIB, Plan
from benchmarks.harness.rounds import Benchmark, Contender, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows import rooms
from benchmarks.rows.pair import Pair
from benchmarks.rows.rooms import Orders
from benchmarks.sides.base import Plane, Setting
from benchmarks.sides.memory import Memory, Shape

EFFICIENCY = "dataplane.efficiency"
SHM = "dataplane.shm"
SIZES = {"1MiB": MIB, "32KiB": 32 * KIB}
PAUSE = 1e-3
ENGINE, MEMORY, TARGET, MAPS = "engine", "memory", "target", "maps"
# What a raw side calls its turn: one room with every page of the memory.
ONE_ROOM = 1


def benchmarks(plan: Plan) -> list[Benchmark]:
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    return [
        *(
            _benchmark(f"{EFFICIENCY}.{size}", "mooncake", nbytes, plan, "raw Mooncake", 0.95, RawMooncake, missing)
            for size, nbytes in SIZES.items()
        ),
        *(
            _benchmark(f"{SHM}.{size}", "shm", nbytes, plan, "raw memcpy", 0.8, RawCopy, "")
            for size, nbytes in SIZES.items()
        ),
    ]


def _benchmark(
    name: str,
    plane: Plane,
    descriptor_bytes: int,
    plan: Plan,
    baseline: str,
    target: float,
    raw: Callable[[str, Shape, int], Contender],
    missing: str,
) -> Benchmark:
    shape = Shape(regions=1, pages=plan.bulk_bytes // descriptor_bytes, page_bytes=descriptor_bytes, aux_items=1)
    return Benchmark(
        metrics=(Metric(name, "GB/s", "higher", baseline, Target(ratio=target)),),
        ours=lambda: WholeStack(name, Setting("kvgrpc", plane, shape), plan.bulk_repeats),
        baseline=lambda: raw(name, shape, plan.bulk_repeats),
        missing=missing,
    )


class WholeStack(Pair):
    """One room with all pages of the pool, scattered: as many descriptors as pages."""

    def __init__(self, name: str, setting: Setting, repeats: int) -> None:
        super().__init__(setting)
        self._name = name
        self._shape = setting.shape
        self._repeats = repeats

    def turn(self) -> Figures:
        took = [
            self.hand_off(self.orders(ONE_ROOM, self._shape.pages, PAUSE), rooms.receive_together)
            for _ in range(self._repeats)
        ]
        return {self._name: self._shape.region_bytes / statistics.median(took) / 1e9}


class RawMooncake:
    """The same descriptors by the bare engine, between two processes."""

    def __init__(self, name: str, shape: Shape, repeats: int) -> None:
        self._name = name
        self._shape = shape
        self._repeats = repeats
        self._generation = 0
        self._source, self._target = Worker("raw-source"), Worker("raw-target")
        session, address = self._target.call(_start_mooncake, shape)
        self._source.call(_start_mooncake, shape)
        self._peer = session, address

    def turn(self) -> Figures:
        return {self._name: self._shape.region_bytes / statistics.median(map(self._once, range(self._repeats))) / 1e9}

    def peak_rss(self) -> int:
        return self._source.peak_rss() + self._target.peak_rss()

    def close(self) -> None:
        self._source.close()
        self._target.close()

    def _once(self, _: int) -> float:
        self._generation += 1
        self._source.call(_fill, self._generation)
        self._target.call(_poison)
        took = self._source.call(_write_mooncake, *self._peer)
        self._target.call(_check, self._generation)
        return took


class RawCopy:
    """The same descriptors by memcpy, inside one process."""

    def __init__(self, name: str, shape: Shape, repeats: int) -> None:
        self._name = name
        self._shape = shape
        self._repeats = repeats
        self._generation = 0
        self._worker = Worker("raw-copy")
        self._worker.call(_start_copy, shape)

    def turn(self) -> Figures:
        took = []
        for _ in range(self._repeats):
            self._generation += 1
            took.append(self._worker.call(_copy, self._generation))
        return {self._name: self._shape.region_bytes / statistics.median(took) / 1e9}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.close()


def _start_mooncake(desk: Desk, shape: Shape) -> tuple[str, int]:
    engine = BareMooncake()
    memory = Memory(shape, engine.allocate)
    desk.items[ENGINE], desk.items[MEMORY] = engine, memory
    return engine.session, memory.regions[0]


def _fill(desk: Desk, generation: int) -> None:
    memory: Memory = desk.items[MEMORY]
    memory.fill(generation, _orders(memory.shape).source())


def _poison(desk: Desk) -> None:
    memory: Memory = desk.items[MEMORY]
    memory.poison(_orders(memory.shape).destination())


def _write_mooncake(desk: Desk, session: str, address: int) -> float:
    memory: Memory = desk.items[MEMORY]
    engine: BareMooncake = desk.items[ENGINE]
    return engine.write(session, _descriptors(memory.shape, memory.regions[0], address))


def _check(desk: Desk, generation: int) -> None:
    memory: Memory = desk.items[MEMORY]
    orders = _orders(memory.shape)
    memory.check(generation, orders.source().ravel(), orders.destination().ravel())


def _start_copy(desk: Desk, shape: Shape) -> None:
    maps: list[mmap.mmap] = []
    desk.items[MAPS] = maps
    desk.items[MEMORY], desk.items[TARGET] = (Memory(shape, lambda n: allocate_shared(n, maps)) for _ in range(2))


def _copy(desk: Desk, generation: int) -> float:
    source: Memory = desk.items[MEMORY]
    target: Memory = desk.items[TARGET]
    orders = _orders(source.shape)
    source.fill(generation, orders.source())
    target.poison(orders.destination())
    took = copy(_descriptors(source.shape, source.regions[0], target.regions[0]))
    target.check(generation, orders.source().ravel(), orders.destination().ravel())
    return took


def _orders(shape: Shape) -> Orders:
    return Orders(1, ONE_ROOM, shape.pages, shape.pages, shape.aux_items, PAUSE)


def _descriptors(shape: Shape, source: int, destination: int) -> Descriptors:
    orders = _orders(shape)
    sources = (orders.source().ravel() * shape.page_bytes + source).tolist()
    destinations = (orders.destination().ravel() * shape.page_bytes + destination).tolist()
    return sources, destinations, [shape.page_bytes] * shape.pages
