"""index.native.direct.*: `PrefixIndex` of the Rust crate in its own process, beside Dynamo's ``dynamo-kv-router``.

Both sides have the blocks of one made-up fleet, and are asked by one thread. Ours follows the fleet's streams; Dynamo's
tree is given typed events. What it is built with: ``.ci/rust dynamo``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric
from benchmarks.rows.native_index import BUILT, ENGINES, LOAD_SECONDS, TIMES_AS_MANY, fleet

DIRECT = "index.native.direct"
APPLY, MEMORY = f"{DIRECT}.apply", f"{DIRECT}.memory"
OURS, DYNAMO = BUILT / "examples/direct", BUILT / "beside-dynamo"
CRATE = "dynamo-kv-router 1.6.1"

# What a program says that was run with these blocks, seconds and task.
Run = Callable[[int, float, str], dict[str, float]]


def benchmarks(plan: Plan) -> list[Benchmark]:
    blocks, seconds = plan.native_index_blocks, plan.native_index_seconds
    missing = "not built: make native"
    if OURS.exists():
        missing = "" if DYNAMO.exists() else "not built: .ci/rust dynamo"
    return [
        Benchmark(
            metrics=(
                Metric(DIRECT, "queries/s", "higher", CRATE),
                Metric(f"{DIRECT}.p50", "us", "lower", CRATE),
                Metric(f"{DIRECT}.p99", "us", "lower", CRATE),
            ),
            ours=lambda: Asked(of_ours, blocks, seconds),
            baseline=lambda: Asked(of_dynamo, blocks, seconds),
            missing=missing,
            warm_ups=0,
        ),
        Benchmark(
            metrics=(Metric(APPLY, "batches/s", "higher", CRATE),),
            ours=lambda: Applied(of_ours, blocks, seconds),
            baseline=lambda: Applied(of_dynamo, blocks, seconds),
            missing=missing,
            warm_ups=0,
        ),
        Benchmark(
            metrics=(Metric(MEMORY, "B/block", "lower", CRATE),),
            ours=lambda: Grown(of_ours, blocks, seconds),
            baseline=lambda: Grown(of_dynamo, blocks, seconds),
            missing=missing,
            warm_ups=0,
        ),
    ]


def of_ours(blocks: int, seconds: float, task: str) -> dict[str, float]:
    if task == "apply":
        return _said([str(OURS), "none", str(ENGINES), str(blocks), str(seconds), task])
    served = fleet(blocks, 0, task)
    try:
        return _said([str(OURS), served.address, str(ENGINES), str(blocks), str(seconds), task])
    finally:
        served.close()


def of_dynamo(blocks: int, seconds: float, task: str) -> dict[str, float]:
    return _said([str(DYNAMO), str(ENGINES), str(blocks), str(seconds), task])


def _said(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS)
    if done.returncode:
        raise AssertionError(done.stderr)
    return dict(json.loads(done.stdout))


class _Side:
    def __init__(self, run: Run, blocks: int, seconds: float) -> None:
        self._run, self._blocks, self._seconds, self._highest = run, blocks, seconds, 0.0

    def _said(self, task: str, blocks: int | None = None) -> dict[str, float]:
        said = self._run(blocks or self._blocks, self._seconds, task)
        self._highest = max(self._highest, said["rss"])
        return said

    def peak_rss(self) -> int:
        return int(self._highest)

    def close(self) -> None: ...


class Asked(_Side):
    """Who holds the beginning of conversations of 512 blocks, all answers checked."""

    def turn(self) -> Figures:
        said = self._said("chains")
        return {DIRECT: said["questions"], f"{DIRECT}.p50": said["p50"], f"{DIRECT}.p99": said["p99"]}


class Applied(_Side):
    """Batches that store eight blocks and remove eight, decoded beforehand."""

    def turn(self) -> Figures:
        return {APPLY: self._said("apply")["batches"]}


class Grown(_Side):
    """By how much a process grows for each distinct block more, of which half of the engines have each."""

    def turn(self) -> Figures:
        few, many = self._said("half")["rss"], self._said("half", TIMES_AS_MANY * self._blocks)["rss"]
        return {MEMORY: (many - few) / (2 * (TIMES_AS_MANY - 1) * self._blocks)}
