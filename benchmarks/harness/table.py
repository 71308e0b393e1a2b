"""A row of the results, its target, and how rows are shown and stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

Better = Literal["higher", "lower"]
# Fewer points than that are a table.
LEAST_FOR_A_PLOT = 3


@dataclass(frozen=True, slots=True)
class Target:
    """What a row must reach: a ratio to the baseline, a value in the row's unit, or both.

    ``of_limit``: this share of its limit's ratio is enough too, where that is less than ``ratio``. ``below``: the value
    may be less than the baseline's by that much, where higher is better.
    """

    ratio: float | None = None
    value: float | None = None
    of_limit: float | None = None
    below: float | None = None

    def describe(self, unit: str, better: Better) -> str:
        said = []
        if self.ratio is not None:
            said.append(f">= {self.ratio:g}x" + (f" or {self.of_limit:g} of limit" if self.of_limit else ""))
        if self.below is not None:
            said.append(f">= baseline - {self.below:g} {unit}")
        if self.value is not None:
            said.append(f"{'>=' if better == 'higher' else '<='} {self.value:g} {unit}")
        return ", ".join(said)


@dataclass(frozen=True, slots=True)
class Metric:
    """What one row measures."""

    name: str
    unit: str
    better: Better
    baseline: str
    target: Target = Target()


@dataclass(frozen=True, slots=True)
class Row:
    """One metric measured: medians over the rounds; memory in bytes, of all processes of that side. ``limit`` is the
    row that says how far it could come, once all are measured."""

    metric: Metric
    value: float
    baseline_value: float
    ratio: float
    runs: int
    spread: float
    rss: int = 0
    baseline_rss: int = 0
    limit: Row | None = None

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        target, metric = self.metric.target, self.metric
        if target.below is not None:
            return self.value >= self.baseline_value - target.below
        if target.ratio is None and target.value is None:
            return None
        least = target.ratio or 0.0
        if target.of_limit is not None and self.limit is not None:
            least = min(least, target.of_limit * self.limit.ratio)
        ratio_met = self.ratio >= least
        if target.value is None:
            return ratio_met
        return ratio_met and (self.value >= target.value if metric.better == "higher" else self.value <= target.value)


@dataclass(frozen=True, slots=True)
class Problem:
    """A benchmark that gave no figures, and why. ``skipped``: for want of something, not for an error."""

    name: str
    reason: str
    skipped: bool = False


def show(rows: Sequence[Row], problems: Sequence[Problem], console: Console) -> None:
    """Prints one table. Ratios above 1 always mean that ours is better."""
    table = Table(title="kvgrpc beside its baselines (ratio > 1: kvgrpc is better)", title_justify="left")
    for heading in ("name", "unit"):
        table.add_column(heading)
    for heading in ("kvgrpc", "baseline", "ratio", "spread", "target", "runs", "peak RSS"):
        table.add_column(heading, justify="right")
    table.add_column("baseline is")
    for row in rows:
        colour = {None: "", True: "green", False: "red"}[row.met]
        ratio = f"[{colour}]{row.ratio:.2f}[/]" if colour else f"{row.ratio:.2f}"
        name, unit, value, baseline, _, spread, target, runs, rss, what = _cells(row)
        table.add_row(name, unit, value, baseline, ratio, spread, target, runs, rss, what)
    console.print(table)
    for problem in problems:
        word = "[yellow]skipped[/]" if problem.skipped else "[red]FAILED[/]"
        console.print(f"{word} {problem.name}: ", end="")
        console.print(problem.reason, markup=False)


def markdown(rows: Sequence[Row]) -> str:
    """The same table for docs/performance.md."""
    lines = [
        "| name | unit | kvgrpc | baseline | ratio | spread | target | peak RSS | baseline is |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        name, unit, value, baseline, ratio, spread, target, _, rss, what = _cells(row)
        bold = "**" if row.met is False else ""
        cells = (f"`{name}`", unit, value, baseline, f"{bold}{ratio}{bold}", spread, target, rss, what)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plots(rows: Sequence[Row]) -> str:
    """A mermaid chart of each family of rows that differ by a last number alone, for a page: ours and the baseline."""
    families: dict[str, dict[int, Row]] = {}
    for row in rows:
        family, _, size = row.metric.name.rpartition(".")
        if size.isdigit():
            families.setdefault(family, {})[int(size)] = row
    return "\n\n".join(_chart(name, sizes) for name, sizes in families.items() if len(sizes) >= LEAST_FOR_A_PLOT)


def _chart(name: str, sizes: dict[int, Row]) -> str:
    ordered = dict(sorted(sizes.items()))
    unit, baseline = next((row.metric.unit, row.metric.baseline) for row in ordered.values())
    ours = ", ".join(f"{row.value:.4g}" for row in ordered.values())
    theirs = ", ".join(f"{row.baseline_value:.4g}" for row in ordered.values())
    return "\n".join(
        (
            "```mermaid",
            "xychart-beta",
            f'  title "{name}: kvgrpc (first line) and {baseline} (second)"',
            f"  x-axis [{', '.join(map(str, ordered))}]",
            f'  y-axis "{unit}"',
            f"  line [{ours}]",
            f"  line [{theirs}]",
            "```",
        )
    )


def store(rows: Sequence[Row], path: Path) -> None:
    """Writes the results as JSON; ``spread`` is that of the ratios: (largest - smallest) / median over the rounds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [
        {
            "name": row.metric.name,
            "unit": row.metric.unit,
            "value": row.value,
            "baseline": row.metric.baseline,
            "baseline_value": row.baseline_value,
            "ratio": row.ratio,
            "better": row.metric.better,
            "runs": row.runs,
            "spread": row.spread,
        }
        for row in rows
    ]
    path.write_text(json.dumps(results, indent=1) + "\n")


def _cells(row: Row) -> tuple[str, str, str, str, str, str, str, str, str, str]:
    metric = row.metric
    memory = f"{row.rss / 2**20:.0f} / {row.baseline_rss / 2**20:.0f} MiB" if row.rss else ""
    return (
        metric.name,
        metric.unit,
        _figure(row.value),
        _figure(row.baseline_value),
        f"{row.ratio:.2f}",
        f"{row.spread:.0%}",
        metric.target.describe(metric.unit, metric.better),
        str(row.runs),
        memory,
        metric.baseline,
    )


def _figure(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"
