"""handoff.*: one room or many, from init at decode to Success at decode."""

from __future__ import annotations

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.rows import rooms
from benchmarks.rows.control import percentile
from benchmarks.rows.pair import Pair, named, other
from benchmarks.rows.rooms import Between
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape

LATENCY = "handoff.latency"
CONTROL_LATENCY = "handoff.control_latency"
BUSY_ENGINE, TORCH_ENGINE = "handoff.busy_engine", "handoff.torch_engine"
FIRST_CONTACT = "handoff.first_contact"
CONCURRENT = "handoff.concurrent"
# Seconds between two looks of an engine. Naps of 100 us would be the floor of every control row (shared memory alone
# takes one), naps below 200 us take cores from Mooncake in the rows that move bytes, of either protocol.
CONTROL_PAUSE, ENGINE_STEP, PAGE_PAUSE, BULK_PAUSE = 10e-6, 300e-6, 200e-6, 1e-3
SEED = "seed protocol"


def benchmarks(plan: Plan) -> list[Benchmark]:
    protocol = named(plan, SEED)
    pages = min(plan.sequential_rooms, 64)
    page = Shape(plan.regions, pages, plan.page_bytes, aux_items=pages)
    moving, still = Setting("kvgrpc", "mooncake", page), Setting("kvgrpc", "null", page)
    many = setting_of_concurrent(plan)
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    return [
        Benchmark(
            metrics=(
                Metric(LATENCY, "ms", "lower", protocol, Target(ratio=1.3)),
                Metric(f"{LATENCY}.p99", "ms", "lower", protocol),
            ),
            ours=lambda: Latency(moving, plan.sequential_rooms, LATENCY, PAGE_PAUSE),
            baseline=lambda: Latency(other(moving, plan), plan.sequential_rooms, LATENCY, PAGE_PAUSE),
            missing=missing,
        ),
        Benchmark(
            metrics=(
                Metric(CONTROL_LATENCY, "ms", "lower", protocol, Target(ratio=0.7, of_limit=0.95)),
                Metric(f"{CONTROL_LATENCY}.p99", "ms", "lower", protocol, Target(ratio=0.8)),
            ),
            ours=lambda: Latency(still, plan.control_rooms, CONTROL_LATENCY, CONTROL_PAUSE),
            baseline=lambda: Latency(other(still, plan), plan.control_rooms, CONTROL_LATENCY, CONTROL_PAUSE),
        ),
        Benchmark(
            metrics=(
                Metric(BUSY_ENGINE, "ms", "lower", protocol, Target(ratio=5)),
                Metric(f"{BUSY_ENGINE}.p99", "ms", "lower", protocol, Target(ratio=1)),
            ),
            ours=lambda: Latency(still, plan.busy_rooms, BUSY_ENGINE, ENGINE_STEP, between=Between.PYTHON),
            baseline=lambda: Latency(
                other(still, plan), plan.busy_rooms, BUSY_ENGINE, ENGINE_STEP, between=Between.PYTHON
            ),
        ),
        Benchmark(
            metrics=(
                Metric(TORCH_ENGINE, "ms", "lower", protocol, Target(ratio=0.9)),
                Metric(f"{TORCH_ENGINE}.p99", "ms", "lower", protocol),
            ),
            ours=lambda: Latency(still, plan.busy_rooms, TORCH_ENGINE, ENGINE_STEP, between=Between.TORCH),
            baseline=lambda: Latency(
                other(still, plan), plan.busy_rooms, TORCH_ENGINE, ENGINE_STEP, between=Between.TORCH
            ),
        ),
        Benchmark(
            metrics=(
                Metric(FIRST_CONTACT, "ms", "lower", protocol, Target(ratio=1.3)),
                Metric(f"{FIRST_CONTACT}.ready", "ms", "lower", protocol, Target(ratio=0.7)),
            ),
            ours=lambda: FirstContact(moving, plan.contacts, FIRST_CONTACT),
            baseline=lambda: FirstContact(other(moving, plan), plan.contacts, FIRST_CONTACT),
            missing=missing,
        ),
        Benchmark(
            metrics=(Metric(CONCURRENT, "GB/s", "higher", protocol, Target(ratio=2)),),
            ours=lambda: Concurrent(many, plan),
            baseline=lambda: Concurrent(other(many, plan), plan),
            missing=missing,
        ),
    ]


def setting_of_concurrent(plan: Plan) -> Setting:
    shape = Shape(
        plan.concurrent_regions,
        plan.concurrent_rooms * plan.concurrent_pages,
        plan.page_bytes,
        aux_items=plan.concurrent_rooms,
    )
    return Setting("kvgrpc", "mooncake", shape)


class Latency(Pair):
    """One room of one page after the other."""

    def __init__(
        self,
        setting: Setting,
        number: int,
        name: str,
        pause: float,
        *,
        tail: bool = True,
        between: Between = Between.NAP,
    ) -> None:
        super().__init__(setting)
        self._rooms = number
        self._percentiles = {name: 50, f"{name}.p99": 99} if tail else {name: 50}
        self._pause = pause
        self._between = between

    def turn(self) -> Figures:
        orders = self.orders(self._rooms, 1, self._pause, self._between)
        took = self.hand_off(orders, rooms.receive_one_by_one)
        return {name: percentile(took, percent) * 1e3 for name, percent in self._percentiles.items()}


class FirstContact(Pair):
    """Resolve, connect, first room; both managers, and the data plane's engines, are new each time. ``ready``: until
    its pages may be given too.
    """

    def __init__(self, setting: Setting, contacts: int, name: str, *, ready: bool = True) -> None:
        super().__init__(setting)
        self._contacts = contacts
        self._names = (name, f"{name}.ready")[: 1 + ready]

    def turn(self) -> Figures:
        took = []
        for _ in range(self._contacts):
            self.reopen()
            ready, done = self.hand_off_cold(self.orders(1, 1, PAGE_PAUSE), rooms.receive_first)
            took.append((done, ready))
        return {
            name: percentile(each, 50) * 1e3 for name, each in zip(self._names, zip(*took, strict=True), strict=False)
        }


class Concurrent(Pair):
    """Many rooms of scattered pages at once."""

    def __init__(self, setting: Setting, plan: Plan, name: str = CONCURRENT) -> None:
        super().__init__(setting)
        self._plan, self._name = plan, name
        self._bytes = setting.shape.regions * setting.shape.region_bytes

    def turn(self) -> Figures:
        orders = self.orders(self._plan.concurrent_rooms, self._plan.concurrent_pages, BULK_PAUSE)
        return {self._name: self._bytes / self.hand_off(orders, rooms.receive_together) / 1e9}
