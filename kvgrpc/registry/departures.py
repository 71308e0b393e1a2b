"""The ranks that left a registry last, and how each did. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvgrpc.model import RankId, RankRef
from kvgrpc.registry.model import Absence, AbsentRank

MAX_DEPARTURES = 65_536


class Departures:
    """Remembers the last ``most`` ranks that left and are not back. Not thread-safe."""

    def __init__(self, most: int = MAX_DEPARTURES) -> None:
        self._most = most
        self._of: OrderedDict[RankId, AbsentRank] = OrderedDict()

    def note(self, ref: RankRef, absence: Absence, when: float) -> None:
        """``when``: Unix seconds."""
        self._of[ref.rank] = AbsentRank(ref, absence, when)
        self._of.move_to_end(ref.rank)
        if len(self._of) > self._most:
            self._of.popitem(last=False)

    def forget(self, rank: RankId) -> None:
        """It is there again."""
        self._of.pop(rank, None)

    def among(self, ranks: Iterable[RankId]) -> tuple[AbsentRank, ...]:
        """Those of the ranks that are known to have left, in their order."""
        return tuple(self._of[rank] for rank in ranks if rank in self._of)
