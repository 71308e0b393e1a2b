"""One copy between device and host as it waits, is merged with others, and is split into pieces. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgrpc.errors import CopyFailed, Failure, KvGrpcError
from kvgrpc.prefetch.pools.pages import Pages

if TYPE_CHECKING:
    from kvgrpc.prefetch.copies.layers import LayerSignal
    from kvgrpc.prefetch.copies.streams import Mark


class Direction(enum.Enum):
    """DOWN: from device to host. UP: from host to device."""

    DOWN = "write"
    UP = "load"


@dataclass(frozen=True, slots=True)
class CopyAck:
    """The end of one copy. After a failed write its host pages are free again, after a failed load its device pages.

    ``quiescent`` False: the device does not say whether it still moves bytes of these pages. They stay taken for good
    then; an engine must not use device pages of its own again either.
    ``node`` is what the caller gave, whatever it was; every copy is acknowledged, exactly once. ``seconds``: of copying
    all its pages, without the waits between them; 0 after a failure.
    """

    number: int
    node: object
    direction: Direction
    device_pages: Pages
    host_pages: Pages
    nbytes: int
    seconds: float
    failure: Failure | None = None
    quiescent: bool = True

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(slots=True, eq=False)
class CopyOperation:
    """Pages ``device_pages[i]`` and ``host_pages[i]`` belong together. A smaller ``priority`` is more urgent.

    ``signal``: of a load that was begun. ``done``: leading pages that were copied, and ``seconds``: what that took;
    ``acknowledged``: its end was told. They are the copying thread's.
    """

    number: int
    direction: Direction
    device_pages: Pages
    host_pages: Pages
    node: object = None
    priority: int = 0
    fence: Mark | None = None
    signal: LayerSignal | None = None
    done: int = 0
    seconds: float = 0.0
    acknowledged: bool = False

    def next_piece(self, most: int) -> CopyPiece:
        """The next pages to copy, at most so many."""
        part = slice(self.done, self.done + most)
        return CopyPiece(self.device_pages[part], self.host_pages[part])


@dataclass(frozen=True, slots=True, eq=False)
class CopyPiece:
    """Pages of one operation that are copied at a time; only the whole is acknowledged."""

    device_pages: Pages
    host_pages: Pages


def copy_failed(direction: Direction, error: Exception) -> KvGrpcError:
    """The error of a copy that failed."""
    if isinstance(error, KvGrpcError):
        return error
    text = f"{direction.value} failed: {type(error).__name__}: {error}"
    return CopyFailed(text, metadata={"direction": direction.value, "layer": ""})


def merge(pieces: Sequence[CopyPiece | CopyOperation]) -> tuple[Pages, Pages]:
    """(device pages, host pages) of all, in order of host pages, so that adjacent ones are copied as one."""
    device = np.concatenate([piece.device_pages for piece in pieces])
    host = np.concatenate([piece.host_pages for piece in pieces])
    order = np.argsort(host, kind="stable")
    return device[order], host[order]
