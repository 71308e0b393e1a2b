"""What the work of a hand-off row sees of either protocol."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.sides.memory import Memory, Shape

Pages = npt.NDArray[Any]
Plane = Literal["null", "mooncake", "shm"]
ProtocolName = Literal["kvgrpc", "seed", "sglang", "bare"]


class Poll(enum.IntEnum):
    """How far a room is; the numbers of both protocols."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Sender(Protocol):
    """Prefill's handle of one room."""

    def init(self, num_pages: int, aux_index: int | None = None) -> None: ...

    def send(self, pages: Pages, index_slice: slice, is_last: bool) -> None: ...

    def poll(self) -> int: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """Decode's handle of one room."""

    def init(self, pages: Pages, aux_index: int) -> None: ...

    def poll(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a hand-off takes place."""

    protocol: ProtocolName
    plane: Plane
    shape: Shape


class PrefillSide(Protocol):
    """The prefill process of either protocol, started."""

    memory: Memory
    bootstrap: str
    page_type: type[np.signedinteger[Any]]

    def sender(self, room: int) -> Sender: ...

    def close(self) -> None: ...


class DecodeSide(Protocol):
    """The decode process of either protocol, started."""

    memory: Memory
    page_type: type[np.signedinteger[Any]]

    def receiver(self, room: int, bootstrap: str | None = None) -> Receiver:
        """``bootstrap``: of another prefill than the one that the side was opened with."""

    def settled(self, receivers: Sequence[Any]) -> bool:
        """Whether all that making these receivers began is over, at prefill too; each could be given its pages."""

    def close(self) -> None: ...
