"""Rows of the tables that people read: sessions and rooms, whatever side they are seen from. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvgrpc.errors import Failure
from kvgrpc.model import RankRef, Role
from kvgrpc.observability.pair_figures import PairFigures
from kvgrpc.transfer.protocol.types import RoomKey, RoomState, SessionState, Writes


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One pair of incarnations, as one side knows it. ``idle_seconds``: since something was heard, or of a silent peer
    that was never heard, since its connection stands; ``figures``: of its hand-offs that ended."""

    peer: RankRef
    address: str
    state: SessionState
    stream: int
    rooms: int
    idle_seconds: float
    pending_rooms: int
    figures: PairFigures


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part of a room: who owes it, or whom it is owed to."""

    peer: RankRef
    state: RoomState
    writes: Writes
    pages_done: int


@dataclass(frozen=True, slots=True)
class RoomEnd:
    """The end of a hand-off that went well. ``ended_at``: Unix seconds, of this host's clock; ``nbytes``: of its pages
    here; ``stages``: seconds until both sides were known, until there were pages to move, and until they had moved.
    """

    ended_at: float
    nbytes: int
    stages: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class RoomRow:
    """One hand-off, as one side knows it. ``end``: of one that went well, while it is among the last of them."""

    key: RoomKey
    role: Role
    state: RoomState
    parts: tuple[PartRow, ...]
    pages: int
    held: bool
    local_handle: bool
    age_seconds: float
    failure: Failure | None
    traceparent: str = ""
    end: RoomEnd | None = None
