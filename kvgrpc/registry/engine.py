"""One engine of the registry in memory: its leased rows, the shape that they share, and what is missing."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from kvgrpc.model import Layout, ModelIdentity, Pool, RankId, Role
from kvgrpc.registry.model import (
    EVERY_RANK,
    AbsentRank,
    Coordinates,
    RankRow,
    RankSelector,
    ResolvedEngine,
    coordinates_of,
    engine_differences,
    pool_differences,
)

NAMED_MISSING_RANKS = 8
MAX_DP_LACKING_EVENTS = 64
MAX_MISSING_RANKS = 64
# Of more ranks than that all rows are looked at, in pieces.
_LOOKED_UP_AT_ONCE = 4_096
_AXES = ("dp", "pp", "cp", "tp")


# Of a pool: its name, and whether it has layers: of those that have none nobody knows what bytes are.
_PoolKey = tuple[str, bool]
# How many rows hold each pool.
Holders = Mapping[_PoolKey, int]


class SharedShape:
    """The shape that all rows of an engine share: role, layout, model, and the pools that they have in common."""

    def __init__(self, role: Role, layout: Layout, model: ModelIdentity) -> None:
        self.role = role
        self.layout = layout
        self.model = model
        self._pools: dict[_PoolKey, Pool] = {}
        self._holders: dict[_PoolKey, int] = {}

    def differences(self, row: RankRow, replaced: Holders | None = None) -> dict[str, str]:
        """Returns what of the row does not fit: field -> both values; empty when it fits.

        ``replaced``: of rows that go before this one comes; a pool that only they hold is no obstacle.
        """
        differences = engine_differences(self.role, self.layout, self.model, row)
        for pool in row.pools:
            for key in ((pool.name, True), (pool.name, False)):
                known = self._pools.get(key)
                found = pool_differences(known, pool) if known is not None and known is not pool else {}
                if found and self._holders[key] > (replaced or {}).get(key, 0):
                    differences |= found
        return differences

    def covers(self, row: RankRow) -> bool:
        """True if the row adds nothing to the shape, and contradicts nothing."""
        return all(_key(pool) in self._pools for pool in row.pools) and not self.differences(row)

    def add(self, row: RankRow) -> None:
        for pool in row.pools:
            key = _key(pool)
            self._pools.setdefault(key, pool)
            self._holders[key] = self._holders.get(key, 0) + 1

    def remove(self, row: RankRow) -> None:
        for key in map(_key, row.pools):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key], self._pools[key]


@dataclass(slots=True, eq=False)
class LeasedRow:
    """A row and its right to exist until ``expires_at`` (registry clock)."""

    row: RankRow
    lease_id: int
    expires_at: float
    engine: RegisteredEngine


class RegisteredEngine:
    """The rows of one engine. All have one role, layout and model, which the first of them brings."""

    def __init__(self, first: RankRow) -> None:
        self.name = first.ref.rank.engine
        self.shape = SharedShape(first.role, first.layout, first.model)
        self.last_renewal = 0.0
        self._leased: dict[RankId, LeasedRow] = {}
        # By coordinates; the tuple is what was asked for since a row last changed.
        self._rows: list[RankRow] = []
        self._ordered: tuple[RankRow, ...] | None = None
        self._missing: str | None = None
        self._newest: LeasedRow | None = None
        self._streams = _Streams()

    @property
    def role(self) -> Role:
        return self.shape.role

    @property
    def registered(self) -> int:
        return len(self._leased)

    @property
    def ready(self) -> bool:
        # Rows are distinct and inside the one layout, so counting them is enough.
        return len(self._leased) == self.shape.layout.ranks

    def leased(self, rank: RankId) -> LeasedRow | None:
        return self._leased.get(rank)

    def add(self, leased: LeasedRow) -> None:
        self._leased[leased.row.ref.rank] = leased
        if self._rows and _coordinates_of_row(leased.row) < _coordinates_of_row(self._rows[-1]):
            bisect.insort(self._rows, leased.row, key=_coordinates_of_row)
        else:
            self._rows.append(leased.row)
        self.shape.add(leased.row)
        self._streams.add(leased.row)
        if self._newest is not None and leased.row.ref.epoch > self._newest.row.ref.epoch:
            self._newest = leased
        self._ordered = self._missing = None

    def remove(self, leased: LeasedRow) -> None:
        del self._leased[leased.row.ref.rank]
        del self._rows[bisect.bisect_left(self._rows, _coordinates_of_row(leased.row), key=_coordinates_of_row)]
        self.shape.remove(leased.row)
        self._streams.remove(leased.row)
        if self._newest is leased:
            self._newest = None
        self._ordered = self._missing = None

    def newest_epoch(self, without: Set[RankId]) -> int:
        """The largest epoch of its rows but those; 0 when there is no other."""
        if self._newest is None:
            self._newest = max(self._leased.values(), key=_epoch_of, default=None)
        if self._newest is None or self._newest.row.ref.rank not in without:
            return _epoch_of(self._newest) if self._newest is not None else 0
        others = (leased for rank, leased in self._leased.items() if rank not in without)
        return max(map(_epoch_of, others), default=0)

    def view(
        self, rows: Sequence[RankRow] = (), missing: Sequence[RankId] = (), absent: Sequence[AbsentRank] = ()
    ) -> ResolvedEngine:
        return ResolvedEngine(
            self.name,
            self.role,
            self.shape.layout,
            self.ready,
            tuple(rows),
            self.registered,
            self.shape.model,
            self._streams.lacking() if self.ready else (),
            tuple(missing),
            tuple(absent),
        )

    def rows(self) -> tuple[RankRow, ...]:
        """All rows, ordered by coordinates."""
        if self._ordered is None:
            self._ordered = tuple(self._rows)
        return self._ordered

    def rows_behind(self, after: tuple[int, ...], limit: int) -> tuple[RankRow, ...]:
        """At most ``limit`` rows with coordinates larger than ``after``, ordered."""
        first = bisect.bisect_right(self._rows, after, key=_coordinates_of_row)
        return tuple(self._rows[first : first + limit])

    def matching(self, selectors: Sequence[RankSelector]) -> Iterator[RankRow | None]:
        """The rows that any of the selectors fits now, each once, ordered by coordinates; None for one passed over."""
        distinct, layout, rows = set(selectors), self.shape.layout, self.rows()
        if EVERY_RANK in distinct:
            return iter(rows)
        if sum(selector.count(layout) for selector in distinct) <= min(self.registered, _LOOKED_UP_AT_ONCE):
            ranks = {rank for selector in distinct for rank in selector.ranks(self.name, layout)}
            found = [leased.row for rank in ranks if (leased := self._leased.get(rank)) is not None]
            return iter(sorted(found, key=_coordinates_of_row))
        fitting = _Fitting(distinct)
        return (row if fitting.has(row.ref.rank) else None for row in rows)

    def missing_ranks(self, most: int = MAX_MISSING_RANKS) -> list[RankId]:
        """The first ranks of the layout that are not registered, by coordinates."""
        rows, layout, found = self._rows, self.shape.layout, list[RankId]()
        most = min(layout.ranks - len(rows), most)
        while len(found) < most:
            # Of rows that all ranks before them precede the number is their index: past a gap it is larger.
            at = bisect.bisect_right(range(len(rows)), len(found), key=lambda index: _number(rows[index]) - index)
            gap = range(at + len(found), _number(rows[at]) if at < len(rows) else layout.ranks)
            found += [_rank_of(self.name, layout, number) for number in gap[: most - len(found)]]
        return found

    def missing(self) -> str:
        """Ranks of the layout that are not registered, for people: the first few, and how many more."""
        if self._missing is None:
            absent = self.shape.layout.ranks - self.registered
            named = [str(rank).partition("/")[2] for rank in self.missing_ranks(NAMED_MISSING_RANKS)]
            more = f" and {absent - len(named)} more" if absent > len(named) else ""
            self._missing = ", ".join(named) + more
        return self._missing


class _Fitting:
    """Tells the ranks that any of many selectors fits: by which coordinates they give, and what those are."""

    def __init__(self, selectors: Iterable[RankSelector]) -> None:
        self._wanted: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
        for selector in selectors:
            given = tuple(axis for axis in _AXES if getattr(selector, axis) is not None)
            self._wanted.setdefault(given, set()).add(tuple(getattr(selector, axis) for axis in given))

    def has(self, rank: RankId) -> bool:
        return any(tuple(getattr(rank, axis) for axis in given) in wanted for given, wanted in self._wanted.items())


class _Streams:
    """The dp ranks that have a stream of events, and those that publish it live, by the rank of each that would."""

    def __init__(self) -> None:
        self._without: tuple[set[int], set[int]] = (set(), set())
        self._with = [0, 0]
        self._lacking: tuple[int, ...] | None = None

    def add(self, row: RankRow) -> None:
        rank = row.ref.rank
        if rank.leads:
            self._lacking = None
            for kind, there in enumerate(_streams_of(row)):
                self._with[kind] += there
                if not there:
                    self._without[kind].add(rank.dp)

    def remove(self, row: RankRow) -> None:
        rank = row.ref.rank
        if rank.leads:
            self._lacking = None
            for kind, there in enumerate(_streams_of(row)):
                self._with[kind] -= there
                self._without[kind].discard(rank.dp)

    def lacking(self) -> tuple[int, ...]:
        """Those without what others have, the first few. Nobody has any where events are off: nobody lacks them."""
        if self._lacking is None:
            lacking = [dp for kind, without in enumerate(self._without) if self._with[kind] for dp in without]
            self._lacking = tuple(heapq.nsmallest(MAX_DP_LACKING_EVENTS, set(lacking))) if lacking else ()
        return self._lacking


def _streams_of(row: RankRow) -> tuple[bool, bool]:
    live = bool(row.endpoints.events_pub)
    return row.serves_events or live, live


def _key(pool: Pool) -> _PoolKey:
    return pool.name, bool(pool.regions)


def holders(rows: Iterable[RankRow]) -> Holders:
    return Counter(_key(pool) for row in rows for pool in row.pools)


def _epoch_of(leased: LeasedRow) -> int:
    return leased.row.ref.epoch


def _coordinates_of_row(row: RankRow) -> Coordinates:
    return coordinates_of(row.ref.rank)


def _number(row: RankRow) -> int:
    """Of its rank among those of the layout, by coordinates."""
    rank, layout = row.ref.rank, row.layout
    return ((rank.dp * layout.pp + rank.pp) * layout.cp + rank.cp) * layout.tp + rank.tp


def _rank_of(engine: str, layout: Layout, number: int) -> RankId:
    number, tp = divmod(number, layout.tp)
    number, cp = divmod(number, layout.cp)
    dp, pp = divmod(number, layout.pp)
    return RankId(engine, dp, pp, cp, tp)
