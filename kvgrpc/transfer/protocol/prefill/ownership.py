"""Whose prefill's rooms are: of which decode incarnation, without a local sender yet, or named by no decode. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvgrpc.model import RankId
from kvgrpc.transfer.protocol.prefill.pair import PrefillPair
from kvgrpc.transfer.protocol.prefill.room import PrefillRoom
from kvgrpc.transfer.protocol.types import Bounds, RoomKey, Timing

_MOST_LOST = 1024


class Ownership:
    """Over the core's own table of rooms (10, ownership).

    ``places``: how many decode ranks name a room, where these are several, by the key of its sender; ``named``: the
    engine whose decode a sender's room is for, where its engine said so.
    """

    def __init__(self, rooms: Mapping[RoomKey, PrefillRoom], bounds: Bounds) -> None:
        self._rooms = rooms
        self._bounds = bounds
        self._unclaimed = 0
        self.places: dict[RoomKey, int] = {}
        self.named: dict[RoomKey, str] = {}

    def own(self, pair: PrefillPair, room: PrefillRoom) -> None:
        """Makes this decode incarnation the owner of the room at its place, as the first one that names it."""
        room.owner, room.engine = pair, pair.ref.rank.engine
        pair.rooms[room.key] = None

    def may_name(self, engine: str, key: RoomKey) -> bool:
        """True if the room's sender left it open which engine's decode gets it, or named this one."""
        return self.named.get(key.at(0), engine) == engine

    def other_owner(self, pair: PrefillPair, key: RoomKey) -> PrefillPair | None:
        """The owner of the room, where this pair may not name the room too: another pair at the same place, or a pair
        of another engine at any place. None: it may."""
        if pair.places == 1 and not self.places:
            room = self._rooms.get(key)
            return room.owner if room is not None else None
        for place in range(max(self.places.get(key.at(0), 1), pair.places)):
            room = self._rooms.get(key.at(place))
            owner = room.owner if room is not None else None
            if owner is not None and (place == pair.place or not owner.serves_with(pair)):
                return owner
        return None

    def full(self, pair: PrefillPair) -> tuple[str, int, int] | None:
        """Returns which bound keeps this decode from naming one more room without a local sender: its name, its limit,
        and how many there are; None: no bound does (11, memory of the ended)."""
        bounds = self._bounds
        if pair.unclaimed >= bounds.unclaimed_per_session:
            return "unclaimed rooms of one session", bounds.unclaimed_per_session, pair.unclaimed
        if self._unclaimed >= bounds.unclaimed:
            return "unclaimed rooms", bounds.unclaimed, self._unclaimed
        if len(self._rooms) >= bounds.rooms:
            return "rooms", bounds.rooms, len(self._rooms)
        return None

    def wait_for_sender(self, pair: PrefillPair, room: PrefillRoom) -> None:
        room.unclaimed = True
        pair.unclaimed += 1
        self._unclaimed += 1

    def wait_no_more(self, room: PrefillRoom) -> None:
        """Stops counting the room as one without a local sender."""
        if room.unclaimed and room.owner is not None:
            room.unclaimed = False
            room.owner.unclaimed -= 1
            self._unclaimed -= 1

    def forget(self, key: RoomKey) -> None:
        """A record is gone: with the last one of a room goes how many decode ranks name it, and of which engine."""
        first = key.at(0)
        if not any(first.at(place) in self._rooms for place in range(self.places.get(first, 1))):
            self.places.pop(first, None)
            self.named.pop(first, None)


class Unnamed:
    """Senders whose room no decode has named yet, and the decodes that were lost, whose rooms some of these are.

    Where router and decode name no engine to prefill, nobody can say whose a room is that a dead decode never named.
    But a decode that is alive names each room as soon as its engine has the request, so after a loss what is still
    without a name after ``Timing.unnamed_after_loss`` is taken for the dead one's (6, ending).

    A loss counts until that rank is back, or for as long as a room may wait; meanwhile its router may send requests to
    it. The newest one counts from when it was seen.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._claimed: dict[RoomKey, int] = {}  # in this order, as time goes on
        self._lost: OrderedDict[RankId, int] = OrderedDict()

    def add(self, key: RoomKey, now: int) -> None:
        self._claimed[key] = now

    def drop(self, key: RoomKey) -> None:
        self._claimed.pop(key, None)

    def note_lost(self, decode: RankId, now: int) -> None:
        self._lost[decode] = now
        self._lost.move_to_end(decode)
        if len(self._lost) > _MOST_LOST:
            self._lost.popitem(last=False)

    def note_back(self, decode: RankId) -> None:
        self._lost.pop(decode, None)

    def take_over(self, now: int) -> list[tuple[RoomKey, RankId]]:
        """Removes and returns the senders that have waited long enough, with the decode that was lost last."""
        while self._lost and now - next(iter(self._lost.values())) > self._timing.room_deadline:
            self._lost.popitem(last=False)
        over: list[tuple[RoomKey, RankId]] = []
        if not self._lost:
            return over
        decode, lost_at = next(reversed(self._lost.items()))
        for key, claimed_at in self._claimed.items():
            if now - max(claimed_at, lost_at) < self._timing.unnamed_after_loss:
                break
            over.append((key, decode))
        for key, _ in over:
            del self._claimed[key]
        return over
