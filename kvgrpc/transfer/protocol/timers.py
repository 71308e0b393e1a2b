"""Deadlines in ticks: setting, moving and clearing one takes the same time however many there are. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from kvgrpc.transfer.protocol.types import RoomKey


class HasDeadline(Protocol):
    """``deadline``: the tick of its deadline, 0: it has none. Only ``Deadlines`` writes it; a room is in one of them
    at a time.
    """

    deadline: int

    @property
    def key(self) -> RoomKey: ...


Room = TypeVar("Room", bound=HasDeadline)


class Deadlines(Generic[Room]):
    """At most one tick for each room, which the room itself remembers. The owner asks once a tick what is due, and
    skips no tick.
    """

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[int, dict[RoomKey, Room]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._due.values()))

    def set(self, room: Room, tick: int) -> None:
        """Makes the room due at ``tick``, which must not have passed; an earlier setting of it is forgotten."""
        self.clear(room)
        room.deadline = tick
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = {}
        due[room.key] = room

    def clear(self, room: Room) -> None:
        if room.deadline:
            due = self._due[room.deadline]
            del due[room.key]
            if not due:  # an empty one keeps the room that it had
                del self._due[room.deadline]
            room.deadline = 0

    def due(self, tick: int) -> Collection[Room]:
        """Removes and returns the rooms that are due in this tick, each once, in the order in which they were set."""
        due = self._due.pop(tick, None)
        if due is None:
            return ()
        for room in due.values():
            room.deadline = 0
        return due.values()
