"""Which ranks a world has, and what they owe each other: the product's own topology (kvgrpc/transfer/layout)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

from kvgrpc.model import Layout, RankId
from kvgrpc.transfer.layout import topology
from kvgrpc.transfer.layout.engines import EngineShape


@dataclass(frozen=True)
class Fleet:
    """One prefill and one decode engine. ``heads``: of the whole model; 0: MLA. Ranks are known by their number."""

    prefill: Layout
    decode: Layout
    heads: int = 0
    layers: int = 4

    @property
    def prefills(self) -> tuple[RankId, ...]:
        return _ranks("P", self.prefill)

    @property
    def decodes(self) -> tuple[RankId, ...]:
        return _ranks("D", self.decode)

    def replica(self, ranks: tuple[RankId, ...], dp: int) -> tuple[int, ...]:
        """Numbers of the ranks that serve a request together."""
        return tuple(number for number, rank in enumerate(ranks) if rank.dp == dp)

    def sources(self, decode: int, prefills: tuple[int, ...]) -> tuple[int, ...]:
        """To which of the request's prefill ranks a decode rank names its rooms."""
        dp, rank = self.prefills[prefills[0]].dp, self.decodes[decode]
        return tuple(
            self.prefills.index(RankId("P", *coordinates))
            for coordinates in topology.prefill_ranks(rank, self.decode, self.prefill, dp)
        )

    def part(self, prefill: int, decode: int) -> topology.Part:
        return _part(self, self.prefills[prefill], self.decodes[decode])

    def gives_aux(self, prefill: int, prefills: tuple[int, ...]) -> bool:
        """Every rank of an engine computes the first token; whose is sent is the topology's to say."""
        return True

    def places(self, decode: int) -> tuple[int, int]:
        """Which of how many decode ranks of one prefill rank it is."""
        rank = self.decodes[decode]
        return topology.place_of(rank, self.prefill, self.decode), topology.decode_ranks_of(self.prefill, self.decode)


class Singles(Fleet):
    """Engines of one rank each; a request names any of the prefills, of which the first sends aux."""

    def __init__(self) -> None:
        super().__init__(Layout(), Layout())

    @property
    def prefills(self) -> tuple[RankId, ...]:
        return RankId("P0"), RankId("P1"), RankId("P2")

    @property
    def decodes(self) -> tuple[RankId, ...]:
        return RankId("D0"), RankId("D1")

    def sources(self, decode: int, prefills: tuple[int, ...]) -> tuple[int, ...]:
        return prefills

    def part(self, prefill: int, decode: int) -> topology.Part:
        return topology.Part(0, self.layers, 0, 0, aux=True)

    def gives_aux(self, prefill: int, prefills: tuple[int, ...]) -> bool:
        return prefill == prefills[0]

    def places(self, decode: int) -> tuple[int, int]:
        return 0, 1


SINGLES = Singles()
FLEETS = (
    SINGLES,
    Fleet(Layout(tp=2), Layout(tp=1), heads=4),
    Fleet(Layout(tp=1), Layout(tp=2), heads=4),
    SINGLES,
    Fleet(Layout(tp=4), Layout(tp=2), heads=4),
    Fleet(Layout(cp=2), Layout(cp=1), heads=2),
    Fleet(Layout(tp=2), Layout(tp=1)),
    Fleet(Layout(tp=1), Layout(tp=2)),
    Fleet(Layout(dp=2), Layout(dp=2, tp=2), heads=2),
    Fleet(Layout(tp=4), Layout(tp=1), heads=2),
    Fleet(Layout(dp=2, cp=2), Layout(tp=2), heads=4),
    Fleet(Layout(pp=2), Layout(), heads=2),
    Fleet(Layout(), Layout(pp=2, tp=2), heads=2),
    Fleet(Layout(cp=2), Layout(cp=2), heads=2),
    Fleet(Layout(pp=2), Layout(pp=2), heads=2),
    Fleet(Layout(pp=4), Layout(pp=2), heads=2),
    Fleet(Layout(pp=2), Layout(pp=4)),
    Fleet(Layout(pp=2, tp=2), Layout()),
    Fleet(Layout(cp=2, tp=2), Layout()),
)


def _ranks(engine: str, layout: Layout) -> tuple[RankId, ...]:
    sizes = map(range, (layout.dp, layout.pp, layout.cp, layout.tp))
    return tuple(RankId(engine, *coordinates) for coordinates in itertools.product(*sizes))


@cache
def _part(fleet: Fleet, prefill: RankId, decode: RankId) -> topology.Part:
    source = EngineShape(fleet.prefill, fleet.heads, fleet.layers).shape(prefill[1:])
    target = EngineShape(fleet.decode, fleet.heads, fleet.layers).shape(decode[1:])
    return topology.owed_part(source, target)
