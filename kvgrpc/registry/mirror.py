"""What a reader of WatchEngines knows: the engines of a registry, as its messages say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvgrpc.model import RankId
from kvgrpc.registry import wire
from kvgrpc.registry.model import EngineChange, RankRow, ResolvedEngine, coordinates_of
from kvgrpc.v1 import registry_service_pb2 as pb


class EngineMirror:
    """Engines with their rows. Not thread-safe.

    A full state takes the place of what was known in one step, when it is complete: until then the old one stands.
    """

    def __init__(self) -> None:
        self.complete = False
        self.warming_up = True
        self._pools = wire.PoolCache()
        self._engines: dict[str, _Mirrored] = {}
        self._coming: dict[str, _Mirrored] | None = None

    @property
    def engines(self) -> Mapping[str, ResolvedEngine]:
        """Every engine by its name, with all of its rows ordered by coordinates."""
        return {name: mirrored.engine() for name, mirrored in self._engines.items()}

    def engine(self, name: str) -> ResolvedEngine | None:
        """One engine with its rows; None when it is not there, which means something once ``complete``, and not while
        ``warming_up``.
        """
        mirrored = self._engines.get(name)
        return mirrored.engine() if mirrored is not None else None

    def apply(self, message: pb.WatchEnginesResponse) -> Sequence[str]:
        """Takes one message and returns the names of engines that are news now. Raises InvalidRequest."""
        self.warming_up = message.warming_up
        if message.state_begins:
            self._coming = {}
        into = self._engines if self._coming is None else self._coming
        changes = [wire.change_from_pb(change, self._pools) for change in message.changes]
        for change in changes:
            _apply(into, change)
        if message.state_complete and self._coming is not None:
            news = [*{**self._engines, **self._coming}]
            self._engines, self._coming, self.complete = self._coming, None, True
            return news
        return [] if self._coming is not None else [*dict.fromkeys(change.engine.name for change in changes)]


class _Mirrored:
    """One engine: its head, and its rows."""

    def __init__(self) -> None:
        self.head: ResolvedEngine
        self.rows: dict[RankId, RankRow] = {}

    def engine(self) -> ResolvedEngine:
        rows = sorted(self.rows.values(), key=lambda row: coordinates_of(row.ref.rank))
        return replace(self.head, rows=tuple(rows))


def _apply(engines: dict[str, _Mirrored], change: EngineChange) -> None:
    mirrored = engines.setdefault(change.engine.name, _Mirrored())
    mirrored.head = change.engine
    for ref in change.gone:
        known = mirrored.rows.get(ref.rank)
        if known is not None and known.ref.epoch <= ref.epoch:
            del mirrored.rows[ref.rank]
    mirrored.rows |= {row.ref.rank: row for row in change.engine.rows}
    if not change.engine.registered_ranks:
        del engines[change.engine.name]
