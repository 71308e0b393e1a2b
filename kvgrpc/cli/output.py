"""How an answer is shown: a table or a record for people, the message's JSON (as grpcurl prints it) for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvgrpc.observability.logging import one_line

if TYPE_CHECKING:
    from google.protobuf.message import Message

GOOD = {"SUCCESS", "SETTLED", "OPEN", "READY", "SERVING", "ok", "yes"}
BAD = {"FAILED", "LOST", "DEAD", "BROKEN", "UNKNOWN", "NOT_SERVING", "missing", "no"}


def show_json(*messages: Message) -> None:
    """One line of JSON for each message, with proto JSON names and every field, also zeros."""
    from google.protobuf import json_format

    for message in messages:
        fields = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
        print(json.dumps(fields, separators=(",", ":")), flush=True)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """As ``table_of``. ``empty`` says it when there is no row."""
    table = table_of(columns, rows)
    if not table.row_count:
        return show(Text(f"{title}: {empty}", style="dim"))
    show(Text(title, style="bold"))  # that of the table would be folded to its width
    show(table)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Columns that begin with "#" are numbers and stand to the right."""
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    return table


def show_record(title: str, fields: Iterable[tuple[str, object]]) -> None:
    """Name and value, a line each."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column()
    for name, value in fields:
        table.add_row(name, cell(value))
    show(table)


def show(content: RenderableType) -> None:
    """To stdout, in colour on a terminal. A pipe gets no colour and no line break that a terminal would need."""
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(content)


def cell(value: object) -> Text:
    """Words that mean good or bad news are coloured."""
    text = (
        "-" if value is None or value == "" else ("yes" if value else "no") if isinstance(value, bool) else str(value)
    )
    text = one_line(text)  # words of others: an escape sequence would steer the terminal
    return Text(text, style="green" if text in GOOD else "red" if text in BAD else "")


def seconds(value: float) -> str:
    """A duration for people: 4.2s, 3m05s, 2h07m."""
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def milliseconds(value: float) -> str:
    """Seconds of a hand-off for people: 0.41ms, 23ms, 4.2s."""
    if value >= 1:
        return seconds(value)
    return f"{1000 * value:.0f}ms" if value >= 0.01 else f"{1000 * value:.2f}ms"


def size(nbytes: float) -> str:
    """Bytes for people: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
