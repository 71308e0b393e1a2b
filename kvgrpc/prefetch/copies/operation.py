"""One copy between device and host as it waits, is merged with others, and is split into pieces. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgrpc.errors import Failure
from kvgrpc.prefetch.pools.pages import Pages

if TYPE_CHECKING:
    from kvgrpc.prefetch.copies.streams import Mark


class Direction(enum.Enum):
    """DOWN: from device to host. UP: from host to device."""

    DOWN = "write"
    UP = "load"


@dataclass(frozen=True, slots=True)
class CopyAck:
    """The end of one copy. After a failed write its host pages are free again, after a failed load its device pages.

    ``node`` is what the caller gave, whatever it was; every copy is acknowledged, exactly once.
    """

    number: int
    node: object
    direction: Direction
    device_pages: Pages
    host_pages: Pages
    nbytes: int
    seconds: float
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True, eq=False)
class CopyOperation:
    """Pages ``device_pages[i]`` and ``host_pages[i]`` belong together. A smaller ``priority`` is more urgent."""

    number: int
    direction: Direction
    device_pages: Pages
    host_pages: Pages
    node: object = None
    priority: int = 0
    fence: Mark | None = None

    def split(self, most: int) -> Iterator[CopyOperation]:
        """Pieces of at most ``most`` pages, in order; only the whole is acknowledged."""
        for start in range(0, len(self.host_pages), most):
            part = slice(start, start + most)
            yield CopyOperation(
                self.number,
                self.direction,
                self.device_pages[part],
                self.host_pages[part],
                self.node,
                self.priority,
                self.fence,
            )


def merge(operations: Sequence[CopyOperation]) -> tuple[Pages, Pages]:
    """(device pages, host pages) of all, in order of host pages, so that adjacent ones are copied as one."""
    device = np.concatenate([operation.device_pages for operation in operations])
    host = np.concatenate([operation.host_pages for operation in operations])
    order = np.argsort(host, kind="stable")
    return device[order], host[order]
