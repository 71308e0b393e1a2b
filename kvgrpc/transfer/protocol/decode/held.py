"""Pages of rooms that ended while somebody may still write to them (rule 8, pages by evidence). Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvgrpc.transfer.protocol.decode.pair import DecodePair
from kvgrpc.transfer.protocol.decode.room import DecodePart, DecodeRoom
from kvgrpc.transfer.protocol.timers import Deadlines
from kvgrpc.transfer.protocol.types import (
    STATE_SUCCESS,
    WRITES_SETTLED,
    RoomKey,
)

# To ask reads all sockets of the host: the pause grows with the time since the proof, up to so many ticks. In powers of
# two, so that many pairs are asked about at once; a third of that time, because an answer is taken one pause later.
_LONGEST_PAUSE = 32


class HeldPages:
    """The rooms that ended while their pages are still held, until evidence that nobody writes to them any more.

    ``rooms``: these rooms; ``pages``: how many pages they hold together; ``of_pair``: how many of these wait for the
    evidence of one writer. A room is looked at when there is news of it or when time alone may free it, so no call
    looks at all rooms. ``settle``: ticks after a proof in which bytes may still arrive. ``connections(pair)``: names
    of the connections over which they would, as they were at some time after the proof; None: nobody can tell yet.
    """

    def __init__(self, settle: int, connections: Callable[[DecodePair], frozenset[str] | None]) -> None:
        self.rooms: dict[RoomKey, DecodeRoom] = {}
        self.pages = 0
        self.of_pair: dict[DecodePair, int] = {}
        self._settle = settle
        self._connections = connections
        self._looks: Deadlines[DecodeRoom] = Deadlines()

    def __contains__(self, key: RoomKey) -> bool:
        return key in self.rooms

    def hold(self, room: DecodeRoom) -> None:
        self.rooms[room.key] = room
        self._add_pages(room, room.page_count)

    def died(self, pair: DecodePair, now: int) -> None:
        """The writer was proven dead. What its kernel still holds may arrive while its connections exist."""
        pair.dead_at = now
        pair.connections = self._connections(pair)
        pair.next_ask_at = now

    def look(self, room: DecodeRoom, now: int) -> bool:
        """True when every part gave evidence: the pages are held no more. Else notes when to look again."""
        again = 0
        for part in room.parts:
            if not self._evidence(room, part, now):
                since = _proven_at(part)
                if since is None:
                    return False  # only news can help
                again = max(again, now + 1, since + self._settle + 1, _next_ask_at(part))
        if again:
            self._looks.set(room, again)
            return False
        del self.rooms[room.key]
        self._looks.clear(room)
        self._add_pages(room, -room.page_count)
        return True

    def counted(self, at_most: int) -> int:
        """Returns how many pages are held, counting at most ``at_most`` for each writer."""
        return sum(min(pages, at_most) for pages in self.of_pair.values())

    def due(self, now: int) -> list[DecodeRoom]:
        """Rooms to look at in this tick."""
        return list(self._looks.due(now))

    def _add_pages(self, room: DecodeRoom, pages: int) -> None:
        self.pages += pages
        for part in room.parts:
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
        return not self._may_deliver(part.pair, now)

    def _may_deliver(self, pair: DecodePair, now: int) -> bool:
        """A connection of the time of the proof may still stand. Not to know is no evidence, whenever it happens."""
        at_proof = pair.connections
        if at_proof is not None and not at_proof:
            return False
        open_now = self._open_connections(pair, now)
        if at_proof is None:
            at_proof = pair.connections = open_now  # what is left of that time is among these
        return open_now is None or at_proof is None or not at_proof.isdisjoint(open_now)

    def _open_connections(self, pair: DecodePair, now: int) -> frozenset[str] | None:
        """Asked ever less often, however many rooms wait for them to close, and about many pairs in the same ticks."""
        if now >= pair.next_ask_at:
            pair.open_connections = self._connections(pair)
            pause = _pause(now - (pair.dead_at or 0))
            pair.next_ask_at = now - now % pause + pause
        return pair.open_connections


def _pause(since_proof: int) -> int:
    third = max(1, since_proof // 3)
    return min(1 << third.bit_length() - 1, _LONGEST_PAUSE)


def _next_ask_at(part: DecodePart) -> int:
    return part.pair.next_ask_at if part.stopped_at is None else 0


def _proven_at(part: DecodePart) -> int | None:
    return part.pair.dead_at if part.stopped_at is None else part.stopped_at
