"""Rows that miss their target, each beside its ``limit.*`` row, which says how far it could come: ``make bench`` ends
with them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
BARE = ("raw ", "bare ", "a bare ", "memcpy ", "its storage's calls alone", "msgspec", "a dict ")


def limit_of(name: str, rows: Collection[str]) -> str | None:
    """The one of ``rows`` that limits the row of this name; None: there is none."""
    otherwise = [limit + name[len(begin) :] for begin, limit in OTHERWISE.items() if name.startswith(begin)]
    names = (*otherwise, f"limit.{name}", f"limit.{name.partition('.')[2]}")
    return next((each for each in names if each in rows), None)


def is_bare(baseline: str) -> bool:
    """True if rows beside this baseline need no other limit."""
    return baseline.startswith(BARE)


def say(rows: Sequence[Row], console: Console) -> None:
    """Prints a line for each."""
    measured = {row.metric.name: row for row in rows}
    aimed = [row for row in rows if row.met is not None]
    missed = [row for row in aimed if row.met is False]
    if aimed:
        console.print(f"{len(aimed) - len(missed)} of {len(aimed)} targets are met by this run.")
    for row in missed:
        limit = limit_of(row.metric.name, measured)
        shown = f"{limit} has {_figures(measured[limit])}" if limit else _without_limit(row)
        wanted = row.metric.target.describe(row.metric.unit, row.metric.better)
        console.print(
            f"[red]missed[/] {row.metric.name} has {_figures(row)}; wanted {wanted}; {shown}", highlight=False
        )


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for docs/performance.md."""
    measured = {row.metric.name: row for row in rows}
    lines = ["| missed | has | wanted | its limit has |", "|---|---:|---:|---:|"]
    for row in (each for each in rows if each.met is False):
        limit = limit_of(row.metric.name, measured)
        wanted = row.metric.target.describe(row.metric.unit, row.metric.better)
        reach = _short(measured[limit]) if limit else _without_limit(row)
        lines.append(f"| `{row.metric.name}` | {_short(row)} | {wanted} | {reach} |")
    return "\n".join(lines)


def _without_limit(row: Row) -> str:
    return "its baseline is the bare part" if is_bare(row.metric.baseline) else "no row shows its limit"


def _short(row: Row) -> str:
    return f"{row.value:.4g} {row.metric.unit}, {row.ratio:.2f}"


def _figures(row: Row) -> str:
    return f"{row.value:.4g} {row.metric.unit}, {row.ratio:.2f} of {row.metric.baseline}"
