"""The ranks that are shown, and their order: what keys change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")
ESCAPE, BACKSPACE, RETURN = "\x1b", "\x7f", "\r"
_LONGEST_FILTER = 64


@dataclass(frozen=True, slots=True)
class Arrangement:
    """By which column, largest first or not; ``wanted``: the text that a rank must have somewhere; ``typing``: keys
    belong to that text; ``chosen``: the number of a rank among those that are shown, which may be fewer by now;
    ``opened``: that one is looked at; ``chosen_room`` and ``room_opened``: the same for the rooms that it lists."""

    column: int = 0
    reverse: bool = False
    wanted: str = ""
    typing: bool = False
    chosen: int = 0
    opened: bool = False
    chosen_room: int = 0
    room_opened: bool = False


def pressed(order: Arrangement, key: str, columns: int) -> Arrangement:
    """The arrangement after a key; one that means nothing changes nothing."""
    if order.room_opened:
        return replace(order, room_opened=False) if key == ESCAPE else order
    if order.opened:
        return _pressed_at_rank(order, key)
    if key == ESCAPE:
        return replace(order, wanted="", typing=False)
    if order.typing:
        if key in (RETURN, "\n"):
            return replace(order, typing=False)
        text = order.wanted[:-1] if key == BACKSPACE else order.wanted + key if key.isprintable() else order.wanted
        return replace(order, wanted=text[:_LONGEST_FILTER])
    if key in ("<", ">"):
        return replace(order, column=(order.column + (1 if key == ">" else -1)) % columns)
    if key in ("j", "k"):
        return replace(order, chosen=max(0, order.chosen + (1 if key == "j" else -1)))
    if key in (RETURN, "\n"):
        return replace(order, opened=True)
    if key == "r":
        return replace(order, reverse=not order.reverse)
    return replace(order, typing=True) if key == "/" else order


def _pressed_at_rank(order: Arrangement, key: str) -> Arrangement:
    if key == ESCAPE:
        return replace(order, opened=False, chosen_room=0)
    if key in ("j", "k"):
        return replace(order, chosen_room=max(0, order.chosen_room + (1 if key == "j" else -1)))
    return replace(order, room_opened=True) if key in (RETURN, "\n") else order


def lines_around(chosen: int, count: int, most: int) -> range:
    """Those of ``count`` lines to show where there is room for ``most``: the first, or those until the chosen."""
    end = min(count, max(chosen + 1, most))
    return range(max(0, end - max(1, most)), end)


def arranged(lines: Sequence[T], order: Arrangement, values: Callable[[T], Sequence[object]]) -> list[T]:
    """Those that are wanted, sorted; what has no value in that column is last either way."""
    wanted = order.wanted.lower()
    shown = [line for line in lines if any(wanted in str(value).lower() for value in values(line) if value is not None)]
    there = [line for line in shown if values(line)[order.column] is not None]
    there.sort(key=lambda line: _rank(values(line)[order.column]), reverse=order.reverse)
    return there + [line for line in shown if values(line)[order.column] is None]


def _rank(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))
