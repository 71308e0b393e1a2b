"""The ranks that left a registry last, and how each did. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from kvgrpc.model import RankId, RankRef
from kvgrpc.registry.model import Absence, AbsentRank

MAX_DEPARTURES = 65_536


class Departures:
    """Remembers ``most`` ranks that left and are not back. Not thread-safe.

    Past that it forgets of the engine that left as a whole longest ago, and where each has ranks here, of the one that
    has most to be remembered: ranks that come and go all the time push nobody out but themselves.
    """

    def __init__(self, most: int = MAX_DEPARTURES) -> None:
        self._most = most
        self.count = 0
        # Of each engine, the oldest first.
        self._of: dict[str, OrderedDict[RankId, AbsentRank]] = {}
        self._here: set[str] = set()
        # Those of ``_of`` that are not here.
        self._gone: OrderedDict[str, None] = OrderedDict()
        # Those that are, by how many ranks they have in ``_of``: of 65,536 ranks that is some hundred sizes at most.
        self._by_size: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def came(self, engine: str) -> None:
        """Its first rank is here."""
        self._here.add(engine)
        if engine in self._of:
            del self._gone[engine]
            self._sort_in(engine)

    def left(self, engine: str) -> None:
        """Its last rank is not here any more."""
        self._here.discard(engine)
        if engine in self._of:
            self._sort_out(engine)
            self._gone[engine] = None

    def note(self, ref: RankRef, absence: Absence, when: float) -> None:
        """``when``: Unix seconds."""
        engine = ref.rank.engine
        self.forget(ref.rank)
        self._sort_out(engine)
        self._of.setdefault(engine, OrderedDict())[ref.rank] = AbsentRank(ref, absence, when)
        if engine in self._here:
            self._sort_in(engine)
        else:
            self._gone.setdefault(engine)
        self.count += 1
        if self.count > self._most:
            whose = next(iter(self._gone or self._by_size[max(self._by_size)]))
            self.forget(next(iter(self._of[whose])))

    def forget(self, rank: RankId) -> None:
        """It is there again."""
        engine = rank.engine
        absent = self._of.get(engine)
        if absent is None or rank not in absent:
            return
        self._sort_out(engine)
        del absent[rank]
        self.count -= 1
        if not absent:
            del self._of[engine]
            self._gone.pop(engine, None)
        elif engine in self._here:
            self._sort_in(engine)

    def among(self, ranks: Iterable[RankId]) -> tuple[AbsentRank, ...]:
        """Those of the ranks that are known to have left, in their order."""
        found = (self._of[rank.engine].get(rank) for rank in ranks if rank.engine in self._of)
        return tuple(absent for absent in found if absent is not None)

    def _sort_in(self, engine: str) -> None:
        self._by_size[len(self._of[engine])][engine] = None

    def _sort_out(self, engine: str) -> None:
        """Of one that is not sorted in, nothing happens."""
        size = len(self._of.get(engine, ()))
        self._by_size[size].pop(engine, None)
        if not self._by_size[size]:
            del self._by_size[size]
