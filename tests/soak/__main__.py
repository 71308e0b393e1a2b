"""``make soak``: thousands of hand-offs between engines of unequal tp, with ranks killed and stopped, writes that fail,
and at the same time pulls among caches, whose engines are killed, stopped and emptied; then floods of HTTP/2 frames
beside a pair.

``python -m tests.soak [--rooms 2000] [--seconds 60] [--data-plane shm] [--data-plane mooncake] [--without-pulls]
[--flood-seconds 30] [--json PATH]``. With several data planes each gets its share of rooms and time. The last line is
``kvgrpc soak: OK (...)`` or ``FAILED``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvgrpc.dataplane.base import Outcome
from tests.soak.floods import FloodPlan, FloodResult, FloodSoak
from tests.soak.pulls import PullPlan, PullResult, PullSoak
from tests.soak.router import Router
from tests.soak.verdict import Plan, Result


def main() -> int:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    results: list[Result] = []
    pulled: list[PullResult] = []
    flooded: list[FloodResult] = []
    logs = Path(tempfile.mkdtemp(prefix="kvgrpc-soak-"))
    for number, data_plane in enumerate(options.data_plane):
        share = len(options.data_plane)
        plan = Plan(
            rooms=options.rooms // share,
            seconds=options.seconds / share,
            data_plane=data_plane,
            seed=options.seed + number,
            in_flight=options.in_flight,
            kill_every=options.kill_every,
        )
        with ThreadPoolExecutor(1) as beside:
            plan_of_pulls = PullPlan(plan.seconds, data_plane, seed=plan.seed)
            pulling = None if options.without_pulls else beside.submit(PullSoak(plan_of_pulls, logs).run)
            results.append(_run(plan, logs / data_plane, console))
            _show(results[-1], console)
            pulled += [] if pulling is None else [pulling.result()]
        if options.flood_seconds:
            plan_of_floods = FloodPlan(options.flood_seconds / share, data_plane, seed=options.seed + number)
            flooded.append(FloodSoak(plan_of_floods).run())
    ended: list[Result | PullResult | FloodResult] = [*results, *pulled, *flooded]
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in ended], indent=1) + "\n")
    problems = [problem for result in ended for problem in result.problems]
    for problem in problems[:20]:
        console.print(problem, style="red", markup=False)
    if problems:
        console.print(f"what the processes said: {logs}", markup=False)
    else:
        shutil.rmtree(logs)
    done = f"{_summary(results)}{_summary_of_pulls(pulled)}{_summary_of_floods(flooded)}"
    print(f"kvgrpc soak: {'FAILED' if problems else 'OK'} ({done})")
    return 1 if problems else 0


def _run(plan: Plan, logs: Path, console: Console) -> Result:
    logs.mkdir()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        task = progress.add_task(f"rooms over {plan.data_plane}", total=plan.rooms, state="")

        def watch(result: Result, open_rooms: int) -> None:
            disturbed = f"{result.kills.total()} kills, {result.stops.total()} stops"
            state = f"{open_rooms} open, {disturbed}, {len(result.problems)} problems"
            progress.update(task, completed=result.rooms - open_rooms, state=state)

        return Router(plan, logs, watch).run()


def _show(result: Result, console: Console) -> None:
    table = Table(title=f"how the rooms over {result.plan.data_plane} ended at decode", title_justify="left")
    table.add_column("outcome")
    table.add_column("rooms", justify="right")
    for reason, count in result.reasons.most_common():
        table.add_row(reason, str(count), style="green" if reason == "SUCCESS" else "")
    console.print(table)
    console.print(f"whole and compared: {dict(sorted(result.pairs.items()))}", markup=False)
    share = f"{result.injected} ({result.injected / max(1, result.rooms):.1%})"
    console.print(f"rooms whose write was made to fail: {share}, {result.failed_by_it} ended by it", markup=False)
    late = f"written late after an unknown end: {dict(result.late_writes)}, of {result.unknown} rooms"
    console.print(late, markup=False)
    console.print(f"killed: {dict(result.kills)}; stopped: {dict(result.stops)}", markup=False)
    longest = f"{result.longest_room:.2f} s, of those with a process killed or stopped {result.longest_disturbed:.2f} s"
    console.print(f"longest room {longest}", markup=False)
    seconds, which = result.latest_loss
    console.print(f"latest end after a kill or a stop {seconds:.2f} s: {which or 'none'}", markup=False)
    console.print(f"refused: {result.refused} of {result.sound} rooms to which nothing was done", markup=False)
    for name, (first, last) in result.resources.items():
        console.print(
            f"{name}: {first.resident / 2**20:.0f} -> {last.resident / 2**20:.0f} MiB, "
            f"{first.threads} -> {last.threads} threads, {first.descriptors} -> {last.descriptors} descriptors"
        )


def _summary(results: list[Result]) -> str:
    rooms, good = sum(result.rooms for result in results), sum(result.successes for result in results)
    checked = sum(result.bytes_checked for result in results)
    injected = sum(result.injected for result in results)
    kills, stops = (
        sum(one.total() for one in each) for each in zip(*((r.kills, r.stops) for r in results), strict=True)
    )
    planes = " and ".join(result.plan.data_plane for result in results)
    ends = (
        f"{good} with {checked:,} bytes checked, {injected} ({injected / max(1, rooms):.1%}) with an injected failure"
    )
    seconds = sum(result.seconds for result in results)
    late = sum(result.late_writes[Outcome.DONE.name] for result in results)
    ends += f", {late} late writes"
    return f"{rooms} hand-offs over {planes}, {ends}, {kills} kills, {stops} stops, {seconds:.0f} s"


def _summary_of_pulls(results: list[PullResult]) -> str:
    if not results:
        return ""
    pulls, pages = sum(each.pulls for each in results), sum(each.pages for each in results)
    faults, longest = sum(each.faults.total() for each in results), max(each.longest for each in results)
    return f"; among them {pulls} pulls of {pages:,} pages, {faults} kills and stops, the longest {longest:.2f} s"


def _summary_of_floods(results: list[FloodResult]) -> str:
    if not results:
        return ""
    rooms, floods = sum(each.rooms.total() for each in results), sum(len(each.rooms) for each in results)
    return f"; {rooms} rooms beside {floods} floods, the longest {max(each.longest for each in results):.2f} s"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.split("\n")[0])
    parser.add_argument("--rooms", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="over which they are spread")
    parser.add_argument("--data-plane", action="append", choices=["shm", "mooncake"])
    parser.add_argument("--in-flight", type=int, default=24)
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds, while their role has another engine")
    parser.add_argument("--without-pulls", action="store_true", help="no pulls among caches at the same time")
    parser.add_argument("--flood-seconds", type=float, default=30.0, help="of floods beside a pair; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    options.data_plane = options.data_plane or ["shm", "mooncake"]
    return options


if __name__ == "__main__":
    sys.exit(main())
