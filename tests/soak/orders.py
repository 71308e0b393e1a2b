"""What the router and its ranks say to each other, and what a page holds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgrpc.dataplane.base import Outcome

LAYERS, PAGES, TOKENS, HEADS, DIM = 4, 1024, 4, 2, 64  # of eight bytes each
PAGE_WORDS = TOKENS * HEADS * DIM
PAGE_BYTES = PAGE_WORDS * 8
LARGEST_ROOM = 64  # pages
ROOM_SECONDS = 20.0
NO_REASON = "NO_REASON"
# So that what a head's rank gets of a page of all heads lies apart in it: over TCP it is gathered before it is written.
AXES = "token,head,dim"
_MIX = 0x9E3779B97F4A7C15
_UNMIX = np.uint64(pow(_MIX, -1, 2**64))

Words = npt.NDArray[np.uint64]


class Fault(NamedTuple):
    """A write that is to fail: how, and at which tensor-parallel rank of prefill.

    The last pages of prefill's pool are cursed, one for each fault: a room that is to fail names one of them, and the
    rank knows by the page, whatever is planned, merged or sent in chunks. FAILED_UNKNOWN is written later all the same.
    """

    outcome: Outcome
    tp: int

    @property
    def page(self) -> int:
        return SOUND_PAGES + FAULTS.index(self)


FAULTS = [
    Fault(outcome, tp)
    for outcome in (Outcome.REJECTED, Outcome.FAILED_SRC_FREE, Outcome.FAILED_UNKNOWN)
    for tp in range(HEADS)
]
SOUND_PAGES = PAGES - len(FAULTS)


@dataclass(frozen=True, slots=True)
class OpenRank:
    """``seed``: what the pages of this incarnation hold. ``tp`` of ``tp_size``: which heads it has."""

    engine: str
    role: str
    tp: int
    tp_size: int
    registry: str
    seed: int
    data_plane: str

    @property
    def heads(self) -> range:
        return heads_of(self.tp, self.tp_size)


@dataclass(frozen=True, slots=True)
class Send:
    """A room at a rank of prefill: its pages, sent in chunks; ``cancel_after`` seconds the engine gives it up."""

    room: int
    pages: Sequence[int]
    chunk: int
    cancel_after: float | None


@dataclass(frozen=True, slots=True)
class Receive:
    """A room at a rank of decode, and what it must bring: of head h the pages of the rank opened with ``seeds[h]``."""

    room: int
    bootstrap: str
    seeds: Sequence[int]
    pages: Sequence[int]
    cancel_after: float | None


@dataclass(frozen=True, slots=True)
class Measure:
    """Asks for Resources."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """One of the processes of these rooms was killed or stopped just now."""

    rooms: Sequence[int]


@dataclass(frozen=True, slots=True)
class Opened:
    address: str


@dataclass(frozen=True, slots=True)
class Ended:
    """One rank's side of a room: "" is Success, NO_REASON a failure that says nothing, else the reason it gives.

    ``seconds``: that the rank ran meanwhile. ``wrong``: what must never be, in words. ``since``: of these, the seconds
    since it knew that the other side is there, and since one of the room's processes was killed or stopped; None:
    nothing said that the other side is there, so that it waited until its deadline.
    """

    room: int
    reason: str
    seconds: float
    wrong: str = ""
    since: float | None = None


@dataclass(frozen=True, slots=True)
class LateWrite:
    """How a write ended that was reported as FAILED_UNKNOWN before."""

    outcome: str


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one rank: bytes, and counts. ``open_writes``: submissions without an outcome (prefill). ``spoiled_pages``:
    free ones into which somebody wrote.
    """

    resident: int
    threads: int
    descriptors: int
    open_rooms: int
    open_writes: int
    held_pages: int
    free_pages: int
    spoiled_pages: int


def heads_of(tp: int, tp_size: int) -> range:
    """The heads that a rank holds."""
    return range(tp * HEADS // tp_size, (tp + 1) * HEADS // tp_size)


def content(seed: int, heads: Sequence[int], pages: Sequence[int]) -> Words:
    """uint64[LAYERS, len(pages), TOKENS, len(heads), DIM]: no word of any incarnation, layer, page or head is alike."""
    index = np.full((1, 1, 1, 1, 1), seed, np.uint64)
    axes = (range(LAYERS), pages, range(TOKENS), heads, range(DIM))
    for axis, (values, size) in enumerate(zip(axes, (LAYERS, PAGES, TOKENS, HEADS, DIM), strict=True)):
        shape = [1] * 5
        shape[axis] = -1
        index = index * np.uint64(size) + np.asarray(values, np.uint64).reshape(shape)
    words: Words = index * np.uint64(_MIX)
    return words


def pages_of(words: Words) -> Words:
    """Which page each word of ``content`` is of, wherever it lies by now."""
    pages: Words = words * _UNMIX // np.uint64(PAGE_WORDS) % np.uint64(PAGES)
    return pages


def memory_at(address: int, words: int) -> Words:
    """uint64[words] of this process's memory, which the caller keeps."""
    memory: Words = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(address))
    return memory
