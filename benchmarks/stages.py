"""Where the time of one room goes: ``python -m benchmarks.stages handoff.first_contact [--rooms N]``.

The row's own pair of processes hands rooms over one by one, and both note when a room reaches each stage. Processes of
one machine read the same clock. A note costs 1 us, so that the sum is what the row measures, within its spread.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.plan import FULL
from benchmarks.harness.worker import Desk
from benchmarks.rows import rooms
from benchmarks.rows.handoff import (
    BUSY_ENGINE,
    CONTROL_LATENCY,
    CONTROL_PAUSE,
    ENGINE_STEP,
    FIRST_CONTACT,
    LATENCY,
    PAGE_PAUSE,
    TORCH_ENGINE,
)
from benchmarks.rows.pair import Pair
from benchmarks.rows.rooms import Between
from benchmarks.sides.base import Plane, Setting
from benchmarks.sides.memory import Shape

MARKS = "marks"
LOG_WIDTH = 120
WARM_UP_ROOMS = 20
_TRANSFER = "kvgrpc.transfer"


@dataclass(frozen=True, slots=True)
class Stage:
    """A call that a room reaches once. ``ends``: when it returns, and not when it begins."""

    name: str
    side: str
    module: str
    function: str
    ends: bool = False


COLD = (
    Stage("receiver is made", "decode", "receiver", "KVReceiver.__init__"),
    Stage("loop asks the registry", "decode", "runtime.resolve", "PrefillResolver._ask"),
    Stage("registry has answered", "decode", "runtime.resolve", "PrefillResolver._bind"),
    Stage("session is dialled", "decode", "runtime.decode_manager", "DecodeManager._dial"),
    Stage("hello is read", "prefill", "runtime.prefill_manager", "PrefillManager._open"),
    Stage("peer is attached", "prefill", "runtime.writing.worker", "TransferWorker._attach_early"),
    Stage("peer is attached, done", "prefill", "runtime.writing.worker", "TransferWorker._attach_early", ends=True),
    Stage("welcome is read", "decode", "runtime.decode_manager", "DecodeManager._welcome"),
)
WARM = (
    Stage("init", "decode", "receiver", "KVReceiver.init"),
    Stage("loop takes it", "decode", "runtime.decode_manager", "DecodeManager._take_destination"),
    Stage("frame is encoded", "decode", "wire", "encode_requests"),
    Stage("frame is read", "prefill", "protocol.prefill.core", "PrefillCore.on_frame"),
    Stage("engine sends", "prefill", "sender", "KVSender.send"),
    Stage("loop takes the pages", "prefill", "runtime.prefill_manager", "PrefillManager._take_chunk"),
    Stage("writes begin", "prefill", "runtime.writing.worker", "TransferWorker._planned"),
    Stage("writes are submitted", "prefill", "runtime.writing.worker", "TransferWorker._start", ends=True),
    Stage("outcome is told", "prefill", "protocol.prefill.core", "PrefillCore.on_outcome"),
    Stage("answer is encoded", "prefill", "wire", "encode_responses"),
    Stage("answer is read", "decode", "protocol.decode.core", "DecodeCore.on_frame"),
    Stage("engine sees Success", "decode", "receiver", "KVReceiver.close"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the benchmarks, as far as its rooms are concerned."""

    plane: Plane
    pause: float
    between: Between = Between.NAP
    cold: bool = False


