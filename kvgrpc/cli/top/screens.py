"""The screens: all ranks, one rank with its sessions and rooms, or one room from both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvgrpc.cli.output import counted, some_of, table_of
from kvgrpc.cli.rooms import why
from kvgrpc.cli.rooms.command import (
    ROOM_COLUMNS,
    ROOMS_FIRST_TO_GO,
    SESSION_COLUMNS,
    SESSIONS_FIRST_TO_GO,
    failure_fields,
    room_row,
    session_row,
)
from kvgrpc.cli.top.arrangement import Arrangement, lines_around
from kvgrpc.cli.top.looking import COLUMNS, FIRST_TO_GO, RankLine, cells, columns_of, failures_by_reason

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvgrpc.cli.rooms.story import Story

KEYS = "< > sort, r turn, / filter, j k choose, Return open, q end"
# Lines that are no ranks: head, columns, failures, columns without room.
_BESIDE_RANKS = 5
# The same of a rank: keys, three lines of figures, two titles, two heads.
_BESIDE_ROOMS = 9


def ranks_screen(
    title: str, lines: Sequence[RankLine], ranks: Sequence[RankLine], order: Arrangement, width: int, height: int
) -> RenderableType:
    """All ``lines``, of which these ``ranks`` are shown in this order."""
    from rich.console import Group
    from rich.text import Text

    there = columns_of(lines)
    mark = " v" if order.reverse else " ^"
    columns = {number: COLUMNS[number] + (mark if number == order.column else "") for number in there}
    first_to_go = [columns[number] for number in map(COLUMNS.index, FIRST_TO_GO) if number in there]
    seen = lines_around(order.chosen, len(ranks), height - _BESIDE_RANKS)
    table, left_out = table_of(
        list(columns.values()),
        [cells(ranks[number], there) for number in seen],
        width,
        [name for name in first_to_go if name != columns.get(order.column)],
        chosen=order.chosen - seen.start,
    )
    wanted = f"  filter: {order.wanted}{'_' if order.typing else ''}" if order.wanted or order.typing else ""
    return Group(
        Text(f"{title}: {len(ranks)} of {counted(len(lines), 'rank')}{wanted}", style="dim"),
        Text(KEYS, style="dim"),
        table,
        Text(failures_by_reason(ranks), style="red"),
        Text(some_of("no room for: ", left_out, "", width) if left_out else "", style="dim"),
    )


def rank_screen(line: RankLine, order: Arrangement, width: int, height: int) -> RenderableType:
    """All that is known of the rank, then its first sessions, and its rooms."""
    from rich.console import Group
    from rich.text import Text

    known = [
        f"{name.removeprefix('#')} {value}"
        for name, value in zip(COLUMNS, cells(line, range(len(COLUMNS))), strict=False)
        if value is not None
    ]
    beside = height - _BESIDE_ROOMS
    sessions = line.sessions[: max(1, beside // 3)]
    seen = lines_around(order.chosen_room, len(line.rooms), beside - len(sessions))
    pairs, _ = table_of(SESSION_COLUMNS, map(session_row, sessions), width, SESSIONS_FIRST_TO_GO)
    rooms, _ = table_of(
        ROOM_COLUMNS,
        [room_row(line.rooms[number]) for number in seen],
        width,
        ROOMS_FIRST_TO_GO,
        chosen=order.chosen_room - seen.start,
    )
    return Group(
        Text("Esc all ranks, j k choose a room, Return open it, q end", style="dim"),
        Text("  ".join(known)),
        Text(_title("sessions", len(sessions), len(line.sessions)), style="bold"),
        pairs,
        Text(_title("rooms: open, failed, the slowest", len(seen), len(line.rooms)), style="bold"),
        rooms,
    )


def room_screen(told: Story, width: int) -> RenderableType:
    """The story that ``kvgrpc why`` tells."""
    from rich.console import Group
    from rich.text import Text

    sides, _ = table_of(why.COLUMNS, why.rows_of(told), width, why.FIRST_TO_GO)
    steps, _ = table_of(why.STEP_COLUMNS, why.step_rows(told), width)
    parts: list[RenderableType] = [
        Text("Esc the rank, q end", style="dim"),
        Text(f"Room {told.room}, attempt {told.attempt}", style="bold"),
        sides,
        Text("in order, each rank by its own host's clock", style="bold"),
        steps,
    ]
    first = why.first_failure(told)
    if first is not None:
        cause, _ = table_of(("", ""), [("at", first.incarnation), *failure_fields(first.room.failure)], width)
        parts += [Text("its cause", style="bold"), cause, Text(why.next_step(first.room), style="cyan")]
    return Group(*parts) if told.sides else Group(*parts[:2], Text("no rank knows it any more"))


def _title(what: str, shown: int, count: int) -> str:
    return f"{what}: {count}" if shown == count else f"{what}: {shown} of {count}"
