"""Pages of engines with other tensor-parallel sizes: which ranks have our heads, and where in a page. Pure but for
``place``, which copies.

A rank of an engine that is divided by heads holds some heads of each page. With another size its pages hold other ones,
so our page is put together from pages of several ranks, or cut out of a larger one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.transfer.layout.topology import heads_of


@dataclass(frozen=True, slots=True)
class HeadRows:
    """``rows`` of a page, one after the other. Each has ``head_bytes`` of every head that the page holds, in order."""

    rows: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class PageHeads:
    """A page, or a part of one, that holds ``count`` of the model's ``total`` heads from ``start`` on, in ``sections``
    that lie one after the other."""

    total: int
    start: int
    count: int
    sections: tuple[HeadRows, ...]

    @property
    def nbytes(self) -> int:
        return self.count * sum(section.rows * section.head_bytes for section in self.sections)

    def of_rank(self, tp_size: int, tp: int) -> PageHeads:
        """The page of a rank of an engine of this size."""
        start, stop, _ = heads_of(self.total, tp_size, tp)
        return replace(self, start=start, count=stop - start)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of our pages that one rank of another engine has. ``parts``: where heads lie in its page, part after
    part; none: its page is as ours."""

    tp: int
    identity: PageIdentity
    parts: tuple[PageHeads, ...] = ()

    @property
    def page_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def divides(total: int, tp_size: int) -> bool:
    """True if every rank has an equal share of the heads, or one head of which others have copies."""
    return tp_size > 0 and (total % tp_size == 0 or tp_size % total == 0)


def ranks_with(own: PageHeads, tp_size: int) -> list[int]:
    """The fewest ranks of an engine of this size that have our heads together; none where it divides them otherwise."""
    if not divides(own.total, tp_size):
        return []
    found, wanted, stop = [], own.start, own.start + own.count
    for tp in range(tp_size):
        heads = heads_of(own.total, tp_size, tp)
        if wanted < stop and heads.start <= wanted < heads.stop:
            found.append(tp)
            wanted = heads.stop
    return found


@dataclass(frozen=True, slots=True)
class Move:
    """``rows`` runs of ``nbytes`` out of a page of share ``number`` into ours: where each begins, and how far the next
    is."""

    number: int
    source: int
    source_step: int
    destination: int
    destination_step: int
    rows: int
    nbytes: int


def moves(own: Sequence[PageHeads], shares: Sequence[Sequence[PageHeads]]) -> tuple[Move, ...]:
    """The copies that fill a page of ours from one page of each share. Raises ValueError where a head is left out.

    ``own``: the parts of our page, one after the other; ``shares``: those of theirs.
    """
    found, begin = [], 0
    for part in own:
        wanted = part.start
        for number, theirs in enumerate(shares):
            at = 0
            for piece in theirs:
                if piece.start <= wanted < piece.start + piece.count:
                    stop = min(piece.start + piece.count, part.start + part.count)
                    found += _moves(number, piece, at, part, begin, wanted, stop)
                    wanted = max(wanted, stop)
                at += piece.nbytes
        if wanted < part.start + part.count:
            raise ValueError(f"nobody has head {wanted} of {part.total}")
        begin += part.nbytes
    return tuple(found)


def place(moves: Sequence[Move], sources: Sequence[int], destination: int) -> None:
    """Copies one page: ``sources`` are the addresses of a page of each share, ``destination`` that of ours."""
    for move in moves:
        source = _rows(sources[move.number] + move.source, move.source_step, move)
        _rows(destination + move.destination, move.destination_step, move)[:] = source


def _moves(number: int, theirs: PageHeads, at: int, own: PageHeads, begin: int, first: int, stop: int) -> list[Move]:
    """Heads ``first`` to ``stop`` of a part that begins at byte ``at`` into one that begins at ``begin``."""
    if theirs.sections != own.sections or theirs.total != own.total:
        raise ValueError("the two pages are not divided alike")
    found = []
    for section in own.sections:
        each = section.head_bytes
        steps = theirs.count * each, own.count * each
        source, destination = at + (first - theirs.start) * each, begin + (first - own.start) * each
        found.append(Move(number, source, steps[0], destination, steps[1], section.rows, (stop - first) * each))
        at += section.rows * steps[0]
        begin += section.rows * steps[1]
    return found


def _rows(address: int, step: int, move: Move) -> npt.NDArray[np.uint8]:
    """The runs of a move on one side. The last one does not reach to a whole step."""
    nbytes = (move.rows - 1) * step + move.nbytes
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    flat = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (move.rows, move.nbytes), (step, 1))
