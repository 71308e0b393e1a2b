"""A holder speaks for itself: with other coordinates or sizes its cache would be another one to sessions."""

from __future__ import annotations

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.pull.model import Holder, Lent, alone
from kvgrpc.pull.taking.holders import check_lent

LAYOUT = Layout(dp=2, pp=2, tp=4)
HOLDER = Holder("H", "h:1", "h:2", dp=1, layout=LAYOUT, tp=3, tp_size=4)
OWN = RankId("T", dp=0, pp=1, tp=0)
RANK = RankId("H", dp=1, pp=1, tp=3)


def lent(rank: RankId, layout: Layout = LAYOUT) -> Lent:
    return Lent(2, RankRef(rank, 5), layout)


def test_the_rank_that_was_asked_is_believed() -> None:
    check_lent(lent(RANK), HOLDER, OWN)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (lent(RANK._replace(engine="another")), "holder"),
        (lent(RANK._replace(dp=0)), "holder"),
        (lent(RANK._replace(pp=0)), "holder"),
        (lent(RANK._replace(tp=2)), "holder"),
        (lent(RANK, Layout(dp=2, pp=2, tp=8)), "layout"),
        (lent(RANK, Layout(dp=2**31 - 1, pp=2, tp=4)), "layout"),
    ],
)
def test_another_one_is_not(said: Lent, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_lent(said, HOLDER, OWN)
    assert error.value.metadata["field"] == field


def test_no_two_ranks_of_an_engine_are_one_to_sessions() -> None:
    ranks = [
        RankId("H", dp, pp, 0, tp) for dp in range(LAYOUT.dp) for pp in range(LAYOUT.pp) for tp in range(LAYOUT.tp)
    ]
    known = {alone(RankRef(rank, 5), LAYOUT)[0] for rank in ranks}
    assert len(known) == len(ranks)
    assert all(ref.rank in Layout(dp=LAYOUT.ranks) for ref in known)
