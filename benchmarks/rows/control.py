"""control.*: what the managers cost when the data plane does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.rows import rooms
from benchmarks.rows.pair import Pair, other
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape

THROUGHPUT = "control.throughput"
INIT_COST = "control.init_cost"
ROOM_MEMORY = "control.room_memory"
BURST = 32
# A scheduler's step. Looking more often takes the interpreter from the managers' threads, of either protocol.
PAUSE = 2e-3


def benchmarks(plan: Plan) -> list[Benchmark]:
    many = many_rooms(plan)
    return [
        Benchmark(
            metrics=(Metric(THROUGHPUT, "rooms/s", "higher", "seed managers", Target(ratio=2.2)),),
            ours=lambda: Throughput(many, plan),
            baseline=lambda: Throughput(other(many), plan),
        ),
        Benchmark(
            metrics=(
                Metric(INIT_COST, "us", "lower", "seed ZMQ send", Target(ratio=1)),
                Metric(f"{INIT_COST}.p99", "us", "lower", "seed ZMQ send", Target(value=50)),
            ),
            ours=lambda: InitCost(many, plan),
            baseline=lambda: InitCost(other(many), plan),
        ),
        Benchmark(
            metrics=(Metric(ROOM_MEMORY, "B/room", "lower", "seed managers"),),
            ours=lambda: RoomMemory(many, plan),
            baseline=lambda: RoomMemory(other(many), plan),
            warm_ups=0,
        ),
    ]


def many_rooms(plan: Plan) -> Setting:
    """Small pages that nothing moves."""
    shape = Shape(regions=1, pages=32_768, page_bytes=64, aux_items=plan.rooms_in_flight)
    return Setting("kvgrpc", "null", shape)


class Throughput(Pair):
    """All rooms in flight at once, one page each."""

    def __init__(self, setting: Setting, plan: Plan, name: str = THROUGHPUT) -> None:
        super().__init__(setting)
        self._rooms = plan.rooms_in_flight
        self._name = name

    def turn(self) -> Figures:
        seconds = self.hand_off(self.orders(self._rooms, 1, PAUSE), rooms.receive_together)
        return {self._name: self._rooms / seconds}


class InitCost(Pair):
    """Time of ``init`` on the caller's thread, in bursts."""

    def __init__(self, setting: Setting, plan: Plan) -> None:
        super().__init__(setting)
        self._rooms = plan.timed_inits

    def turn(self) -> Figures:
        took = self.hand_off(self.orders(self._rooms, 1, PAUSE), rooms.time_inits, BURST)
        return {INIT_COST: percentile(took, 50) * 1e6, f"{INIT_COST}.p99": percentile(took, 99) * 1e6}


@dataclass
class RoomMemory:
    """By how much both processes grow for each room in flight; every turn in fresh processes."""

    setting: Setting
    plan: Plan
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
        return {ROOM_MEMORY: grown / self.plan.rooms_in_flight}

    def peak_rss(self) -> int:
        return self.highest

    def close(self) -> None: ...


def percentile(samples: list[float], percent: float) -> float:
    return float(np.percentile(samples, percent))
