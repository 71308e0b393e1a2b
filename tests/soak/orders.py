"""What the router and its ranks say to each other, and what a page holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LAYERS, PAGES, PAGE_WORDS = 4, 1024, 512
PAGE_BYTES = PAGE_WORDS * 8
LARGEST_ROOM = 64  # pages
ROOM_SECONDS = 20.0
_MIX = np.uint64(0x9E3779B97F4A7C15)
_WORDS = np.arange(PAGE_WORDS, dtype=np.uint64) * _MIX

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class OpenRank:
    """``seed``: what the pages of this incarnation hold. ``fault_rate``: share of submissions that are made to fail."""

    name: str
    role: str
    registry: str
    seed: int
    data_plane: str
    fault_rate: float


@dataclass(frozen=True, slots=True)
class Send:
    """A room at prefill: its pages, sent in chunks; ``cancel_after`` seconds the engine gives it up."""

    room: int
    pages: Sequence[int]
    chunk: int
    cancel_after: float | None


@dataclass(frozen=True, slots=True)
class Receive:
    """A room at decode, and what it must bring: the pages of the prefill that was opened with ``seed``."""

    room: int
    bootstrap: str
    seed: int
    pages: Sequence[int]
    cancel_after: float | None


@dataclass(frozen=True, slots=True)
class Measure:
    """Asks for Resources."""


@dataclass(frozen=True, slots=True)
class Opened:
    address: str


@dataclass(frozen=True, slots=True)
class Ended:
    """One side of a room: "" is Success, else the reason. ``wrong``: what must never be, in words."""

    room: int
    reason: str
    seconds: float
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one rank: bytes, and counts."""

    resident: int
    threads: int
    descriptors: int
    held_pages: int
    free_pages: int


def content(seed: int, pages: Sequence[int]) -> Words:
    """uint64[LAYERS, len(pages), PAGE_WORDS]: no two pages of any incarnation are alike."""
    layers = np.arange(LAYERS, dtype=np.uint64)[:, None, None] << np.uint64(32)
    numbers = np.asarray(pages, dtype=np.uint64)[None, :, None]
    whose = np.uint64(seed << 40)
    words: Words = _WORDS + (layers + numbers + whose) * _MIX
    return words


def memory_at(address: int) -> Any:
    """The pool's memory as uint64[LAYERS, PAGES, PAGE_WORDS]."""
    import ctypes

    count = LAYERS * PAGES * PAGE_WORDS
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).reshape(LAYERS, PAGES, PAGE_WORDS)
