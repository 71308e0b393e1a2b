"""handoff.head_slice: hand-offs between ranks of unequal tp, and what the axis order of the pool makes of them.

Two ranks of half of the heads and the one whose heads they hold, each in a process of its own: what happens twice in
an engine of tp 4 beside one of tp 2. Two send to one, or (``.split``) one to two. The baseline writes the same
descriptors with bare engines, from two prefills at once, to two decodes one after the other. ``limit.head_slice``: plan
and data plane, and no session.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.baselines.raw import BareMooncake
from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import MemoryRange, Outcome
from kvgrpc.model import Layout, Pool, PoolKind, Region
from kvgrpc.transfer.layout.plan import geometry

# tp 2 to 1 of a model with half the heads: the same ranks, pages and slices as tp 4 to 2 of one with 8.
SHARES, HEADS = 2, 4
TOKENS, DIM_WORDS = 16, 32  # of eight bytes: 128 values of bfloat16
TOKENS_FIRST, HEADS_FIRST = "token,head,dim", "head,token,dim"
SECONDS, NAP = 120.0, 1e-3  # as wherever much is moved (docs/performance.md)
CALIBRATION = 4_096  # descriptors
GATHER_BYTES = 64 << 20
MIX = np.uint64(0x9E3779B97F4A7C15)
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one rank: heads from ``start`` on, ``count`` of them, in pools of this axis order."""

    regions: int
    pages: int
    axes: str
    start: int = 0
    count: int = HEADS

    @property
    def page_bytes(self) -> int:
        return TOKENS * self.count * DIM_WORDS * 8

    @property
    def nbytes(self) -> int:
        return self.regions * self.pages * self.page_bytes

    @property
    def halves(self) -> list[Shape]:
        share = HEADS // SHARES
        return [replace(self, start=tp * share, count=share) for tp in range(SHARES)]

    def pool(self, address: int) -> Pool:
        size = self.page_bytes
        regions = tuple(Region(n, "kv", address + n * self.pages * size, size, size) for n in range(self.regions))
        heads = (HEADS, self.start, self.count)
        return Pool("kv", PoolKind.KV, TOKENS, self.pages, "bfloat16", regions, self.axes, *heads)

    def view(self, address: int) -> Words:
        """uint64[regions, pages, TOKENS, count, DIM_WORDS]"""
        flat: Words = np.ctypeslib.as_array((ctypes.c_uint64 * (self.nbytes // 8)).from_address(address))
        tokens_first: Words = flat.reshape(self.regions, self.pages, TOKENS, self.count, DIM_WORDS)
        heads_first: Words = flat.reshape(self.regions, self.pages, self.count, TOKENS, DIM_WORDS).swapaxes(2, 3)
        return tokens_first if self.axes.startswith("token") else heads_first

    def content(self, generation: int, region: int) -> Words:
        """What one region of prefill holds: uint64[pages, TOKENS, count, DIM_WORDS]."""
        heads = range(self.start, self.start + self.count)
        axes = (range(self.pages), range(TOKENS), heads, range(DIM_WORDS))
        index = np.full((1, 1, 1, 1), generation * self.regions + region, np.uint64)
        for axis, (values, size) in enumerate(zip(axes, (self.pages, TOKENS, HEADS, DIM_WORDS), strict=True)):
            index = index * np.uint64(size) + np.asarray(values, np.uint64).reshape(
                [-1 if n == axis else 1 for n in range(4)]
            )
        words: Words = index * MIX
        return words

    def scattered(self, seed: int) -> npt.NDArray[np.uint32]:
        return np.random.default_rng(seed).permutation(self.pages).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Row:
    """``split``: one prefill rank sends to two decode ranks. ``gather``: bytes of memory to gather slices in."""

    name: str
    shape: Shape
    split: bool = False
    gather: int = 0

    @property
    def prefills(self) -> list[Shape]:
        return [self.shape] if self.split else self.shape.halves

    @property
    def decodes(self) -> list[Shape]:
        return self.shape.halves if self.split else [self.shape]


def benchmarks(plan: Plan) -> list[Benchmark]:
    tokens_first, heads_first = (Shape(plan.regions, plan.slice_pages, axes) for axes in (TOKENS_FIRST, HEADS_FIRST))
    return [
        _benchmark(Row("handoff.head_slice", tokens_first), _Slices, 0.9),
        _benchmark(Row("handoff.head_slice.heads_first", heads_first), _Slices, 0.9),
        _benchmark(Row("handoff.head_slice.split", tokens_first, split=True, gather=GATHER_BYTES), _Slices, 3.0),
        _benchmark(Row("handoff.head_slice.split.not_gathered", tokens_first, split=True), _Slices, None),
        _benchmark(Row("limit.head_slice", tokens_first), _PlannedSlices, None),
    ]


def _benchmark(row: Row, ours: Callable[[Row], _Contender], target: float | None) -> Benchmark:
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    metric = Metric(row.name, "GB/s", "higher", "raw Mooncake", Target(ratio=target))
    return Benchmark((metric,), lambda: ours(row), lambda: _RawSlices(row), missing)


class _Contender:
    def __init__(self, row: Row) -> None:
        self._row, self._generation = row, 0
        self._prefills = [Worker(f"slices-prefill-{tp}") for tp, _ in enumerate(row.prefills)]
        self._decodes = [Worker(f"slices-decode-{tp}") for tp, _ in enumerate(row.decodes)]

    def turn(self) -> Figures:
        self._generation += 1
        for worker in self._prefills:
            worker.call(_fill, self._generation)
        for worker in self._decodes:
            worker.call(_poison)
        took = self._move()
        for worker in self._decodes:
            worker.call(_check, self._generation)
        return {self._row.name: self._row.shape.nbytes / took / 1e9}

    def _move(self) -> float:
        raise NotImplementedError

    def peak_rss(self) -> int:
        return sum(worker.peak_rss() for worker in (*self._prefills, *self._decodes))

    def close(self) -> None:
        for worker in (*self._decodes, *self._prefills):
            worker.close()


class _Slices(_Contender):
    """One room with all pages of the pool, scattered; from init at decode to Success there."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self._registry = ""
        for tp, (worker, part) in enumerate(zip(self._prefills, row.prefills, strict=True)):
            layout = "PREFILL", tp, len(row.prefills)
            address = worker.call(_open_rank, part, *layout, self._registry or "embedded", row.gather)
            self._registry = self._registry or address
        for tp, (worker, part) in enumerate(zip(self._decodes, row.decodes, strict=True)):
            worker.call(_open_rank, part, "DECODE", tp, len(row.decodes), "", 0)

    def _move(self) -> float:
        for worker in self._decodes:
            worker.call(_receiver, self._registry, self._generation)
        sending = [worker.begin(_send, self._generation) for worker in self._prefills]
        took = max(one.result() for one in [worker.begin(_receive) for worker in self._decodes])
        for one in sending:
            one.result()
        return took


class _RawSlices(_Contender):
    def __init__(self, row: Row) -> None:
        super().__init__(row)
        targets = [
            (*worker.call(_start_raw, part), part) for worker, part in zip(self._decodes, row.decodes, strict=True)
        ]
        for worker, part in zip(self._prefills, row.prefills, strict=True):
            worker.call(_start_raw, part)
            worker.call(_aim_raw, targets)

    def _move(self) -> float:
        return max(one.result() for one in [worker.begin(_write_raw) for worker in self._prefills])


class _PlannedSlices(_Contender):
    """What a transfer thread does with a submission, by itself."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        (address, at), target = self._decodes[0].call(_start_plane, row.shape), row.shape
        for worker, part in zip(self._prefills, row.prefills, strict=True):
            worker.call(_start_plane, part)
            worker.call(_aim_plane, address, target, at)

    def _move(self) -> float:
        return max(one.result() for one in [worker.begin(_write_planned) for worker in self._prefills])


def _fill(desk: Desk, generation: int) -> None:
    shape: Shape = desk.items["shape"]
    for region in range(shape.regions):
        desk.items["view"][region] = shape.content(generation, region)


def _poison(desk: Desk) -> None:
    desk.items["view"][:] = ~np.uint64(0)


def _check(desk: Desk, generation: int) -> None:
    """Raises AssertionError unless every word of every head came from its page."""
    shape: Shape = desk.items["shape"]
    source, destination = shape.scattered(1), shape.scattered(2)
    for region in range(shape.regions):
        if not np.array_equal(desk.items["view"][region, destination], shape.content(generation, region)[source]):
            raise AssertionError(f"region {region} is not prefill's")


def _keep(desk: Desk, shape: Shape, address: int) -> None:
    desk.items["shape"], desk.items["address"], desk.items["view"] = shape, address, shape.view(address)


def _open_rank(desk: Desk, shape: Shape, role: str, tp: int, tp_size: int, registry: str, gather: int) -> str:
    from kvgrpc.server import RankConfig, Role, open_rank

    plane = open_plane("mooncake")
    _keep(desk, shape, plane.allocate(shape.nbytes))
    config = RankConfig(
        engine=role.lower(),
        role=Role[role],
        layout=Layout(tp=tp_size),
        tp=tp,
        pools=(shape.pool(desk.items["address"]),),
        data_plane=plane,
        registry=registry,
        gather_bytes=gather,
    )
    desk.items["rank"] = rank = open_rank(config)
    return str(rank.address)


def _receiver(desk: Desk, registry: str, room: int) -> None:
    from kvgrpc.server import KVPoll, KVReceiver

    desk.items["receiver"] = receiver = KVReceiver(desk.items["rank"].transfer, registry, room)
    assert receiver.wait(SECONDS, until=KVPoll.WaitingForInput) is KVPoll.WaitingForInput, receiver.failure


def _receive(desk: Desk) -> float:
    from kvgrpc.server import KVPoll

    receiver: Any = desk.items["receiver"]
    pages = desk.items["shape"].scattered(2).astype(np.int32)
    begin = time.perf_counter()
    receiver.init(pages)
    while receiver.poll() not in (KVPoll.Success, KVPoll.Failed):
        time.sleep(NAP)
    took = time.perf_counter() - begin
    assert receiver.poll() is KVPoll.Success, receiver.failure
    return took


def _send(desk: Desk, room: int) -> None:
    from kvgrpc.server import KVPoll, KVSender

    pages = desk.items["shape"].scattered(1).astype(np.int32)
    sender = KVSender(desk.items["rank"].transfer, room=room)
    sender.init(len(pages))
    sender.send(pages)
    assert sender.wait(SECONDS, until=KVPoll.Success) is KVPoll.Success, sender.failure


def _start_raw(desk: Desk, shape: Shape) -> tuple[str, int]:
    engine = desk.items["engine"] = BareMooncake()
    _keep(desk, shape, engine.allocate(shape.nbytes))
    return engine.session, desk.items["address"]


def _aim_raw(desk: Desk, targets: list[tuple[str, int, Shape]]) -> None:
    """The descriptors that kvgrpc plans; the fastest way to write them is found with a few."""
    shape: Shape = desk.items["shape"]
    desk.items["aims"] = aims = []
    for session, address, target in targets:
        shapes = geometry([shape.pool(desk.items["address"])], [target.pool(address)])
        columns = [column.tolist() for column in shapes.plan(shape.scattered(1), shape.scattered(2)).columns]
        aims.append((session, tuple(columns)))
        desk.items["engine"].write(session, tuple(column[:CALIBRATION] for column in columns))


def _write_raw(desk: Desk) -> float:
    took: float = sum(desk.items["engine"].write(*aim) for aim in desk.items["aims"])
    return took


def _start_plane(desk: Desk, shape: Shape) -> tuple[bytes, int]:
    plane = desk.items["plane"] = open_plane("mooncake")
    _keep(desk, shape, plane.allocate(shape.nbytes))
    plane.register([MemoryRange(desk.items["address"], shape.nbytes)])
    return plane.address(), desk.items["address"]


def _aim_plane(desk: Desk, peer: bytes, target: Shape, address: int) -> None:
    shape: Shape = desk.items["shape"]
    desk.items["geometry"] = geometry([shape.pool(desk.items["address"])], [target.pool(address)])
    desk.items["peer"] = desk.items["plane"].attach(peer)


def _write_planned(desk: Desk) -> float:
    plane, shape = desk.items["plane"], desk.items["shape"]
    begin = time.perf_counter()
    plan = desk.items["geometry"].plan(shape.scattered(1), shape.scattered(2))
    transfer = plane.submit(desk.items["peer"], *plan.columns)
    while (result := transfer.poll()) is None:
        time.sleep(plane.poll_interval)
    assert result.outcome is Outcome.DONE, result
    return time.perf_counter() - begin
