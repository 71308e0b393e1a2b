"""One rank, opened: its sessions and rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgrpc.cli.output import table_of
from kvgrpc.cli.rooms.command import ROOM_COLUMNS, SESSION_COLUMNS, room_row, session_row
from kvgrpc.cli.top.looking import COLUMNS, RankLine, cells

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST = 20


def rank_screen(line: RankLine) -> RenderableType:
    """All that is known of the rank, then its first sessions, and its rooms: open ones, then the newest that failed."""
    from rich.console import Group
    from rich.text import Text

    known = [
        f"{name.removeprefix('#')} {value}"
        for name, value in zip(COLUMNS, cells(line, range(len(COLUMNS))), strict=True)
        if value is not None
    ]
    sessions = table_of(SESSION_COLUMNS, map(session_row, line.sessions[:_MOST]))
    rooms = table_of(ROOM_COLUMNS, map(room_row, line.rooms[:_MOST]))
    return Group(
        Text("Esc: all ranks, q: end", style="dim"),
        Text("  ".join(known)),
        Text(_title("sessions", len(line.sessions)), style="bold"),
        sessions,
        Text(_title("rooms, open or failed", len(line.rooms)), style="bold"),
        rooms,
    )


def _title(what: str, count: int) -> str:
    return f"{what}: {count}" if count <= _MOST else f"{what}: the first {_MOST} of {count}"
