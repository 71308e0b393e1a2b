"""The registry in memory: rows, leases, epochs and engines as one state machine. No clock, thread or I/O of its own."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvgrpc.errors import (
    EngineNotFound,
    InvalidRequest,
    OldShapeStillLeased,
    RegistrationShapeConflict,
    StaleEpoch,
    TooManyRequests,
    Violation,
    WarmingUp,
)
from kvgrpc.model import RankId, RankRef, Role, raise_if
from kvgrpc.registry.engine import Engine, LeasedRow, Shape
from kvgrpc.registry.model import (
    DEFAULT_TTL,
    Lease,
    RankRow,
    RankSelector,
    ResolvedEngine,
    absent,
    conflict_metadata,
    row_differences,
)

MAX_ROWS = 65_536
MAX_ENGINES = 4_096


@dataclass(frozen=True, slots=True)
class Registered:
    """What a call of ``register`` did: the leases in the order of the rows, and the engines that it made READY."""

    leases: tuple[Lease, ...]
    became_ready: tuple[tuple[str, Role], ...]


class MemoryRegistry:
    """Soft state: what it knows is what ranks told it within the last ``ttl`` seconds.

    ``clock`` gives seconds that never go back. ``registry_id`` and ``first_lease_id`` must differ from run to run, so
    that leases of an earlier run are unknown. Not thread-safe. The cost of a call grows with its rows, leases or
    results, never with what the registry holds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        registry_id: str,
        first_lease_id: int,
        ttl: float = DEFAULT_TTL,
        max_rows: int = MAX_ROWS,
        max_engines: int = MAX_ENGINES,
    ) -> None:
        self.registry_id = registry_id
        self.ttl = ttl
        self._clock = clock
        self._started = clock()
        self._lease_ids = itertools.count(first_lease_id)
        self._max_rows = max_rows
        self._max_engines = max_engines
        self._engines: dict[str, Engine] = {}
        self._names: list[str] = []
        self._by_role: dict[Role, dict[str, Engine]] = {role: {} for role in Role}
        # One TTL for all leases, so the order of renewal is the order of expiry.
        self._leases: OrderedDict[int, LeasedRow] = OrderedDict()
        # The largest epoch of ranks that are gone: an older incarnation that wakes up later stays fenced.
        self._fences: OrderedDict[RankId, int] = OrderedDict()

    @property
    def rows(self) -> int:
        return len(self._leases)

    @property
    def engines(self) -> int:
        return len(self._engines)

    @property
    def warming_up(self) -> bool:
        """True for one TTL after the start, while ranks that are there may not have come back yet."""
        return self._clock() < self._started + self.ttl

    def register(self, rows: Sequence[RankRow]) -> Registered:
        """Takes all rows, or none, and renews those that are there already.

        Raises InvalidRequest (a rank twice), StaleEpoch, RegistrationShapeConflict, OldShapeStillLeased,
        TooManyRequests.
        """
        self.expire()
        by_engine = _group(rows)
        for row in rows:
            self._check_epoch(row)
        for name, group in by_engine.items():
            self._check_shape(name, group)
        self._check_room(by_engine)
        waiting = [name for name, group in by_engine.items() if not self._is_ready(name, group[0].role)]
        self._remove_replaced(rows)
        leases = tuple(self._take(row) for row in rows)
        became_ready = [self._engines[name] for name in waiting if self._engines[name].ready]
        return Registered(leases, tuple((engine.name, engine.role) for engine in became_ready))

    def keep_alive(self, lease_ids: Iterable[int]) -> list[int]:
        """Renews leases and returns those that are not known: gone, replaced, or given by another registry."""
        self.expire()
        now = self._clock()
        unknown = []
        for lease_id in lease_ids:
            leased = self._leases.get(lease_id)
            if leased is None:
                unknown.append(lease_id)
            else:
                self._renew(leased, now)
        return unknown

    def deregister(self, refs: Iterable[RankRef]) -> int:
        """Removes the rows of exactly these incarnations and returns how many were there."""
        self.expire()
        removed = 0
        for ref in refs:
            leased = self._leased(ref.rank)
            if leased is not None and leased.row.ref.epoch == ref.epoch:
                self._remove(leased)
                removed += 1
        return removed

    def expire(self) -> tuple[RankRef, ...]:
        """Removes the rows whose leases ran out and returns them. Every other method begins with it."""
        now = self._clock()
        expired = []
        while self._leases:
            leased = next(iter(self._leases.values()))
            if leased.expires_at > now:
                break
            self._remove(leased)
            expired.append(leased.row.ref)
        return tuple(expired)

    def find(self, engine: str, role: Role | None) -> ResolvedEngine | None:
        """The engine without rows, or None when it is not there in this role.

        An empty name means the one engine of the role. Raises InvalidRequest when there are several.
        """
        self.expire()
        found = self._find(engine, role)
        return found.view() if found is not None else None

    def resolve(self, engine: str, role: Role | None, selectors: Sequence[RankSelector] = ()) -> ResolvedEngine:
        """The engine with the rows that any of the selectors fits, ordered by coordinates.

        Raises EngineNotFound, WarmingUp, InvalidRequest (an empty name and several engines of the role).
        """
        self.expire()
        found = self._find(engine, role)
        if found is None:
            raise self.absence(engine, role)
        return found.view(found.select(selectors))

    def get(self, engine: str, after: tuple[int, ...], limit: int) -> ResolvedEngine:
        """The engine with at most ``limit`` rows behind the coordinates ``after``.

        Raises EngineNotFound, WarmingUp, InvalidRequest (an empty name).
        """
        if not engine:
            raise_if([Violation("engine", "the name of an engine; ListEngines has them", engine)])
        self.expire()
        found = self._engines.get(engine)
        if found is None:
            raise self.absence(engine, None)
        return found.view(found.rows_behind(after, limit))

    def list_engines(self, role: Role | None, after: str, limit: int, *, rows: bool) -> tuple[ResolvedEngine, ...]:
        """At most ``limit`` engines with names behind ``after``, ordered by name; with or without their rows."""
        self.expire()
        engines: list[ResolvedEngine] = []
        for index in range(bisect.bisect_right(self._names, after), len(self._names)):
            if len(engines) >= limit:
                break
            engine = self._engines[self._names[index]]
            if role in (None, engine.role):
                engines.append(engine.view(engine.rows() if rows else ()))
        return tuple(engines)

    def absence(self, engine: str, role: Role | None) -> WarmingUp | EngineNotFound:
        """The error that says why this engine is not there, or not READY."""
        found = self._find(engine, role)
        name = engine or (found.name if found is not None else "")
        if self.warming_up:
            ran = self._clock() - self._started
            return WarmingUp(
                f"{absent(name, role, 'READY')} here, and the registry runs for {ran:.1f} s only: ranks that are there "
                "come back within one keepalive",
                metadata={"engine": name},
                retry_after=min(max(self.ttl - ran, 0.05), self.ttl / 10),
            )
        metadata = {"engine": name, "role": role.name if role is not None else ""}
        if found is None:
            return EngineNotFound(absent(name, role, "registered"), metadata=metadata | {"missingRanks": "all"})
        return EngineNotFound(
            f"{absent(name, role, 'READY')}: {found.registered} of {found.shape.layout.ranks} ranks are registered, "
            f"missing: {found.missing()}",
            metadata=metadata | {"missingRanks": found.missing()},
        )

    # Below: one step each of register, in their order, then the bookkeeping of rows.

    def _check_epoch(self, row: RankRow) -> None:
        rank = row.ref.rank
        leased = self._leased(rank)
        current = leased.row.ref.epoch if leased is not None else self._fences.get(rank, 0)
        if row.ref.epoch < current:
            raise StaleEpoch(
                f"{rank} has a newer incarnation: {row.ref.epoch} < {current}. A rank that starts takes the current "
                "epoch + 1; one that runs was replaced and must stop",
                metadata={"rank": rank, "requestEpoch": row.ref.epoch, "currentEpoch": current},
            )
        if leased is not None and row.ref.epoch == current and row != leased.row:
            raise _shape_conflict(rank, row_differences(leased.row, row), "this very incarnation registered otherwise")

    def _check_shape(self, name: str, rows: Sequence[RankRow]) -> None:
        asked = Shape(rows[0].role, rows[0].layout, rows[0].model)
        for row in rows:
            differences = asked.differences(row)
            if differences:
                raise _shape_conflict(row.ref.rank, differences, "rows of one request differ")
            asked.add(row)
        engine = self._engines.get(name)
        held = [leased.row for row in rows if (leased := self._leased(row.ref.rank)) is not None]
        if engine is None or engine.registered == len(held):
            return
        for row in rows:
            differences = engine.shape.differences(row, replaced=held)
            if differences:
                raise self._other_shape(engine, rows, row, differences)

    def _other_shape(
        self, engine: Engine, rows: Sequence[RankRow], row: RankRow, differences: dict[str, str]
    ) -> OldShapeStillLeased | RegistrationShapeConflict:
        rank = row.ref.rank
        if engine.newest_epoch(without={row.ref.rank for row in rows}) >= row.ref.epoch:
            return _shape_conflict(rank, differences, "other ranks of the engine registered otherwise")
        return OldShapeStillLeased(
            f"{rank} has another shape than older incarnations whose leases still run: {', '.join(differences)}",
            metadata=conflict_metadata(rank, differences),
            retry_after=max(engine.last_renewal + self.ttl - self._clock(), 0.01),
        )

    def _check_room(self, by_engine: dict[str, list[RankRow]]) -> None:
        new_engines = sum(name not in self._engines for name in by_engine)
        new_rows = sum(self._leased(row.ref.rank) is None for rows in by_engine.values() for row in rows)
        for scope, value, limit in (
            ("rows", self.rows + new_rows, self._max_rows),
            ("engines", self.engines + new_engines, self._max_engines),
        ):
            if value > limit:
                raise TooManyRequests(
                    f"the registry holds at most {limit} {scope}",
                    metadata={"limit": limit, "value": value, "scope": scope},
                    retry_after=self.ttl,
                )

    def _remove_replaced(self, rows: Sequence[RankRow]) -> None:
        for row in rows:
            leased = self._leased(row.ref.rank)
            if leased is not None and leased.row.ref.epoch < row.ref.epoch:
                self._remove(leased)

    def _take(self, row: RankRow) -> Lease:
        now = self._clock()
        leased = self._leased(row.ref.rank)
        if leased is None:
            engine = self._engines.get(row.ref.rank.engine) or self._add_engine(row)
            leased = LeasedRow(row, next(self._lease_ids), now + self.ttl, engine)
            engine.add(leased)
            self._leases[leased.lease_id] = leased
            self._fences.pop(row.ref.rank, None)
        self._renew(leased, now)
        return Lease(row.ref, leased.lease_id)

    def _renew(self, leased: LeasedRow, now: float) -> None:
        leased.expires_at = now + self.ttl
        leased.engine.last_renewal = now
        self._leases.move_to_end(leased.lease_id)

    def _remove(self, leased: LeasedRow) -> None:
        engine = leased.engine
        engine.remove(leased)
        del self._leases[leased.lease_id]
        self._fence(leased.row.ref)
        if not engine.registered:
            del self._engines[engine.name]
            del self._by_role[engine.role][engine.name]
            del self._names[bisect.bisect_left(self._names, engine.name)]

    def _fence(self, ref: RankRef) -> None:
        self._fences[ref.rank] = ref.epoch
        self._fences.move_to_end(ref.rank)
        if len(self._fences) > self._max_rows:
            self._fences.popitem(last=False)

    def _add_engine(self, row: RankRow) -> Engine:
        engine = Engine(row)
        self._engines[engine.name] = engine
        self._by_role[engine.role][engine.name] = engine
        bisect.insort(self._names, engine.name)
        return engine

    def _is_ready(self, name: str, role: Role) -> bool:
        engine = self._engines.get(name)
        return engine is not None and engine.ready and engine.role == role

    def _leased(self, rank: RankId) -> LeasedRow | None:
        engine = self._engines.get(rank.engine)
        return engine.leased(rank) if engine is not None else None

    def _find(self, name: str, role: Role | None) -> Engine | None:
        if name:
            engine = self._engines.get(name)
            return engine if engine is not None and role in (None, engine.role) else None
        if role is None:
            raise_if([Violation("role", "set when the engine is not named", "unspecified")])
            return None
        candidates = self._by_role[role]
        if len(candidates) > 1:
            rule = f"the name of one of the {len(candidates)} engines with {role.name}"
            raise InvalidRequest.of("engine", name, rule)
        return next(iter(candidates.values()), None)


def _group(rows: Sequence[RankRow]) -> dict[str, list[RankRow]]:
    by_engine: dict[str, list[RankRow]] = {}
    seen: dict[RankId, int] = {}
    for index, row in enumerate(rows):
        first = seen.setdefault(row.ref.rank, index)
        if first != index:
            rule = f"a rank of its own, {row.ref.rank} is rows[{first}] too"
            raise_if([Violation(f"rows[{index}].rank", rule, row.ref.rank)])
        by_engine.setdefault(row.ref.rank.engine, []).append(row)
    return by_engine


def _shape_conflict(rank: RankId, differences: dict[str, str], how: str) -> RegistrationShapeConflict:
    text = "; ".join(f"{field}: {values}" for field, values in differences.items())
    return RegistrationShapeConflict(f"{rank}: {how}: {text}", metadata=conflict_metadata(rank, differences))
