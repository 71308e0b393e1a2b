"""Rows that miss their target, each beside its ``limit.*`` row, which says how far it could come: ``make bench`` ends
with them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rich.console import Console

from benchmarks.harness.table import Row

# Where the name of a limit is not that of its row, by how both begin.
OTHERWISE = {
    "handoff.few.10000": "limit.throughput",
    "prefetch.file": "limit.prefetch.checksum",
    "prefetch.mooncake": "limit.prefetch.mooncake.backend",
    "pull.latency.mooncake": "limit.pull.mooncake",
    "pull.latency.shm": "limit.pull.copies",
}
# A baseline that begins so is the bare part itself: nothing built on it comes further.
BARE = ("raw ", "bare ", "a bare ", "memcpy ", "its storage's calls alone", "msgspec")
# By what a miss is told apart.
SHORT, OURS, UNKNOWN = "out of reach", "the rest is ours", "not known"


def limit_of(name: str, rows: Collection[str]) -> str | None:
    """The one of ``rows`` that limits the row of this name; None: there is none."""
    otherwise = [limit + name[len(begin) :] for begin, limit in OTHERWISE.items() if name.startswith(begin)]
    names = (*otherwise, f"limit.{name}", f"limit.{name.partition('.')[2]}")
    return next((each for each in names if each in rows), None)


def beside_limits(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with its limit."""
    measured = {row.metric.name: row for row in rows}
    return [replace(row, limit=measured.get(limit_of(row.metric.name, measured) or "")) for row in rows]


def is_bare(baseline: str) -> bool:
    """True if rows beside this baseline need no other limit."""
    return baseline.startswith(BARE)


def why(row: Row) -> str:
    """Of a row that misses its target: SHORT where its limit misses it too, OURS where that or the bare part has it."""
    limit, metric = row.limit, row.metric
    if limit is None:
        return OURS if is_bare(metric.baseline) else UNKNOWN
    # The baseline of either row: it may have moved between the two.
    of_ours = limit.value / row.baseline_value if metric.better == "higher" else row.baseline_value / limit.value
    ratio = max(of_ours, limit.ratio) if limit.metric.baseline == metric.baseline else of_ours
    return OURS if replace(row, value=limit.value, ratio=ratio).met else SHORT


def say(rows: Sequence[Row], console: Console) -> None:
    """Prints a line for each, and how many are of which kind. ``rows`` have their limits."""
    missed = [row for row in rows if row.met is False]
    aimed = sum(row.met is not None for row in rows)
    if aimed:
        console.print(f"{aimed - len(missed)} of {aimed} targets are met by this run.")
    for row in missed:
        limit = row.limit
        shown = f"{limit.metric.name} has {_figures(limit)}" if limit else _without_limit(row)
        wanted = row.metric.target.describe(row.metric.unit, row.metric.better)
        console.print(
            f"[red]missed[/] {row.metric.name} has {_figures(row)}; wanted {wanted}; {shown}: {why(row)}",
            highlight=False,
        )
    if missed:
        console.print(_told_apart(missed), highlight=False)


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for docs/performance.md."""
    missed = [row for row in rows if row.met is False]
    lines = ["| missed | has | wanted | its limit has | so it is |", "|---|---:|---:|---:|---|"]
    for row in missed:
        wanted = row.metric.target.describe(row.metric.unit, row.metric.better)
        reach = _short(row.limit) if row.limit else _without_limit(row)
        lines.append(f"| `{row.metric.name}` | {_short(row)} | {wanted} | {reach} | {why(row)} |")
    return "\n".join([*lines, "", _told_apart(missed)])


def _told_apart(missed: Sequence[Row]) -> str:
    kinds = [why(row) for row in missed]
    return (
        f"Of {len(kinds)} missed, the limit of {kinds.count(SHORT)} misses the target too; that of {kinds.count(OURS)},"
        f" or the bare part, reaches it, so the rest is ours; {kinds.count(UNKNOWN)} have no limit."
    )


def _without_limit(row: Row) -> str:
    return "its baseline is the bare part" if is_bare(row.metric.baseline) else "no row shows its limit"


def _short(row: Row) -> str:
    return f"{row.value:.4g} {row.metric.unit}, {row.ratio:.2f}"


def _figures(row: Row) -> str:
    return f"{row.value:.4g} {row.metric.unit}, {row.ratio:.2f} of {row.metric.baseline}"
