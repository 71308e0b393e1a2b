"""The engines of a registry, as a reader of WatchEngines knows them from its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter

from kvgrpc.rpc.turns import in_pieces
from kvgrpc.v1 import registry_service_pb2 as pb

_in_order = attrgetter("dp", "pp", "cp", "tp")
_Coordinates = tuple[int, int, int, int]


class EngineMirror:
    """Engines with their rows. Not thread-safe.

    A full state takes the place of what was known in one step, when it is complete: until then the old one stands.
    """

    def __init__(self) -> None:
        self.complete = False
        self.warming_up = True
        self._engines: dict[str, _Mirrored] = {}
        self._coming: dict[str, _Mirrored] | None = None

    @property
    def engines(self) -> Mapping[str, pb.Engine]:
        """Every engine by its name, with all of its rows ordered by coordinates."""
        return {name: mirrored.whole() for name, mirrored in self._engines.items()}

    def engine(self, name: str) -> pb.Engine | None:
        """One engine with its rows; None when it is not there, which means something once ``complete``, and not while
        ``warming_up``.
        """
        mirrored = self._engines.get(name)
        return mirrored.whole() if mirrored is not None else None

    def parts(self, name: str) -> tuple[pb.Engine, Collection[pb.RankRow]] | None:
        """The engine and its rows in any order: ``engine`` without a copy. A row that did not change is the same object
        as before."""
        mirrored = self._engines.get(name)
        return (mirrored.head, mirrored.rows.values()) if mirrored is not None else None

    def apply(self, message: pb.WatchEnginesResponse) -> Sequence[str]:
        """Takes one message and returns the names of engines that are news now."""
        for _ in self._steps(message):
            pass
        return self._news(message)

    async def apply_in_pieces(self, message: pb.WatchEnginesResponse) -> Sequence[str]:
        """``apply``, which takes long for a message of thousands of rows. Nothing else is asked of the mirror meanwhile
        but ``warming_up`` and ``complete``."""
        await in_pieces(self._steps(message))
        return self._news(message)

    def _steps(self, message: pb.WatchEnginesResponse) -> Iterator[None]:
        """Takes its changes, and yields behind each row."""
        self.warming_up = message.warming_up
        if message.state_begins:
            self._coming = {}
        into = self._engines if self._coming is None else self._coming
        for change in message.changes:
            yield from _apply(into, change)

    def _news(self, message: pb.WatchEnginesResponse) -> Sequence[str]:
        if message.state_complete and self._coming is not None:
            news = [*{**self._engines, **self._coming}]
            self._engines, self._coming, self.complete = self._coming, None, True
            return news
        return [] if self._coming is not None else [*dict.fromkeys(change.engine.name for change in message.changes)]


class _Mirrored:
    """One engine: its head, and its rows."""

    def __init__(self) -> None:
        self.head: pb.Engine
        self.rows: dict[_Coordinates, pb.RankRow] = {}

    def whole(self) -> pb.Engine:
        engine = pb.Engine()
        engine.CopyFrom(self.head)
        engine.rows.extend(self.rows[at] for at in sorted(self.rows))
        return engine


def _apply(engines: dict[str, _Mirrored], change: pb.EngineChange) -> Iterator[None]:
    name = change.engine.name
    mirrored = engines.setdefault(name, _Mirrored())
    # Before its rows: whoever hears of what was applied in part, where the stream broke, has an engine all the same.
    mirrored.head = _head_of(change.engine)
    for ref in change.gone:
        at = _in_order(ref.rank)
        known = mirrored.rows.get(at)
        if known is not None and known.rank.epoch <= ref.epoch:
            del mirrored.rows[at]
        yield
    for row in change.engine.rows:
        mirrored.rows[_in_order(row.rank.rank)] = row
        yield
    if not change.engine.registered_ranks:
        del engines[name]


def _head_of(engine: pb.Engine) -> pb.Engine:
    """The engine without its rows, which are thousands and are held by their message anyway: none is copied."""
    return pb.Engine(**{field.name: value for field, value in engine.ListFields() if field.name != "rows"})
