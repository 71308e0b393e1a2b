"""``python -m tests.simulation RUNS [--seed N] [--off 2,4,8] [-v]``: random schedules of the real cores, replayable."""

from __future__ import annotations

import argparse
import multiprocessing
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.simulation.schedules import Schedule
from tests.simulation.switches import cores


@dataclass
class Result:
    """What one schedule came to."""

    seed: int
    violations: list[tuple[int, str, object]]
    outcomes: Counter[str]
    held: Counter[str]
    promises: dict[str, list[int]]


def run_one(job: tuple[int, tuple[int, ...]]) -> Result:
    seed, off = job
    world = Schedule(seed, *cores(off)).run()
    return Result(seed, world.violations, world.outcomes, world.held, world.promises.kept)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("runs", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--off", default="", help="rules to switch off, for example 2,8")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the log of the first schedule")
    arguments = parser.parse_args()
    off = tuple(int(rule) for rule in arguments.off.split(",") if rule)
    if arguments.verbose:
        for line in Schedule(arguments.seed, *cores(off)).run().log:
            print(*line)
    with multiprocessing.Pool() as pool:
        jobs = [(seed, off) for seed in range(arguments.seed, arguments.seed + arguments.runs)]
        return report(list(pool.imap_unordered(run_one, jobs, 10)), arguments.off)


def report(results: list[Result], off: str) -> int:
    """Prints a summary; 1 when something was violated."""
    outcomes: Counter[str] = sum((result.outcomes for result in results), Counter())
    held: Counter[str] = sum((result.held for result in results), Counter())
    kinds: Counter[str] = Counter()
    promises: dict[str, list[int]] = defaultdict(list)
    for result in results:
        kinds.update(re.sub(r" on page .*", "", what) for _, what, _ in result.violations)
        for what, ticks in result.promises.items():
            promises[what] += ticks
    broken = sorted((result for result in results if result.violations), key=lambda result: result.seed)
    print(f"{len(results)} schedules, {sum(outcomes.values())} handles, {len(broken)} schedules with violations")
    print("ended:", dict(sorted(outcomes.items())))
    print("pages held at the end, allowed:", dict(held))
    for what, ticks in sorted(promises.items()):
        ticks.sort()
        print(f"{what}: {len(ticks)} times, median {ticks[len(ticks) // 2] / 10} s, longest {ticks[-1] / 10} s")
    for what, count in kinds.most_common():
        print(f"VIOLATION {count:6d}  {what}")
    for result in broken[:5]:
        switch = f" --off {off}" if off else ""
        print(f"replay: python -m tests.simulation 1 --seed {result.seed}{switch} -v   # {result.violations[0]}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
