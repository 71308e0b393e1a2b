"""Engines as a registry lists them to whoever takes pages: of their ranks those that lend, read in pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvgrpc.registry import wire
from kvgrpc.registry.model import RankRow, ResolvedEngine
from kvgrpc.rpc.turns import in_pieces
from kvgrpc.v1 import registry_service_pb2 as pb

Stage = tuple[int, int]
_Place = tuple[int, int]


@dataclass(slots=True)
class ListedEngine:
    """An engine, and those of its ranks that lend what a rank of one pp and cp could take.

    ``engine``: without its rows; ``lends``: a rank of any pp and cp does; ``lending``: the rows by dp and tp;
    ``came``: addresses where another incarnation is than before, ``left``: those where nobody is any more.
    """

    engine: ResolvedEngine
    lends: bool = False
    lending: dict[int, dict[int, RankRow]] = field(default_factory=dict)
    came: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    # By dp and tp: a message that did not change is not read again.
    _messages: dict[_Place, pb.RankRow] = field(default_factory=dict)

    def addresses(self) -> Iterator[str]:
        """Of those that lend."""
        return (row.endpoints.grpc for rows in self.lending.values() for row in rows.values())

    def read(self, rows: Collection[pb.RankRow], stage: Stage, before: ListedEngine) -> Iterator[None]:
        """Takes the rows, and yields behind each."""
        for index, message in enumerate(rows):
            yield
            ends, rank = message.endpoints, message.rank.rank
            if not ends.cache:
                continue
            self.lends = True
            if ends.grpc and (rank.pp, rank.cp) == stage:
                self._take((rank.dp, rank.tp), message, f"engine.rows[{index}]", before)
        there = set[str]()
        for address in self.addresses():
            there.add(address)
            yield
        for address in before.addresses():
            if address not in there:
                self.left.append(address)
            yield

    def _take(self, place: _Place, message: pb.RankRow, path: str, before: ListedEngine) -> None:
        dp, tp = place
        known = before.lending.get(dp, {}).get(tp)
        is_known = known is not None and before._messages.get(place) is message
        row = known if known is not None and is_known else wire.engine_row(message, None, path)
        if known is None or (known.ref, known.endpoints.grpc) != (row.ref, row.endpoints.grpc):
            self.came.append(row.endpoints.grpc)
        self.lending.setdefault(dp, {})[tp] = row
        self._messages[place] = message


async def listed(
    head: pb.Engine, rows: Collection[pb.RankRow], stage: Stage, before: ListedEngine | None = None
) -> ListedEngine:
    """Reads an engine for a rank with these pp and cp. ``before``: as it was. Raises InvalidRequest for one that cannot
    be."""
    wire.check_engine_sizes(head, len(rows))
    found = ListedEngine(wire.engine_of(head, ()))
    await in_pieces(found.read(rows, stage, before or ListedEngine(found.engine)))
    return found
