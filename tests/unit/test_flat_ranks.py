"""An engine's flat rank number is as good as its coordinates."""

from __future__ import annotations

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Layout, RankId, Role
from kvgrpc.server import RankConfig


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("tp_size", [4, 8])
def test_with_one_stage_a_flat_rank_is_divided_as_the_seed_does(dp_size: int, tp_size: int) -> None:
    """Its registry: dp group = engine_rank // tp_size_per_dp_rank, tp rank = engine_rank % tp_size_per_dp_rank."""
    tp_size_per_dp_rank = tp_size // dp_size
    layout = Layout(dp=dp_size, tp=tp_size_per_dp_rank)
    for flat in range(tp_size):
        rank = RankId.from_flat("P", layout, flat)
        assert rank == RankId("P", dp=flat // tp_size_per_dp_rank, tp=flat % tp_size_per_dp_rank)


def test_each_rank_of_a_layout_has_one_flat_number_and_stages_are_outermost() -> None:
    layout = Layout(dp=2, pp=3, cp=2, tp=4)
    ranks = [RankId.from_flat("P", layout, flat) for flat in range(layout.ranks)]
    assert len(set(ranks)) == layout.ranks and all(rank in layout for rank in ranks)
    assert [(rank.pp, rank.dp, rank.cp, rank.tp) for rank in ranks] == sorted(
        (rank.pp, rank.dp, rank.cp, rank.tp) for rank in ranks
    )


@pytest.mark.parametrize("flat", [-1, 8])
def test_a_flat_rank_that_the_layout_does_not_have_is_refused(flat: int) -> None:
    with pytest.raises(InvalidRequest, match="0 to 7") as caught:
        RankId.from_flat("P", Layout(dp=2, tp=4), flat)
    assert caught.value.metadata["field"] == "engine_rank"


def test_a_rank_is_configured_by_its_flat_number() -> None:
    config = RankConfig(engine="P", role=Role.PREFILL, pools=(), layout=Layout(dp=2, tp=4), engine_rank=6)
    assert config.rank == RankId("P", dp=1, tp=2)
