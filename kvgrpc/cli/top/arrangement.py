"""Which ranks are shown, and in which order: what keys change. Pure."""

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
    ``opened``: that one is looked at."""

    column: int = 0
    reverse: bool = False
    wanted: str = ""
    typing: bool = False
    chosen: int = 0
    opened: bool = False


def pressed(order: Arrangement, key: str, columns: int) -> Arrangement:
    """What a key makes of it; one that means nothing changes nothing."""
    if order.opened:
        return replace(order, opened=False) if key == ESCAPE else order
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


def arranged(lines: Sequence[T], order: Arrangement, values: Callable[[T], Sequence[object]]) -> list[T]:
    """Those that are wanted, sorted; what has no value in that column is last either way."""
    wanted = order.wanted.lower()
    shown = [line for line in lines if any(wanted in str(value).lower() for value in values(line) if value is not None)]
    there = [line for line in shown if values(line)[order.column] is not None]
    there.sort(key=lambda line: _rank(values(line)[order.column]), reverse=order.reverse)
    return there + [line for line in shown if values(line)[order.column] is None]


def _rank(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))
