"""Pages of rooms that ended while somebody may still write to them (rule 8, pages by evidence). Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvgrpc.transfer.protocol.decode_pair import DecodePair
from kvgrpc.transfer.protocol.decode_room import DecodePart, DecodeRoom
from kvgrpc.transfer.protocol.timers import Deadlines
from kvgrpc.transfer.protocol.types import (
    STATE_SUCCESS,
    WRITES_SETTLED,
    RoomKey,
)


class HeldPages:
    """The rooms that ended while their pages are still held, until evidence that nobody writes to them any more.

    ``rooms``: these rooms; ``pages``: how many pages they hold together; ``of_pair``: how many of these wait for the
    evidence of one writer. A room is looked at when there is news of it or when time alone may free it, so no call
    looks at all rooms. ``settle``: ticks after a proof in which bytes may still arrive. ``connections(pair)``: names
    of the connections over which they would.
    """

    def __init__(self, settle: int, connections: Callable[[DecodePair], frozenset[str]]) -> None:
        self.rooms: dict[RoomKey, DecodeRoom] = {}
        self.pages = 0
        self.of_pair: dict[DecodePair, int] = {}
        self._settle = settle
        self._connections = connections
        self._looks: Deadlines[RoomKey] = Deadlines()

    def __contains__(self, key: RoomKey) -> bool:
        return key in self.rooms

    def hold(self, room: DecodeRoom) -> None:
        self.rooms[room.key] = room
        self._count(room, room.page_count)

    def died(self, pair: DecodePair, now: int) -> None:
        """The writer was proven dead. What its kernel still holds may arrive while its connections exist."""
        pair.dead_at = now
        pair.connections = self._connections(pair)

    def look(self, room: DecodeRoom, now: int) -> bool:
        """True when every part gave evidence: the pages are held no more. Else notes when to look again."""
        again = 0
        for part in room.parts.values():
            if not self._evidence(room, part, now):
                since = _proven_at(part)
                if since is None:
                    return False  # only news can help
                again = max(again, now + 1, since + self._settle + 1)
        if again:
            self._looks.set(room.key, again)
            return False
        del self.rooms[room.key]
        self._looks.clear(room.key)
        self._count(room, -room.page_count)
        return True

    def counted(self, at_most: int) -> int:
        """How many pages are held, counting at most ``at_most`` for each writer."""
        return sum(min(pages, at_most) for pages in self.of_pair.values())

    def due(self, now: int) -> list[DecodeRoom]:
        """Rooms to look at in this tick."""
        return [self.rooms[key] for key in self._looks.due(now)]

    def _count(self, room: DecodeRoom, pages: int) -> None:
        self.pages += pages
        for part in room.parts.values():
            if part.told_write:  # which never changes once the room has ended
                self.of_pair[part.pair] = self.of_pair.get(part.pair, 0) + pages
                if not self.of_pair[part.pair]:
                    del self.of_pair[part.pair]

    def _evidence(self, room: DecodeRoom, part: DecodePart, now: int) -> bool:
        """This part writes to the room's pages no more: said by its writer, or proven by its death."""
        if not room.has_pages or not part.told_write:
            return True
        if part.state >= STATE_SUCCESS and part.writes is WRITES_SETTLED:
            return True
        since = _proven_at(part)
        if since is None or now - since <= self._settle:
            return False
        if part.stopped_at is not None:
            return True  # a plane says so only when no byte is left on its host (rule 7, writes)
        pair = part.pair
        return not pair.connections or not (pair.connections & self._open_connections(pair, now))

    def _open_connections(self, pair: DecodePair, now: int) -> frozenset[str]:
        """Asked at most once a tick, however many rooms wait for them to close."""
        if pair.open_connections_at != now:
            pair.open_connections_at = now
            pair.open_connections = self._connections(pair)
        return pair.open_connections


def _proven_at(part: DecodePart) -> int | None:
    return part.pair.dead_at if part.stopped_at is None else part.stopped_at
