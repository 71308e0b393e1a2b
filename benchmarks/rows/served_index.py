"""index.served.*: the index in Python while its fleet goes on, beside a bare server whose answers stand ready.

limit.index.served.*: the same bare server while it reads the streams of that fleet too, as every index has to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark
from benchmarks.harness.table import Metric, Target
from benchmarks.rows.native_index import BEST, ENGINES, Asked, Program, Start, in_python, missing, until_settled

SCORE, BATCH = "index.served.score", "index.served.batch16"
BASELINE = "a bare grpc.aio server, answers ready"
# Prompts of a call, and questions that are to be answered in a second: half of them where the slowest are measured.
CALLS = {SCORE: (1, 500), BATCH: (16, 1_000)}
SLOWEST_US = 10_000


def benchmarks(plan: Plan) -> list[Benchmark]:
    """Both rows, and the limit of each."""
    blocks, seconds = plan.native_index_blocks, plan.native_index_seconds
    baseline = partial(_bare, blocks, reads=False)

    def row(prefix: str, name: str, start: Start, ready: Callable[[str], None], *, aims: bool) -> Benchmark:
        row, (prompts, wanted) = prefix + name, CALLS[name]
        fast, slowest = (Target(value=wanted), Target(value=SLOWEST_US)) if aims else (Target(), Target())
        asked = partial(Asked, name=row, batch=prompts, blocks=blocks, seconds=seconds, pace=wanted // 2)
        return Benchmark(
            metrics=(
                Metric(row, "queries/s", "higher", BASELINE, fast),
                Metric(f"{row}.p99_paced", "us", "lower", BASELINE, slowest),
            ),
            ours=lambda: asked(start, ready=ready),
            baseline=lambda: asked(baseline, ready=_at_once),
            missing=missing(),
            warm_ups=0,
        )

    reading = partial(_bare, blocks, reads=True)
    return [
        *(row("", name, in_python, until_settled, aims=True) for name in CALLS),
        *(row("limit.", name, reading, _at_once, aims=False) for name in CALLS),
    ]


def _bare(blocks: int, source: str, *, reads: bool) -> Program:
    command = [sys.executable, "-m", "benchmarks.baselines.bare_index", str(ENGINES), str(blocks), str(BEST)]
    return Program([*command, *([source] if reads else [])])


def _at_once(address: str) -> None:
    """It says its address once it is ready."""
