"""What README and docs say about speed, and the rows that must bear it out: ``make bench`` ends with what its run does
not support. tests/integration/test_benchmarks.py looks whether each sentence still stands where it is said to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.harness.table import Metric, Row, Target

README, CASES, LESSONS = "README.md", "docs/session/cases.md", "docs/lessons.md"
PERFORMANCE, INDEX = "docs/performance.md", "docs/prefix-index.md"


@dataclass(frozen=True, slots=True)
class Claim:
    """``says``: a sentence of the page ``where``, or a part of one, by the row that shows it and what it must reach.

    ``against``: of hand-offs, beside which baseline; a run beside the other says nothing of it.
    """

    says: str
    where: str
    row: str
    reach: Target
    against: str = "seed"


CLAIMS = (
    Claim("It takes 3 us, one in a hundred up to 0.4 ms", README, "engine.poll.p99", Target(value=400)),
    Claim("decode Failed PEER_LOST within 1 s", CASES, "liveness.detect", Target(value=1000)),
    Claim("prefill's death is known within 1 s", LESSONS, "liveness.detect", Target(value=1000)),
    Claim("decode's within 2 s", LESSONS, "liveness.detect.decode", Target(value=2000)),
    Claim("some 16 times as fast", LESSONS, "handoff.head_slice.split", Target(ratio=12)),
    Claim("An `init` takes its engine 50 us at p99", PERFORMANCE, "control.init_cost.p99", Target(value=50)),
    Claim(
        "Beside engines that compute in Python a room takes a fifth of the baseline's time",
        PERFORMANCE,
        "handoff.busy_engine",
        Target(ratio=5),
    ),
    Claim(
        "64 rooms of scattered pages move at 1.3 times its rate", PERFORMANCE, "handoff.concurrent", Target(ratio=1.3)
    ),
    Claim("20,000 rooms in flight are handed over sooner", PERFORMANCE, "control.throughput", Target(ratio=1)),
    Claim(
        "a room of 10,000 scattered pages takes no longer",
        PERFORMANCE,
        "handoff.pages.scattered.10000",
        Target(ratio=1),
    ),
    Claim("one lone room takes up to three times as long", PERFORMANCE, "handoff.control_latency", Target(ratio=0.33)),
    Claim("up to five times beside 31 other pairs", PERFORMANCE, "handoff.pairs.32", Target(ratio=0.2)),
    Claim("Shared memory moves 0.6 of what memcpy does", PERFORMANCE, "dataplane.shm.1MiB", Target(ratio=0.6)),
    Claim("Shared memory moves 0.6 of what memcpy does", PERFORMANCE, "dataplane.shm.32KiB", Target(ratio=0.6)),
    Claim(
        "Replay of batches of 300 B is five times as fast as ROUTER's",
        PERFORMANCE,
        "events.replay.300B",
        Target(ratio=5),
    ),
    Claim(
        "Live events come ten times as soon as the seeds' while four clients replay",
        PERFORMANCE,
        "events.live_during_replay.p99",
        Target(ratio=10),
    ),
    Claim("more than 12,000 single questions", INDEX, "index.native.score", Target(value=12_000)),
    Claim("more than 50,000 in batches of 16", INDEX, "index.native.batch16", Target(value=50_000)),
    Claim("the index in Python more than 600", INDEX, "index.served.score", Target(value=600)),
    Claim("600 and 1,800", INDEX, "index.served.batch16", Target(value=1_800)),
)


def measured(rows: Sequence[Row], against: str = "seed") -> list[tuple[Claim, Row]]:
    """Claims with their row, of those that a run beside this baseline measured."""
    known = {row.metric.name: row for row in rows}
    return [(claim, known[claim.row]) for claim in CLAIMS if claim.row in known and claim.against == against]


def unsupported(rows: Sequence[Row], against: str = "seed") -> list[tuple[Claim, Row]]:
    """Claims whose row was measured and does not reach what they say. Rows that were not run say nothing."""
    return [(claim, row) for claim, row in measured(rows, against) if not _holds(claim, row)]


def say(rows: Sequence[Row], console: Console, against: str) -> None:
    """Prints what this run does not support, and how many claims it was asked about."""
    asked = len(measured(rows, against))
    if not asked:
        return
    left = unsupported(rows, against)
    console.print(f"{asked - len(left)} of {asked} claims of README and docs are supported by this run.")
    for claim, row in left:
        wanted = claim.reach.describe(row.metric.unit, row.metric.better)
        console.print(
            f"[red]not supported[/] {claim.where}: {claim.says!r}: {claim.row} has {row.value:.4g} {row.metric.unit},"
            f" {row.ratio:.2f} of {row.metric.baseline}; wanted {wanted}",
            highlight=False,
        )


def _holds(claim: Claim, row: Row) -> bool:
    metric = Metric(row.metric.name, row.metric.unit, row.metric.better, row.metric.baseline, claim.reach)
    return Row(metric, row.value, row.baseline_value, row.ratio, row.runs, row.spread).met is not False
