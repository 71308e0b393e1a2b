"""handoff.few.*, .pages.*, .tiny: few rooms at a time, rooms of few and of many pages, and one small real write."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.harness.plan import KIB, Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.rows import rooms
from benchmarks.rows.control import percentile
from benchmarks.rows.handoff import CONTROL_PAUSE, PAGE_PAUSE, SEED, Latency
from benchmarks.rows.pair import Pair, named, other
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape

FEW, PAGES, TINY = "handoff.few", "handoff.pages", "handoff.tiny"
# Ratios by how many rooms are in flight, and by how many pages a room has that are adjacent, or scattered.
FEW_RATIOS = {10: 0.95, 100: 1.0, 1_000: 1.5, 10_000: 3.3}
ADJACENT_RATIOS = {1: 0.7, 100: 0.7, 10_000: 0.9}
SCATTERED_RATIOS = {100: 0.7, 10_000: 3.7, 100_000: 7.5}
TINY_BYTES = 4 * KIB
# K and V of one layer: a room of 100,000 pages is otherwise minutes of the baselines.
REGIONS = 2
# Of a turn: many small rooms, few large ones.
MOST_ROOMS, PAGES_OF_A_TURN = 300, 500_000


def benchmarks(plan: Plan) -> list[Benchmark]:
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"
    tiny = setting_of_tiny()
    return [
        *(_few(plan, count) for count in plan.few_rooms),
        *(_pages(plan, sized) for sized in sizes_of_pages(plan)),
        Benchmark(
            metrics=(
                Metric(TINY, "ms", "lower", named(plan, SEED), Target(ratio=1)),
                Metric(f"{TINY}.p99", "ms", "lower", named(plan, SEED), Target(ratio=2.3)),
            ),
            ours=lambda: Latency(tiny, plan.sequential_rooms, TINY, PAGE_PAUSE),
            baseline=lambda: Latency(other(tiny, plan), plan.sequential_rooms, TINY, PAGE_PAUSE),
            missing=missing,
        ),
    ]


def _few(plan: Plan, at_once: int) -> Benchmark:
    name = f"{FEW}.{at_once}"
    setting, in_all = setting_of_few(plan, at_once)
    return Benchmark(
        metrics=(Metric(name, "rooms/s", "higher", named(plan, SEED), Target(ratio=FEW_RATIOS.get(at_once))),),
        ours=lambda: FewRooms(setting, name, in_all, at_once),
        baseline=lambda: FewRooms(other(setting, plan), name, in_all, at_once),
    )


def _pages(plan: Plan, sized: SizedRooms) -> Benchmark:
    name = f"{PAGES}.{sized.name}"
    ratio = (ADJACENT_RATIOS if sized.adjacent else SCATTERED_RATIOS).get(sized.pages)
    return Benchmark(
        metrics=(Metric(name, "ms", "lower", named(plan, SEED), Target(ratio=ratio)),),
        ours=lambda: PagesOfARoom(sized.setting, name, sized),
        baseline=lambda: PagesOfARoom(other(sized.setting, plan), name, sized),
    )


def setting_of_tiny() -> Setting:
    return Setting("kvgrpc", "mooncake", Shape(REGIONS, 64, TINY_BYTES, aux_items=64))


def setting_of_few(plan: Plan, at_once: int) -> tuple[Setting, int]:
    """And how many rooms a turn has."""
    in_all = 2 * max(at_once, plan.pair_rooms // 2)
    return Setting("kvgrpc", "null", Shape(REGIONS, 1024, 64, aux_items=in_all)), in_all


@dataclass(frozen=True, slots=True)
class SizedRooms:
    """``rooms`` of a turn, each of so many pages, adjacent on both sides or on neither."""

    rooms: int
    pages: int
    adjacent: bool

    @property
    def name(self) -> str:
        return f"{'adjacent' if self.adjacent else 'scattered'}.{self.pages}"

    @property
    def setting(self) -> Setting:
        return Setting("kvgrpc", "null", Shape(REGIONS, 2 * self.pages, 64, aux_items=self.rooms))


def sizes_of_pages(plan: Plan) -> list[SizedRooms]:
    """All but the largest adjacent, and all but the smallest scattered."""
    of_turn = {
        count: min(MOST_ROOMS, plan.control_rooms, max(5, PAGES_OF_A_TURN // count)) for count in plan.room_pages
    }
    return [
        *(SizedRooms(of_turn[count], count, adjacent=True) for count in plan.room_pages[:-1]),
        *(SizedRooms(of_turn[count], count, adjacent=False) for count in plan.room_pages[1:]),
    ]


class FewRooms(Pair):
    """So many rooms in flight, the next as soon as one is done; one page each."""

    def __init__(self, setting: Setting, name: str, rooms_in_all: int, at_once: int) -> None:
        super().__init__(setting)
        self._name, self._rooms, self._at_once = name, rooms_in_all, at_once

    def turn(self) -> Figures:
        orders = self.orders(self._rooms, 1, CONTROL_PAUSE)
        return {self._name: self._rooms / self.hand_off(orders, rooms.receive_some_at_once, self._at_once)}


class PagesOfARoom(Pair):
    """One room after the other."""

    def __init__(self, setting: Setting, name: str, sized: SizedRooms) -> None:
        super().__init__(setting)
        self._name, self._sized = name, sized

    def turn(self) -> Figures:
        sized = self._sized
        orders = self.orders(sized.rooms, sized.pages, CONTROL_PAUSE, adjacent=sized.adjacent)
        return {self._name: percentile(self.hand_off(orders, rooms.receive_one_by_one), 50) * 1e3}
