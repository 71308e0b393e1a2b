"""control.*: what the managers cost when the data plane does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.rows import rooms
from benchmarks.rows.pair import Pair, named, other
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape

THROUGHPUT = "control.throughput"
INIT_COST = "control.init_cost"
INIT_AFTER_PAUSE = "control.init_after_pause"
ROOM_MEMORY = "control.room_memory"
BURST = 32
# A scheduler's step. Looking more often takes the interpreter from the managers' threads, of either protocol.
PAUSE = 2e-3
# Long enough that whatever the call wakes sleeps, as between two requests that come alone.
APART = 5e-3


def benchmarks(plan: Plan) -> list[Benchmark]:
    managers, send = named(plan, "seed managers"), named(plan, "seed ZMQ send")
    many = many_rooms(plan)
    few = Setting("kvgrpc", "null", Shape(plan.regions, 64, plan.page_bytes, aux_items=64))
    return [
        Benchmark(
            metrics=(
                Metric(THROUGHPUT, "rooms/s", "higher", managers, Target(ratio=2.2)),
                Metric(f"{THROUGHPUT}.cpu", "us/room", "lower", managers),
            ),
            ours=lambda: Throughput(many, plan),
            baseline=lambda: Throughput(other(many, plan), plan),
        ),
        Benchmark(
            metrics=(
                Metric(INIT_COST, "us", "lower", send, Target(ratio=1)),
                Metric(f"{INIT_COST}.p99", "us", "lower", send, Target(value=50)),
            ),
            ours=lambda: InitCost(many, plan.timed_inits, INIT_COST, BURST),
            baseline=lambda: InitCost(other(many, plan), plan.timed_inits, INIT_COST, BURST),
        ),
        Benchmark(
            metrics=(
                Metric(INIT_AFTER_PAUSE, "us", "lower", send),
                Metric(f"{INIT_AFTER_PAUSE}.p99", "us", "lower", send),
            ),
            ours=lambda: InitCost(few, plan.busy_rooms, INIT_AFTER_PAUSE, 1, APART),
            baseline=lambda: InitCost(other(few, plan), plan.busy_rooms, INIT_AFTER_PAUSE, 1, APART),
        ),
        Benchmark(
            metrics=(Metric(ROOM_MEMORY, "B/room", "lower", managers, Target(value=2_000)),),
            ours=lambda: RoomMemory(many, plan),
            baseline=lambda: RoomMemory(other(many, plan), plan),
            warm_ups=0,
        ),
    ]


def many_rooms(plan: Plan) -> Setting:
    """Small pages that nothing moves."""
    shape = Shape(regions=1, pages=32_768, page_bytes=64, aux_items=plan.rooms_in_flight)
    return Setting("kvgrpc", "null", shape)


class Throughput(Pair):
    """All rooms in flight at once, one page each; rooms a second, and CPU of both processes for one of them."""

    def __init__(self, setting: Setting, plan: Plan, name: str = THROUGHPUT) -> None:
        super().__init__(setting)
        self._rooms = plan.rooms_in_flight
        self._name = name

    def turn(self) -> Figures:
        seconds = self.hand_off(self.orders(self._rooms, 1, PAUSE), rooms.receive_together)
        return {self._name: self._rooms / seconds, f"{self._name}.cpu": self.cpu_seconds / self._rooms * 1e6}


class InitCost(Pair):
    """Time of ``init`` on the caller's thread, in bursts, ``apart`` seconds after what was before has ended."""

    def __init__(self, setting: Setting, number: int, name: str, burst: int, apart: float = 0.0) -> None:
        super().__init__(setting)
        self._rooms = number
        self._percentiles = {name: 50, f"{name}.p99": 99}
        self._bursts = burst, apart

    def turn(self) -> Figures:
        took = self.hand_off(self.orders(self._rooms, 1, PAUSE), rooms.time_inits, *self._bursts)
        return {name: percentile(took, percent) * 1e6 for name, percent in self._percentiles.items()}


@dataclass
class RoomMemory:
    """By how much both processes grow for each room in flight; every turn in fresh processes."""

    setting: Setting
    plan: Plan
    name: str = ROOM_MEMORY
    highest: int = 0

    def turn(self) -> Figures:
        pair = Pair(self.setting)
        try:
            orders = pair.orders(self.plan.rooms_in_flight, 1, PAUSE)
            pair.prefill.call(rooms.note_resident)
            pair.prefill.call(rooms.prepare_prefill, orders, None)
            grown = pair.decode.call(rooms.hold_at_decode, orders) + pair.prefill.call(rooms.hold_at_prefill, orders)
            self.highest = max(self.highest, pair.peak_rss())
        finally:
            pair.close()
        return {self.name: grown / self.plan.rooms_in_flight}

    def peak_rss(self) -> int:
        return self.highest

    def close(self) -> None: ...


def percentile(samples: Sequence[float], percent: float) -> float:
    return float(np.percentile(samples, percent))
