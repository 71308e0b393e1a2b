"""Senders whose room no decode has named yet, and the decodes that were lost, whose rooms some of these are. Pure."""

from __future__ import annotations

from collections import OrderedDict

from kvgrpc.model import RankId
from kvgrpc.transfer.protocol.types import RoomKey, Timing

_MOST_LOST = 1024


class Unnamed:
    """Where router and decode name no engine to prefill, nobody can say whose a room is that a dead decode never named.
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
