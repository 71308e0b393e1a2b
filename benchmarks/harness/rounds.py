"""Runs a benchmark: both contenders alive, turn and turn about, medians over the rounds."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.harness.table import Metric, Row

Figures = Mapping[str, float]


class Contender(Protocol):
    """One side of a benchmark, in processes of its own."""

    def turn(self) -> Figures:
        """Does the work once and checks what came of it; the figures by the name of their metric."""

    def peak_rss(self) -> int:
        """Bytes, of all its processes together."""

    def close(self) -> None:
        """Ends its processes."""


@dataclass(frozen=True)
class Benchmark:
    """One piece of work that gives one or more metrics. ``missing`` says what it needs and this machine lacks.

    ``starts``: how often both sides are started anew, where processes of the same program differ by more than turns do.
    """

    metrics: tuple[Metric, ...]
    ours: Callable[[], Contender]
    baseline: Callable[[], Contender]
    missing: str = ""
    warm_ups: int = 1
    starts: int = 1

    @property
    def name(self) -> str:
        return self.metrics[0].name

    def matches(self, prefixes: Sequence[str]) -> bool:
        return not prefixes or any(metric.name.startswith(prefix) for metric in self.metrics for prefix in prefixes)


@dataclass
class _Samples:
    ours: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)


def run(benchmark: Benchmark, rounds: int) -> list[Row]:
    """The rows of one benchmark, from that many rounds a start. Raises whatever a contender raises; both are closed in
    any case.
    """
    samples = {metric.name: _Samples() for metric in benchmark.metrics}
    memory = [_run_once(benchmark, rounds, samples) for _ in range(benchmark.starts)]
    return [_row(metric, samples[metric.name], max(memory)) for metric in benchmark.metrics]


def _run_once(benchmark: Benchmark, rounds: int, samples: Mapping[str, _Samples]) -> tuple[int, int]:
    """From the start of both sides to their end; their peak memory."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(contextlib.closing(benchmark.ours()))
        baseline = stack.enter_context(contextlib.closing(benchmark.baseline()))
        for _ in range(benchmark.warm_ups):
            ours.turn()
            baseline.turn()
        for number in range(rounds):
            ours_first = number % 2 == 0
            for is_ours in (ours_first, not ours_first):
                for name, value in (ours if is_ours else baseline).turn().items():
                    (samples[name].ours if is_ours else samples[name].baseline).append(value)
        return ours.peak_rss(), baseline.peak_rss()


def _row(metric: Metric, samples: _Samples, memory: tuple[int, int]) -> Row:
    """The ratio is the median of those of the rounds: what slows both sides of a round down cancels out."""
    ratios = [_ratio(metric, ours, theirs) for ours, theirs in zip(samples.ours, samples.baseline, strict=True)]
    return Row(
        metric=metric,
        value=statistics.median(samples.ours),
        baseline_value=statistics.median(samples.baseline),
        ratio=statistics.median(ratios),
        runs=len(ratios),
        spread=(max(ratios) - min(ratios)) / statistics.median(ratios),
        rss=memory[0],
        baseline_rss=memory[1],
    )


def _ratio(metric: Metric, ours: float, baseline: float) -> float:
    return ours / baseline if metric.better == "higher" else baseline / ours
