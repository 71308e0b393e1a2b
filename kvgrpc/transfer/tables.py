"""Rows of the tables that people read: sessions and rooms, whatever side they are seen from. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvgrpc.errors import Failure
from kvgrpc.model import RankRef, Role
from kvgrpc.transfer.protocol.types import RoomKey, RoomState, SessionState, Writes


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One pair of incarnations, as one side knows it. ``idle_seconds``: since something was heard, or of a silent peer
    that was never heard, since its connection stands."""

    peer: RankRef
    address: str
    state: SessionState
    stream: int
    rooms: int
    idle_seconds: float
    pending_rooms: int


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part of a room: who owes it, or whom it is owed to."""

    peer: RankRef
    state: RoomState
    writes: Writes
    pages_done: int


@dataclass(frozen=True, slots=True)
class RoomRow:
    """One hand-off, as one side knows it."""

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
