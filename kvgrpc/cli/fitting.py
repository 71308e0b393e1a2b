"""The columns of a table for which there is room, and the width of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

# Blanks between two columns.
GAP = 2
NOTHING = "-"
# Cells of several words are folded, and never to less than this.
_LEAST_FOLDED = 24
# Names without a blank, where a terminal is too narrow even for what always stays.
_LEAST_CUT = 8


class Name(str):
    """Text with a ``short`` writing, for tables that have no room for the whole."""

    short: str

    def __new__(cls, full: str, short: str) -> Name:
        name = super().__new__(cls, full)
        name.short = short
        return name


@dataclass(frozen=True, slots=True)
class Fit:
    """The numbers of the columns that are shown with the width of each; whether names are short; the numbers of those
    that were left out although they say something, the most important first."""

    shown: Sequence[int]
    widths: Sequence[int]
    short: bool = False
    left_out: Sequence[int] = ()

    @property
    def total(self) -> int:
        return _total(self.widths)


def asks(row: Sequence[str], number: int, heads: Sequence[str]) -> bool:
    """False: the row has no cell there, or one that goes on over all columns behind it."""
    return number < len(row) - (len(row) < len(heads))


def written(value: str, short: bool) -> str:
    """The short writing of what has one, where that is wanted."""
    return value.short if short and isinstance(value, Name) else value


def fit(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, first_to_go: Sequence[int] = ()) -> Fit:
    """In this order, until the table is no wider than ``width``: names are short, columns without any value go, those
    of ``first_to_go`` go one after the other, cells of several words are folded, but those that a row begins with.

    What is not in ``first_to_go`` stays, so a table may be wider at last. The last cell of a row that has fewer cells
    than columns asks for no room.
    """
    everything = range(len(heads))
    for short in (False, True):
        texts = [[written(row[number], short) for row in rows if asks(row, number, heads)] for number in everything]
        whole = [max([cell_len(head), *map(cell_len, column)]) for head, column in zip(heads, texts, strict=True)]
        if _total(whole) <= width:
            return Fit(everything, whole, short)
    least = [_least(heads[number], texts[number], whole[number]) if number else whole[0] for number in everything]
    empty = [number for number in first_to_go if all(text in ("", NOTHING) for text in texts[number])]
    going = [*empty, *(number for number in first_to_go if number not in empty)]
    stays = set(everything) - set(going)
    for number in reversed(going):
        if _total([least[each] for each in (*stays, number)]) <= width:
            stays.add(number)
    shown = sorted(stays)
    left_out = [number for number in reversed(going) if number not in stays and number not in empty]
    return Fit(shown, _grown([(least[number], whole[number]) for number in shown], width), True, left_out)


def cut_to(widths: Sequence[int], width: int) -> list[int]:
    """The same columns on a terminal that is narrower than they are: the widest give way, one after the other."""
    cut = list(widths)
    while _total(cut) > width and max(cut) > _LEAST_CUT:
        cut[cut.index(max(cut))] -= 1
    return cut


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * max(0, len(widths) - 1)


def _least(head: str, column: Sequence[str], whole: int) -> int:
    """Folded at blanks, where there are some."""
    if not any(" " in text for text in column):
        return whole
    longest = max(cell_len(word) for text in column for word in text.split())
    return min(whole, max(_LEAST_FOLDED, cell_len(head), longest))


def _grown(columns: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Each between its least and its whole width: what is left is given to the narrowest first."""
    widths = [least for least, _ in columns]
    left = max(0, width - _total(widths))
    wanting = sorted((whole - least, number) for number, (least, whole) in enumerate(columns) if whole > least)
    for place, (wanted, number) in enumerate(wanting):
        given = min(wanted, left // (len(wanting) - place))
        widths[number] += given
        left -= given
    return widths
