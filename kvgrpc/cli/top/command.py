"""The command: once into a pipe, and until "q" or Ctrl-C in a terminal, with keys that sort and filter."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import Seconds, calls_a_registry
from kvgrpc.cli.output import show_table, table_of
from kvgrpc.cli.top.arrangement import Arrangement, arranged, pressed
from kvgrpc.cli.top.looking import COLUMNS, cells, failures_by_reason, look_at_ranks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvgrpc.cli.top.looking import RankLine
    from kvgrpc.client import SyncClient


@click.command()
@click.option("--every", type=Seconds(0.2, 60.0), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once; so does a pipe.")
@calls_a_registry
def top(client: SyncClient, every: float, once: bool) -> None:
    """Watch all ranks of a registry: sessions, rooms, held pages, the last minute's hand-offs.

    Keys: < and > choose the column to sort by, r turns the order, / and some text keeps the ranks with that text, Esc
    keeps all again, q ends.
    """
    if once or not sys.stdout.isatty():
        lines = look_at_ranks(client)
        show_table(f"Ranks at {client.address}", COLUMNS, (cells(line) for line in lines), "none is registered")
        if failed := failures_by_reason(lines):
            click.echo(failed)
        return
    _watch(client, every)


def _watch(client: SyncClient, every: float) -> None:
    from rich.live import Live

    from kvgrpc.cli.top.keys import Keyboard

    order = Arrangement()
    with Keyboard() as keys, Live(screen=True, auto_refresh=False) as live:
        while True:
            lines, next_look = look_at_ranks(client), time.monotonic() + every
            while True:
                live.update(_screen(client.address, lines, order), refresh=True)
                key = keys.pressed(next_look - time.monotonic())
                if not key:
                    break
                if key == "q" and not order.typing:
                    return
                order = pressed(order, key, len(COLUMNS))


def _screen(address: str, lines: list[RankLine], order: Arrangement) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    shown = arranged(lines, order, lambda line: line.values)
    marks = {order.column: " v" if order.reverse else " ^"}
    columns = [name + marks.get(number, "") for number, name in enumerate(COLUMNS)]
    head = f"{address}: {len(shown)} of {len(lines)} ranks. < > sort, r turn, / filter, q end"
    wanted = f"  filter: {order.wanted}{'_' if order.typing else ''}" if order.wanted or order.typing else ""
    table = table_of(columns, (cells(line, short=True) for line in shown))
    return Group(Text(head + wanted, style="dim"), table, Text(failures_by_reason(shown), style="red"))
