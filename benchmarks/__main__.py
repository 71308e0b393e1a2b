"""Runs the benchmarks: ``python -m benchmarks [--only control,events] [--rounds N] [--json PATH]``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import claims, missed
from benchmarks.harness import chart
from benchmarks.harness.plan import FULL, QUICK, Plan
from benchmarks.harness.quiet import run_quietly
from benchmarks.harness.rounds import Benchmark
from benchmarks.harness.table import Problem, Row, markdown, plots, show, store
from benchmarks.rows import (
    cache,
    control,
    dataplane,
    direct_index,
    engine_calls,
    events,
    handoff,
    head_slices,
    hostile,
    index,
    limits,
    liveness,
    many_pairs,
    native_index,
    prefetch,
    pull,
    pull_ttft,
    registry,
    room_sizes,
    served_index,
    storage,
)

RESULTS = {"seed": Path(__file__).parent / "results.json", "sglang": Path(__file__).parent / "results-sglang.json"}
ROUNDS = 5
LOG_WIDTH = 170
# How often a row is measured while others use the machine; the last figures stay, and are marked.
TRIES = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every benchmark ran and every byte was right; missed targets are shown, they are no error."""
    options = _parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
    plan = dataclasses.replace(QUICK if options.quick else FULL, against=options.against)
    chosen = [one for one in all_benchmarks(plan) if one.matches(options.only)]
    if not chosen:
        console.print(f"no benchmark begins with {', '.join(options.only)}", style="red")
        return 2
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, benchmark in enumerate(chosen, 1):
        console.print(f"[dim]{number}/{len(chosen)} {benchmark.name} …[/]", end="", highlight=False)
        begin = time.monotonic()
        problem = _measure(benchmark, options.rounds, rows, console, 1 if options.quick else TRIES)
        problems.extend([problem] if problem else [])
        console.print(f"[dim] {time.monotonic() - begin:.0f} s[/]", highlight=False)
        store(rows, options.json)  # a run of most of an hour that is cut off keeps what it measured
    rows = missed.beside_limits([row for row in rows if _wanted(row.metric.name, options.only)])
    show(rows, problems, console)
    claims.say(rows, console, options.against)
    missed.say(rows, console)
    if options.markdown:
        print(markdown(rows))
        print(missed.markdown(rows))
    if options.plots:
        print(plots(rows))
    store(rows, options.json)
    options.json.with_suffix(".svg").write_text(chart.draw(chart.bars_of(rows)))
    return 1 if any(not problem.skipped for problem in problems) else 0


def all_benchmarks(plan: Plan) -> list[Benchmark]:
    against_any = (control, handoff, room_sizes, many_pairs, engine_calls)
    every = (
        *against_any,
        head_slices,
        limits,
        dataplane,
        registry,
        liveness,
        hostile,
        storage,
        cache,
        prefetch,
        pull,
        pull_ttft,
        events,
        index,
        served_index,
        native_index,
        direct_index,
    )
    families = every if plan.against == "seed" else (*against_any, storage)
    return [benchmark for family in families for benchmark in family.benchmarks(plan)]


def _measure(benchmark: Benchmark, rounds: int, rows: list[Row], console: Console, tries: int) -> Problem | None:
    if benchmark.missing:
        return Problem(benchmark.name, benchmark.missing, skipped=True)

    def say(what: str) -> None:
        console.print(f" [yellow]{what}[/]", end="", highlight=False)

    try:
        rows.extend(run_quietly(benchmark, rounds, tries, say))
    except Exception as error:  # one that fails must not cost the others
        return Problem(benchmark.name, f"{type(error).__name__}: {error}")
    return None


def _wanted(name: str, prefixes: Sequence[str]) -> bool:
    return not prefixes or any(name.startswith(prefix) for prefix in prefixes)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Every row beside its baseline, in one run.")
    parser.add_argument("--only", type=_prefixes, default=[], metavar="PREFIX,…", help="rows that begin with these")
    parser.add_argument(
        "--against",
        choices=("seed", "sglang"),
        default="seed",
        help="what hand-offs are compared with: the seeds' protocol, or SGLang's own classes where they are installed",
    )
    parser.add_argument("--rounds", type=_at_least_one, default=ROUNDS, help=f"turns of each side (default {ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the results go")
    parser.add_argument("--markdown", action="store_true", help="print the tables for docs/performance.md too")
    parser.add_argument("--plots", action="store_true", help="print charts for a page: rows that differ by a size")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, once: shows that all runs, the figures mean nothing"
    )
    options = parser.parse_args(arguments)
    options.json = options.json or RESULTS[options.against]
    return options


def _prefixes(text: str) -> list[str]:
    return [prefix.strip() for prefix in text.split(",") if prefix.strip()]


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
