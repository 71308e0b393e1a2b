"""All rows, by engine: what every question to a registry is answered from, and what changed since. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvgrpc.errors import EngineNotFound, InvalidRequest, Violation, WarmingUp
from kvgrpc.model import RankId, Role, raise_if
from kvgrpc.registry.departures import Departures
from kvgrpc.registry.engine import LeasedRow, RegisteredEngine
from kvgrpc.registry.model import EngineChange, RankRow, RankSelector, ResolvedEngine, absent


class EngineTable:
    """The rows of all engines. Not thread-safe. A question costs what its answer holds, never what the table holds.

    ``departures``: how ranks left; whoever removes a row notes it there.
    """

    def __init__(self) -> None:
        self.departures = Departures()
        self._engines: dict[str, RegisteredEngine] = {}
        self._names: list[str] = []
        self._by_role: dict[Role, dict[str, RegisteredEngine]] = {role: {} for role in Role}
        self._rows = 0
        self._touched: dict[str, _Touched] = {}

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def engines(self) -> int:
        return len(self._engines)

    def engine(self, name: str) -> RegisteredEngine | None:
        return self._engines.get(name)

    def leased(self, rank: RankId) -> LeasedRow | None:
        engine = self._engines.get(rank.engine)
        return engine.leased(rank) if engine is not None else None

    def add(self, row: RankRow, lease_id: int, expires_at: float) -> LeasedRow:
        """Takes a row of a rank that is not there, and that fits its engine."""
        engine = self._engines.get(row.ref.rank.engine)
        self._touch(row.ref.rank, engine)
        if engine is None:
            engine = self._add_engine(row)
        leased = LeasedRow(row, lease_id, expires_at, engine)
        engine.add(leased)
        self.departures.forget(row.ref.rank)
        self._rows += 1
        return leased

    def remove(self, leased: LeasedRow) -> None:
        engine = leased.engine
        self._touch(leased.row.ref.rank, engine)
        engine.remove(leased)
        self._rows -= 1
        if not engine.registered:
            del self._engines[engine.name]
            del self._by_role[engine.role][engine.name]
            del self._names[bisect.bisect_left(self._names, engine.name)]
            self.departures.left(engine.name)

    def take_changes(self) -> list[EngineChange]:
        """Returns what changed since it was last asked, one entry an engine; what came and went in between is not
        there."""
        touched, self._touched = self._touched, {}
        return [change for name, before in touched.items() if (change := self._change(name, before)) is not None]

    def find(self, engine: str, role: Role | None) -> ResolvedEngine | None:
        """The engine without rows, or None when it is not there in this role.

        An empty name means the one engine of the role. Raises InvalidRequest when there are several.
        """
        found = self._find(engine, role)
        return found.view() if found is not None else None

    def select(
        self, engine: str, role: Role | None, selectors: Sequence[RankSelector] = ()
    ) -> tuple[ResolvedEngine, Iterator[RankRow | None]] | None:
        """Finds as ``find`` does, with the rows that any of the selectors fits, ordered by coordinates, and None for
        each that it passed over: of an engine of thousands that takes long."""
        found = self._find(engine, role)
        return None if found is None else (found.view(), found.matching(selectors))

    def get(self, engine: str, after: tuple[int, ...], limit: int) -> ResolvedEngine | None:
        """The engine with at most ``limit`` rows behind the coordinates ``after``. Raises InvalidRequest: no name."""
        if not engine:
            raise_if([Violation("engine", "the name of an engine; ListEngines has them", engine)])
        found = self._engines.get(engine)
        if found is None:
            return None
        missing = found.missing_ranks()
        return found.view(found.rows_behind(after, limit), missing, self.departures.among(missing))

    def list_engines(self, role: Role | None, after: str, limit: int, *, rows: bool) -> tuple[ResolvedEngine, ...]:
        """At most ``limit`` engines with names behind ``after``, ordered by name; with or without their rows."""
        engines: list[ResolvedEngine] = []
        for index in range(bisect.bisect_right(self._names, after), len(self._names)):
            if len(engines) >= limit:
                break
            engine = self._engines[self._names[index]]
            if role in (None, engine.role):
                engines.append(engine.view(engine.rows() if rows else ()))
        return tuple(engines)

    def absence(self, engine: str, role: Role | None, warming_up_for: float) -> WarmingUp | EngineNotFound:
        """The error that says why this engine is not there, or not READY.

        ``warming_up_for``: seconds until an absence means something; 0: it does.
        """
        found = self._find(engine, role)
        name = engine or (found.name if found is not None else "")
        if warming_up_for > 0:
            return WarmingUp(
                f"{absent(name, role, 'READY')} here, and the registry does not know everybody yet: it has just "
                "started, or does not reach its store. Ranks that are there come back within one keepalive",
                metadata={"engine": name},
                retry_after=min(max(warming_up_for, 0.05), 1.0),
            )
        metadata = {"engine": name, "role": role.name if role is not None else ""}
        if found is None:
            return EngineNotFound(absent(name, role, "registered"), metadata=metadata | {"missingRanks": "all"})
        return EngineNotFound(
            f"{absent(name, role, 'READY')}: {found.registered} of {found.shape.layout.ranks} ranks are registered, "
            f"missing: {found.missing()}",
            metadata=metadata | {"missingRanks": found.missing()},
        )

    def _find(self, name: str, role: Role | None) -> RegisteredEngine | None:
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

    def _add_engine(self, row: RankRow) -> RegisteredEngine:
        engine = RegisteredEngine(row)
        self._engines[engine.name] = engine
        self._by_role[engine.role][engine.name] = engine
        bisect.insort(self._names, engine.name)
        self.departures.came(engine.name)
        return engine

    def _touch(self, rank: RankId, engine: RegisteredEngine | None) -> None:
        touched = self._touched.get(rank.engine)
        if touched is None:
            touched = self._touched[rank.engine] = _Touched(engine.view() if engine is not None else None)
        if rank not in touched.before:
            leased = engine.leased(rank) if engine is not None else None
            touched.before[rank] = leased.row if leased is not None else None

    def _change(self, name: str, touched: _Touched) -> EngineChange | None:
        engine = self._engines.get(name)
        rows, gone, before = [], [], []
        for rank, row_before in touched.before.items():
            leased = engine.leased(rank) if engine is not None else None
            row = leased.row if leased is not None else None
            if row == row_before:
                continue
            if row is not None:
                rows.append(row)
            if row_before is not None:
                before.append(row_before.ref)
                if row is None:
                    gone.append(row_before.ref)
        if engine is not None:
            now = engine.view(rows)
        elif touched.engine is not None:
            now = ResolvedEngine(name, touched.engine.role, touched.engine.layout, False, model=touched.engine.model)
        else:
            return None
        if not rows and not gone:
            return None
        return EngineChange(now, tuple(gone), tuple(before), None if touched.engine is None else touched.engine.role)


@dataclass(slots=True)
class _Touched:
    """An engine as it was before it changed, and those of its ranks that changed (None: was not there)."""

    engine: ResolvedEngine | None
    before: dict[RankId, RankRow | None] = field(default_factory=dict)
