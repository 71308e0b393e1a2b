"""What decode has to tell its peers: which rooms of a pair changed, and which pairs have something to say now. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvgrpc.transfer.protocol.decode_pair import DecodePair
from kvgrpc.transfer.protocol.decode_room import DecodeRoom
from kvgrpc.transfer.protocol.types import RoomKey

_FORGETS_AT_MOST = 1024


class Outbox:
    """Bounded by the rooms: it keeps which ones changed (``DecodePair.dirty``), their state is read when it is told."""

    def __init__(self) -> None:
        self._now: dict[DecodePair, None] = {}
        self._soon: dict[DecodePair, None] = {}

    def tell(self, room: DecodeRoom) -> None:
        """All pairs of the room, now."""
        for part in room.parts.values():
            if not part.forgot:
                part.pair.dirty[room.key] = None
                self._now[part.pair] = None

    def forget(self, key: RoomKey, pair: DecodePair) -> None:
        """FORGET rides with what else is said, or goes with the next tick: nobody waits for it."""
        pair.dirty[key] = None
        if len(pair.dirty) < _FORGETS_AT_MOST:
            self._soon[pair] = None
        else:
            self._now[pair] = None

    def resume(self, pair: DecodePair) -> None:
        """Every room of the pair, now (3)."""
        for key in pair.rooms:
            pair.dirty[key] = None
        self._now[pair] = None

    def tick(self) -> None:
        if self._soon:
            self._now.update(self._soon)
            self._soon.clear()

    def take(self) -> Iterable[DecodePair]:
        """Pairs with something to say and a stream to say it on."""
        if not self._now:
            return ()
        pairs, self._now = self._now, {}
        return [pair for pair in pairs if pair.up]
