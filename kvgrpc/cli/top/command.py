"""The command: once into a pipe, and until "q" or Ctrl-C in a terminal, with keys that sort and filter."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import Seconds, calls_a_registry
from kvgrpc.cli.output import show_table, table_of
from kvgrpc.cli.top.arrangement import Arrangement, arranged, pressed
from kvgrpc.cli.top.looking import COLUMNS, GAP, cells, columns_of, failures_by_reason, fitting, look_at_ranks
from kvgrpc.cli.top.opened import rank_screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvgrpc.cli.top.looking import RankLine
    from kvgrpc.client import SyncClient


@click.command()
@click.option("--every", type=Seconds(0.2, 60.0), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once; so does a pipe.")
@calls_a_registry
def top(client: SyncClient, every: float, once: bool) -> None:
    """Watch all ranks of a registry: leases, sessions, rooms, held pages, the last minute's hand-offs, cache tiers,
    readers of events that lag, pulls. Columns in which no rank has a value are left out.

    Keys: < and > choose the column to sort by, r turns the order, / and some text keeps the ranks with that text, Esc
    keeps all again; j and k choose a rank, Return opens it, Esc closes it; q ends.
    """
    if once or not sys.stdout.isatty():
        lines = look_at_ranks(client)
        shown = columns_of(lines)
        names, rows = [COLUMNS[number] for number in shown], [cells(line, shown) for line in lines]
        show_table(f"Ranks at {client.address}", names, rows, "none is registered")
        if failed := failures_by_reason(lines):
            click.echo(failed)
        return
    _watch(client, every)


def _watch(client: SyncClient, every: float) -> None:
    from rich.live import Live

    from kvgrpc.cli.top.keys import Keyboard

    order, opened = Arrangement(), ""
    with Keyboard() as keys, Live(screen=True, auto_refresh=False) as live:
        while True:
            lines, next_look = look_at_ranks(client), time.monotonic() + every
            while True:
                shown = arranged(lines, order, lambda line: line.values)
                order = replace(order, chosen=min(order.chosen, max(0, len(shown) - 1)))
                line = next((line for line in lines if order.opened and line.values[0] == opened), None)
                order = replace(order, opened=line is not None)  # one that has left is closed
                width = live.console.width
                screen = rank_screen(line) if line else _screen(client.address, lines, shown, order, width)
                live.update(screen, refresh=True)
                key = keys.pressed(next_look - time.monotonic())
                if not key:
                    break
                if key == "q" and not order.typing:
                    return
                order = _next_order(order, key, columns_of(lines))
                if order.opened and line is None and shown:
                    opened = str(shown[order.chosen].values[0])


def _next_order(order: Arrangement, key: str, shown: Sequence[int]) -> Arrangement:
    """A column that is not shown is passed over."""
    order = pressed(order, key, len(COLUMNS))
    while key in ("<", ">") and order.column not in shown and not order.typing:
        order = pressed(order, key, len(COLUMNS))
    return order


def _screen(
    address: str, lines: list[RankLine], ranks: list[RankLine], order: Arrangement, width: int
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    marks = {order.column: " v" if order.reverse else " ^"}
    there = columns_of(lines)
    shown = fitting(ranks, there, width, order.column)
    hidden = ", ".join(COLUMNS[number].removeprefix("#") for number in there if number not in shown)
    columns = [COLUMNS[number] + marks.get(number, "") for number in shown]
    head = f"{address}: {len(ranks)} of {len(lines)} ranks. < > sort, r turn, / filter, j k choose, Return open, q end"
    wanted = f"  filter: {order.wanted}{'_' if order.typing else ''}" if order.wanted or order.typing else ""
    table = table_of(columns, (cells(line, shown, short=True) for line in ranks))
    table.box, table.pad_edge, table.padding = None, False, (0, GAP, 0, 0)
    if ranks:
        table.rows[order.chosen].style = "reverse"
    narrow = f"no room for: {hidden}" if hidden else ""
    failures = Text(failures_by_reason(ranks), style="red")
    return Group(Text(head + wanted, style="dim"), table, failures, Text(narrow, style="dim"))
