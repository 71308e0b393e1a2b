"""The command: once into a pipe, and until "q" or Ctrl-C in a terminal, with keys that sort, filter and open."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import Seconds, calls_a_registry, json_option
from kvgrpc.cli.output import show_table, wide_option
from kvgrpc.cli.rooms.story import look_at_room
from kvgrpc.cli.top.arrangement import Arrangement, arranged, pressed
from kvgrpc.cli.top.looking import (
    COLUMNS,
    FIRST_TO_GO,
    RankLine,
    cells,
    columns_of,
    failures_by_reason,
    fields_of,
    look_at_ranks,
)
from kvgrpc.cli.top.screens import rank_screen, ranks_screen, room_screen
from kvgrpc.errors import KvGrpcError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvgrpc.cli.rooms.story import Story
    from kvgrpc.client import SyncClient


@click.command()
@click.option("--every", type=Seconds(0.2, 60.0), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once; so does a pipe, and --json.")
@wide_option
@json_option
@calls_a_registry
def top(client: SyncClient, every: float, once: bool, as_json: bool) -> None:
    """Watch all ranks of a registry: leases, sessions, rooms, held pages, the last minute's hand-offs, cache tiers,
    readers of events that lag, pulls. Columns in which no rank has a value are left out.

    Keys: < and > choose the column to sort by, r turns the order, / and some text keeps the ranks with that text, Esc
    keeps all again; j and k choose a rank, Return opens it, then one of its rooms, which both sides tell; Esc closes;
    q ends.
    """
    if as_json:
        for line in look_at_ranks(client):
            print(json.dumps(fields_of(line)))
    elif once or not sys.stdout.isatty():
        _show_once(client)
    else:
        _watch(client, every)


def _show_once(client: SyncClient) -> None:
    lines = look_at_ranks(client)
    shown = columns_of(lines)
    names, rows = [COLUMNS[number] for number in shown], [cells(line, shown) for line in lines]
    first_to_go = [name for name in FIRST_TO_GO if name in names]
    show_table(f"Ranks at {client.address}", names, rows, "none is registered", first_to_go)
    if failed := failures_by_reason(lines):
        click.echo(failed)


def _watch(client: SyncClient, every: float) -> None:
    from rich.live import Live

    from kvgrpc.cli.top.keys import Keyboard

    seen = Shown(client)
    with Keyboard() as keys, Live(screen=True, auto_refresh=False) as live:
        while True:
            next_look = time.monotonic() + every
            while True:
                live.update(seen.screen(*live.console.size), refresh=True)
                key = keys.pressed(next_look - time.monotonic())
                if not key:
                    break
                if key == "q" and not seen.order.typing:
                    return
                seen.press(key)
            seen.look()


class Shown:
    """The look that was last, and the part of it that is on the screen."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self.order = Arrangement()
        self._opened = ""
        self._told: Story | None = None
        self._lines = look_at_ranks(client)
        self._looked = time.monotonic()
        self._fault = ""

    def look(self) -> None:
        """Again: the same rank and room stay chosen, wherever they are now. A registry that is away leaves what was
        there, which the first line says."""
        rank, room = self._chosen_rank(), self._chosen_room()
        try:
            self._lines, self._looked, self._fault = look_at_ranks(self._client), time.monotonic(), ""
            if self._told is not None:
                self._told = look_at_room(self._client, self._told.room, self._told.attempt)
        except KvGrpcError as error:
            self._fault = f" does not answer ({error.reason.name if error.reason else error.code})"
        if self._line() is None:  # one that has left is closed
            self.order = replace(self.order, opened=False, room_opened=False)
        self._choose(rank, room)

    def press(self, key: str) -> None:
        before = self.order
        self.order = _next_order(before, key, columns_of(self._lines))
        ranks = self._ranks()
        if self.order.opened and not before.opened:
            self._opened = str(ranks[self.order.chosen].values[0]) if ranks else ""
        line = self._line()
        rooms = line.rooms if line else ()
        chosen = min(self.order.chosen_room, max(0, len(rooms) - 1))
        self.order = replace(
            self.order,
            opened=line is not None,
            chosen_room=chosen,
            room_opened=self.order.room_opened and bool(rooms),
        )
        if not self.order.room_opened:
            self._told = None
        elif not before.room_opened:
            self._told = look_at_room(self._client, rooms[chosen].room, rooms[chosen].attempt)

    def screen(self, width: int, height: int) -> RenderableType:
        line = self._line()
        if line is not None and self._told is not None:
            return room_screen(self._told, width)
        if line is not None:
            return rank_screen(line, self.order, width, height)
        ago = f"{self._fault}, {time.monotonic() - self._looked:.0f} s ago" if self._fault else ""
        return ranks_screen(f"{self._client.address}{ago}", self._lines, self._ranks(), self.order, width, height)

    def _ranks(self) -> list[RankLine]:
        ranks = arranged(self._lines, self.order, lambda line: line.values)
        self.order = replace(self.order, chosen=min(self.order.chosen, max(0, len(ranks) - 1)))
        return ranks

    def _chosen_rank(self) -> str:
        ranks = self._ranks()
        return str(ranks[self.order.chosen].values[0]) if ranks else ""

    def _chosen_room(self) -> tuple[int, int]:
        line = self._line()
        rooms = line.rooms[self.order.chosen_room :] if line else ()
        return (rooms[0].room, rooms[0].attempt) if rooms else (0, 0)

    def _choose(self, rank: str, room: tuple[int, int]) -> None:
        """Whichever has left leaves its place to another."""
        ranks, line = [str(line.values[0]) for line in self._ranks()], self._line()
        rooms = [(each.room, each.attempt) for each in line.rooms] if line else []
        chosen = ranks.index(rank) if rank in ranks else self.order.chosen
        chosen_room = rooms.index(room) if room in rooms else min(self.order.chosen_room, max(0, len(rooms) - 1))
        self.order = replace(self.order, chosen=chosen, chosen_room=chosen_room)

    def _line(self) -> RankLine | None:
        """Of the rank that is opened."""
        if not self.order.opened:
            return None
        return next((line for line in self._lines if line.values[0] == self._opened), None)


def _next_order(order: Arrangement, key: str, shown: Sequence[int]) -> Arrangement:
    """A column that is not shown is passed over."""
    order = pressed(order, key, len(COLUMNS))
    while key in ("<", ">") and order.column not in shown and not order.typing:
        order = pressed(order, key, len(COLUMNS))
    return order
