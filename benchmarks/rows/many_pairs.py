"""handoff.pairs.*, idle.*: one decode and many prefill ranks, each in a process of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Family, Worker
from benchmarks.rows import rooms
from benchmarks.rows.control import PAUSE, percentile
from benchmarks.rows.handoff import CONTROL_PAUSE, SEED
from benchmarks.rows.pair import named, other
from benchmarks.rows.rooms import Orders
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape

PAIRS, IDLE = "handoff.pairs", "idle.pairs"
# CPU of 32 idle pairs at decode, and of the one of a prefill.
IDLE_TARGETS, PREFILL_MS = {32: 5.0}, 1.0
# Of all ranks together, one after the other.
LONE_ROOMS = 320
# What the last rooms began is over then.
SETTLED_SECONDS = 0.5


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [_benchmark(plan, pairs) for pairs in plan.pairs]


def _benchmark(plan: Plan, pairs: int) -> Benchmark:
    setting = Setting("kvgrpc", "null", shape_of_many(plan))
    baseline = named(plan, SEED)
    name, idle = f"{PAIRS}.{pairs}", f"{IDLE}.{pairs}"
    return Benchmark(
        metrics=(
            Metric(name, "ms", "lower", baseline, Target(ratio=0.7)),
            Metric(f"{name}.p99", "ms", "lower", baseline),
            Metric(f"{name}.rooms", "rooms/s", "higher", baseline, Target(ratio=1.5)),
            Metric(idle, "ms/s", "lower", baseline, Target(value=IDLE_TARGETS.get(pairs))),
            Metric(f"{idle}.prefill", "ms/s", "lower", baseline, Target(value=PREFILL_MS)),
        ),
        ours=lambda: ManyPairs(setting, plan, pairs),
        baseline=lambda: ManyPairs(other(setting, plan), plan, pairs),
    )


def shape_of_many(plan: Plan) -> Shape:
    return Shape(2, 1024, 4096, aux_items=plan.pair_rooms)


def lone_rooms_of_each(pairs: int) -> int:
    return max(2, LONE_ROOMS // pairs)


class ManyPairs:
    """A turn: a lone room of each prefill after the other, some rooms of all at once, and a while without any."""

    def __init__(self, setting: Setting, plan: Plan, pairs: int) -> None:
        self._shape = setting.shape
        self._plan, self.pairs = plan, pairs
        self._next_room = 1
        self._family = Family(f"{setting.protocol}-prefill", rooms.MODULES[setting.protocol])
        self._decode = Worker(f"{setting.protocol}-decode")
        try:
            self._prefills = [self._family.fork() for _ in range(pairs)]
            loading = self._decode.begin(rooms.load, setting)
            opening = [prefill.begin(rooms.start_prefill, setting) for prefill in self._prefills]
            self._bootstraps = [each.result() for each in opening]
            loading.result()
            self._decode.call(rooms.start_decode, setting, self._bootstraps[0])
        except BaseException:
            self.close()
            raise

    def turn(self) -> Figures:
        name, idle = f"{PAIRS}.{self.pairs}", f"{IDLE}.{self.pairs}"
        took = self.lone_rooms()
        at_once = self.rooms_at_once()
        decode, prefill = self._idle(self._plan.idle_seconds)
        return {
            name: percentile(took, 50) * 1e3,
            f"{name}.p99": percentile(took, 99) * 1e3,
            f"{name}.rooms": at_once,
            idle: decode * 1e3,
            f"{idle}.prefill": prefill * 1e3,
        }

    def peak_rss(self) -> int:
        return self._decode.peak_rss() + sum(prefill.peak_rss() for prefill in self._prefills)

    def close(self) -> None:
        self._decode.close()
        self._family.close()

    def lone_rooms(self) -> list[float]:
        """Seconds of each."""
        took: list[float] = []
        of_each = lone_rooms_of_each(self.pairs)
        for prefill, bootstrap in zip(self._prefills, self._bootstraps, strict=True):
            orders = self._orders(of_each, CONTROL_PAUSE)
            prefill.call(rooms.prepare_prefill, orders, None)
            self._decode.call(rooms.prepare_decode, orders, None)
            self._decode.call(rooms.make_receivers, orders, bootstrap)
            sending = prefill.begin(rooms.send_rooms, orders)
            took += self._decode.call(rooms.receive_one_by_one, orders)
            sending.result()
        return took

    def rooms_at_once(self) -> float:
        """Rooms a second."""
        of_each = self._plan.pair_rooms // self.pairs
        all_orders = [self._orders(of_each, PAUSE) for _ in self._prefills]
        sides = list(zip(self._prefills, all_orders, strict=True))
        for prefill, orders in sides:
            prefill.call(rooms.prepare_prefill, orders, None)
        self._decode.call(make_receivers_of_all, all_orders, self._bootstraps)
        sending = [prefill.begin(rooms.send_rooms, orders) for prefill, orders in sides]
        together = dataclasses.replace(all_orders[0], rooms=of_each * self.pairs)
        took = self._decode.call(rooms.receive_together, together)
        for each in sending:
            each.result()
        return of_each * self.pairs / took

    def _idle(self, seconds: float) -> tuple[float, float]:
        """Seconds of CPU a second, of decode and of one prefill."""
        time.sleep(SETTLED_SECONDS)
        workers = (self._decode, self._prefills[0])
        before = [worker.call(rooms.cpu_used) for worker in workers]
        time.sleep(seconds)
        decode, prefill = (worker.call(rooms.cpu_used) - was for worker, was in zip(workers, before, strict=True))
        return decode / seconds, prefill / seconds

    def _orders(self, number: int, pause: float) -> Orders:
        shape = self._shape
        orders = Orders(self._next_room, number, 1, shape.pages, shape.aux_items, pause)
        self._next_room += number
        return orders


def make_receivers_of_all(desk: Desk, all_orders: Sequence[Orders], bootstraps: Sequence[str]) -> None:
    """Those of each prefill follow one another, as a router spreads requests."""
    made = []
    for orders, bootstrap in zip(all_orders, bootstraps, strict=True):
        rooms.make_receivers(desk, orders, bootstrap)
        made.append(desk.items[rooms.RECEIVERS])
    desk.items[rooms.RECEIVERS] = [receiver for some in zip(*made, strict=True) for receiver in some]
