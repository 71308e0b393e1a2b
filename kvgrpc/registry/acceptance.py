"""The rows that a registry takes: no older incarnation, one shape an engine, and no more than fits. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvgrpc.errors import (
    OldShapeStillLeased,
    RegistrationShapeConflict,
    StaleEpoch,
    TooManyRequests,
    Violation,
)
from kvgrpc.model import RankId, raise_if
from kvgrpc.registry.engine import RegisteredEngine, SharedShape, holders
from kvgrpc.registry.model import RankRow, conflict_metadata, row_differences
from kvgrpc.registry.table import EngineTable

MAX_ROWS = 65_536
MAX_ENGINES = 4_096


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The rules, over the table of one registry.

    ``fence_of``: the largest epoch of a rank that is gone, 0 where none is known. ``old_shape_for``: seconds for which
    an engine's present rows may still be there without a renewal. ``room_in``: seconds after which a registry that is
    full may have room.
    """

    table: EngineTable
    fence_of: Callable[[RankId], int]
    old_shape_for: Callable[[RegisteredEngine], float]
    room_in: Callable[[], float]
    max_rows: int = MAX_ROWS
    max_engines: int = MAX_ENGINES

    def check(self, rows: Sequence[RankRow]) -> None:
        """Raises InvalidRequest (a rank twice), StaleEpoch, RegistrationShapeConflict, OldShapeStillLeased,
        TooManyRequests.
        """
        groups = by_engine(rows)
        for row in rows:
            self._check_epoch(row)
        for name, group in groups.items():
            self._check_shape(name, group)
        self._check_room(groups)

    def _check_epoch(self, row: RankRow) -> None:
        rank = row.ref.rank
        leased = self.table.leased(rank)
        current = max(leased.row.ref.epoch if leased is not None else 0, self.fence_of(rank))
        if row.ref.epoch < current:
            raise StaleEpoch(
                f"{rank} has a newer incarnation: {row.ref.epoch} < {current}. A rank that starts takes the current "
                "epoch + 1; one that runs was replaced and must stop",
                metadata={"rank": rank, "requestEpoch": row.ref.epoch, "currentEpoch": current},
            )
        if leased is not None and row.ref.epoch == leased.row.ref.epoch and row != leased.row:
            raise _shape_conflict(rank, row_differences(leased.row, row), "this very incarnation registered otherwise")

    def _check_shape(self, name: str, rows: Sequence[RankRow]) -> None:
        asked = SharedShape(rows[0].role, rows[0].layout, rows[0].model)
        for row in rows:
            differences = asked.differences(row)
            if differences:
                raise _shape_conflict(row.ref.rank, differences, "rows of one request differ")
            asked.add(row)
        engine = self.table.engine(name)
        held = [leased.row for row in rows if (leased := self.table.leased(row.ref.rank)) is not None]
        if engine is None or engine.registered == len(held):
            return
        replaced = holders(held)
        for row in rows:
            differences = engine.shape.differences(row, replaced)
            if differences:
                raise self._other_shape(engine, rows, row, differences)

    def _other_shape(
        self, engine: RegisteredEngine, rows: Sequence[RankRow], row: RankRow, differences: dict[str, str]
    ) -> OldShapeStillLeased | RegistrationShapeConflict:
        rank = row.ref.rank
        if engine.newest_epoch(without={row.ref.rank for row in rows}) >= row.ref.epoch:
            return _shape_conflict(rank, differences, "other ranks of the engine registered otherwise")
        return OldShapeStillLeased(
            f"{rank} has another shape than older incarnations whose leases still run: {', '.join(differences)}",
            metadata=conflict_metadata(rank, differences),
            retry_after=max(self.old_shape_for(engine), 0.01),
        )

    def _check_room(self, groups: dict[str, list[RankRow]]) -> None:
        new_engines = sum(self.table.engine(name) is None for name in groups)
        new_rows = sum(self.table.leased(row.ref.rank) is None for rows in groups.values() for row in rows)
        for scope, value, limit in (
            ("rows", self.table.rows + new_rows, self.max_rows),
            ("engines", self.table.engines + new_engines, self.max_engines),
        ):
            if value > limit:
                raise TooManyRequests(
                    f"the registry holds at most {limit} {scope}",
                    metadata={"limit": limit, "value": value, "scope": scope},
                    retry_after=self.room_in(),
                )


def by_engine(rows: Sequence[RankRow]) -> dict[str, list[RankRow]]:
    """The rows of each engine, in their order. Raises InvalidRequest for a rank that is there twice."""
    groups: dict[str, list[RankRow]] = {}
    seen: dict[RankId, int] = {}
    for index, row in enumerate(rows):
        first = seen.setdefault(row.ref.rank, index)
        if first != index:
            rule = f"a rank of its own, {row.ref.rank} is rows[{first}] too"
            raise_if([Violation(f"rows[{index}].rank", rule, row.ref.rank)])
        groups.setdefault(row.ref.rank.engine, []).append(row)
    return groups


def _shape_conflict(rank: RankId, differences: dict[str, str], how: str) -> RegistrationShapeConflict:
    text = "; ".join(f"{field}: {values}" for field, values in differences.items())
    return RegistrationShapeConflict(f"{rank}: {how}: {text}", metadata=conflict_metadata(rank, differences))
