"""Shows an answer: a table or a record for people, the message's JSON (as grpcurl prints it) for programs."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console, RenderableType
from rich.text import Text

from kvgrpc.cli.fitting import GAP, NOTHING, Name, asks, cut_to, fit, written
from kvgrpc.observability.logging import one_line

if TYPE_CHECKING:
    from google.protobuf.message import Message

GOOD = {"SUCCESS", "SETTLED", "OPEN", "READY", "SERVING", "ok"}
BAD = {"FAILED", "LOST", "DEAD", "BROKEN", "UNKNOWN", "NOT_SERVING", "missing"}
# No line is longer: a table says itself how wide it is.
_ALL = 10_000
_WIDE = "kvgrpc.wide"
# Begins the cell of a rank that did not answer.
NO_ANSWER = "no answer"
_FOLDING = Console(width=_ALL)


def show_json(*messages: Message) -> None:
    """One line of JSON for each message, with proto JSON names and every field, also zeros."""
    from google.protobuf import json_format

    for message in messages:
        fields = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
        print(json.dumps(fields, separators=(",", ":")), flush=True)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    empty: str,
    first_to_go: Sequence[str] = (),
) -> None:
    """Columns that begin with "#" are numbers and stand to the right. ``empty`` says it when there is no row.

    Where there is no room for all columns, those of ``first_to_go`` are left out, the first ones first, which a line
    below says; the command has ``wide_option`` then.
    """
    width = _ALL if _is_wide() else columns_here()
    listed = list(rows)
    if not listed:
        return show(Text(f"{title}: {empty}", style="dim"))
    table, left_out = table_of(columns, listed, width, first_to_go)
    show(Text(title, style="bold"))
    show(table)
    if left_out:
        show(Text(some_of("left out: ", left_out, " (--wide and --json have all)", width), style="dim"))


def table_of(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    width: int,
    first_to_go: Sequence[str] = (),
    chosen: int | None = None,
) -> tuple[Text, Sequence[str]]:
    """The table of ``show_table``, with the chosen row reversed; and the names of the columns that were left out.

    The last cell of a row that has fewer cells than columns goes on over the others.
    """
    heads = [column.removeprefix("#") for column in columns]
    texts = [[text_of(value) for value in row] for row in rows]
    found = fit(heads, texts, width, [columns.index(name) for name in first_to_go])
    widths = cut_to(found.widths, width) if sys.stdout.isatty() else found.widths
    right = [columns[number].startswith("#") for number in found.shown]
    lines = [_line([Text(heads[number], style="bold") for number in found.shown], widths, right)] if any(heads) else []
    for at, row in enumerate(texts):
        own = [number for number in found.shown if asks(row, number, heads)]
        cells = [styled(written(row[number], found.short)) for number in own]
        if len(row) < len(heads):
            cells.append(styled(row[-1]))
        line = _line(cells, widths, right)
        line.stylize("reverse" if at == chosen else "")
        lines.append(line)
    return Text("\n").join(lines), [heads[number] for number in found.left_out]


def _line(cells: Sequence[Text], widths: Sequence[int], right: Sequence[bool]) -> Text:
    """Cells beside each other, each folded to its width; the last of too few is as wide as it is."""
    spans = len(cells) < len(widths)
    folded = [
        [cell] if spans and cell is cells[-1] else list(cell.wrap(_FOLDING, width, overflow="fold"))
        for cell, width in zip(cells, widths, strict=False)
    ]
    lines = []
    for parts in itertools.zip_longest(*folded, fillvalue=Text()):
        line = Text()
        for part, width, at_right in zip(parts, widths, right, strict=False):
            padding = Text(" " * max(0, width - part.cell_len))
            line.append_text(padding + part if at_right and not (spans and part is cells[-1]) else part + padding)
            line.append(" " * GAP)
        line.rstrip()
        lines.append(line)
    return Text("\n").join(lines)


def show_record(title: str, fields: Iterable[tuple[str, object]]) -> None:
    """Name and value, a line each."""
    table, _ = table_of(("", ""), fields, _ALL if _is_wide() else columns_here())
    show(Text(title, style="bold"))
    show(table)


def show(content: RenderableType) -> None:
    """To stdout, in colour on a terminal. A table has folded what there is to fold."""
    Console(width=_ALL, highlight=False).print(content)


def columns_here() -> int:
    """The columns of the terminal; those of COLUMNS where that is set, as `watch` does; 80 in a pipe."""
    return shutil.get_terminal_size((80, 24)).columns


def some_of(before: str, names: Sequence[str], behind: str, width: int) -> str:
    """One line with as many of the names as there is room for, and the number of the others."""
    for count in range(len(names), 0, -1):
        more = f" and {len(names) - count} more" if count < len(names) else ""
        line = f"{before}{', '.join(names[:count])}{more}{behind}"
        if len(line) <= width:
            break
    return line


def _is_wide() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_WIDE))


def _remember_wide(context: click.Context, _: click.Parameter, wide: bool) -> None:
    context.meta[_WIDE] = wide


wide_option = click.option(
    "--wide", is_flag=True, expose_value=False, callback=_remember_wide, help="All columns, also where a line is long."
)


def text_of(value: object) -> str:
    """One line, as a cell shows it."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    # Words of others: an escape sequence would steer the terminal.
    return Name(one_line(value), one_line(value.short)) if isinstance(value, Name) else one_line(str(value))


def styled(text: str) -> Text:
    """Words that mean good or bad news are coloured."""
    return Text(text, style="green" if text in GOOD else "red" if text in BAD or text.startswith(NO_ANSWER) else "")


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


def gigabytes(rate: float) -> str:
    """GB/s for people, no wider than others: 2.41, 0.03, and <.01 for a small one, which is no standstill."""
    return "<.01" if 0 < rate < 0.005 else f"{rate:.2f}"


def counted(number: int, noun: str) -> str:
    """For people: 1 room, 2 rooms."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(nbytes: float) -> str:
    """Bytes for people: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