ROWS = {
    LATENCY: Row("mooncake", PAGE_PAUSE),
    CONTROL_LATENCY: Row("null", CONTROL_PAUSE),
    BUSY_ENGINE: Row("null", ENGINE_STEP, Between.PYTHON),
    TORCH_ENGINE: Row("null", ENGINE_STEP, Between.TORCH),
    FIRST_CONTACT: Row("mooncake", PAGE_PAUSE, cold=True),
}
Marks = list[tuple[str, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.stages", description="Where the time of one room goes.")
    parser.add_argument("row", choices=list(ROWS))
    parser.add_argument("--rooms", type=int, default=0, help="how many (default 300, or 15 first contacts)")
    options = parser.parse_args(arguments)
    row = ROWS[options.row]
    count = options.rooms or (15 if row.cold else 300)
    _show(options.row, row, _measure(row, count), Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH))
    return 0


def _measure(row: Row, count: int) -> list[dict[str, float]]:
    """Of each room the seconds from its first stage to each that it reached."""
    pages = min(FULL.sequential_rooms, 64)
    pair = Pair(Setting("kvgrpc", row.plane, Shape(FULL.regions, pages, FULL.page_bytes, aux_items=pages)))
    try:
        for worker in (pair.prefill, pair.decode):
            worker.call(watch)
        if row.cold:
            return [_hand_off_cold(pair, row) for _ in range(count)]
        found = _hand_off(pair, row, count + WARM_UP_ROOMS)
        return [_reached(one) for one in found[WARM_UP_ROOMS:]]
    finally:
        pair.close()


def _hand_off_cold(pair: Pair, row: Row) -> dict[str, float]:
    pair.reopen()
    _take(pair)
    pair.hand_off_cold(pair.orders(1, 1, row.pause, row.between), rooms.receive_first)
    return _reached(_take(pair))


def _hand_off(pair: Pair, row: Row, count: int) -> list[Marks]:
    pair.hand_off(pair.orders(count, 1, row.pause, row.between), rooms.receive_one_by_one)
    marks = _take(pair)
    begins = [index for index, (name, _) in enumerate(marks) if name == WARM[0].name]
    return [marks[begin:end] for begin, end in zip(begins, [*begins[1:], len(marks)], strict=True)]


def _take(pair: Pair) -> Marks:
    """What both processes noted since the last time, by time."""
    return sorted(pair.prefill.call(marks) + pair.decode.call(marks), key=lambda mark: mark[1])


def _reached(marks: Marks) -> dict[str, float]:
    """When each stage was reached first, after the first of them."""
    first: dict[str, float] = {}
    for name, at in marks:
        first.setdefault(name, at - marks[0][1])
    return first


def watch(desk: Desk) -> None:
    """Notes from now on when this process reaches a stage."""
    noted: Marks = desk.items.setdefault(MARKS, [])
    for stage in (*COLD, *WARM):
        module = importlib.import_module(f"{_TRANSFER}.{stage.module}")
        owner, _, name = stage.function.rpartition(".")
        target = getattr(module, owner) if owner else module
        setattr(target, name, _noting(getattr(target, name), stage, noted))


def marks(desk: Desk) -> Marks:
    """What was noted since the last call."""
    noted: Marks = desk.items[MARKS]
    taken = noted[:]
    noted.clear()
    return taken


def _noting(function: Callable[..., Any], stage: Stage, noted: Marks) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not stage.ends:
            noted.append((stage.name, time.monotonic()))
        try:
            return function(*arguments, **options)
        finally:
            if stage.ends:
                noted.append((stage.name, time.monotonic()))

    return call


def _show(name: str, row: Row, reached: Sequence[dict[str, float]], console: Console) -> None:
    """Medians over the rooms; what a stage took is the median of its own, so that they need not add up."""
    table = Table(title=f"{name}: {len(reached)} rooms, medians in ms", title_justify="left")
    for heading in ("stage", "process"):
        table.add_column(heading)
    for heading in ("reached at", "after the stage before", "p90 of that"):
        table.add_column(heading, justify="right")
    stages = [stage for stage in (*COLD, *WARM) if row.cold or stage in WARM]
    at = {stage.name: [one[stage.name] for one in reached if stage.name in one] for stage in stages}
    stages = sorted((stage for stage in stages if at[stage.name]), key=lambda stage: statistics.median(at[stage.name]))
    for before, stage in zip([None, *stages], stages, strict=False):
        took = [
            one[stage.name] - one[before.name]
            for one in reached
            if before is not None and stage.name in one and before.name in one
        ]
        shown = (f"{statistics.median(took) * 1e3:.3f}", f"{_p90(took) * 1e3:.3f}") if took else ("", "")
        table.add_row(stage.name, stage.side, f"{statistics.median(at[stage.name]) * 1e3:.3f}", *shown)
    console.print(table)


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.9)]


if __name__ == "__main__":
    sys.exit(main())
