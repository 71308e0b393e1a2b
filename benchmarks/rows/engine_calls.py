"""engine.poll, engine.ready: what calls cost an engine's thread that are made often, or wait for nobody."""

from __future__ import annotations

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.rows import rooms
from benchmarks.rows.control import percentile
from benchmarks.rows.handoff import CONTROL_PAUSE, SEED
from benchmarks.rows.pair import Pair, named, other
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape

POLL, READY = "engine.poll", "engine.ready"


def benchmarks(plan: Plan) -> list[Benchmark]:
    setting, baseline = setting_of_calls(plan), named(plan, SEED)
    return [
        Benchmark(
            metrics=(
                Metric(POLL, "us", "lower", baseline),
                Metric(f"{POLL}.p99", "us", "lower", baseline, Target(value=150)),
                Metric(f"{POLL}.max", "us", "lower", baseline),
            ),
            ours=lambda: Polls(setting, plan.control_rooms),
            baseline=lambda: Polls(other(setting, plan), plan.control_rooms),
        ),
        Benchmark(
            metrics=(Metric(READY, "us", "lower", baseline, Target(value=40)),),
            ours=lambda: Made(setting, plan.busy_rooms),
            baseline=lambda: Made(other(setting, plan), plan.busy_rooms),
        ),
    ]


def setting_of_calls(plan: Plan) -> Setting:
    return Setting("kvgrpc", "null", Shape(2, 64, plan.page_bytes, aux_items=64))


class Polls(Pair):
    """Each look of decode's engine at one open room after the other, some microseconds apart."""

    def __init__(self, setting: Setting, number: int, name: str = POLL) -> None:
        super().__init__(setting)
        self._rooms = number
        self._percentiles = {name: 50, f"{name}.p99": 99, f"{name}.max": 100}

    def turn(self) -> Figures:
        took = self.hand_off(self.orders(self._rooms, 1, CONTROL_PAUSE), rooms.time_polls)
        return {name: percentile(took, percent) * 1e6 for name, percent in self._percentiles.items()}


class Made(Pair):
    """From the making of a receiver until its pages may be given, on a session that stands."""

    def __init__(self, setting: Setting, number: int, name: str = READY) -> None:
        super().__init__(setting)
        self._name, self._rooms = name, number

    def turn(self) -> Figures:
        took = self.hand_off_cold(self.orders(self._rooms, 1, CONTROL_PAUSE), rooms.time_making)
        return {self._name: percentile(took, 50) * 1e6}
