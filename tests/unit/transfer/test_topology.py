"""What does not fit is refused with every field that differs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvgrpc.errors import InvalidRequest, ParallelLayoutMismatch
from kvgrpc.model import MAX_ENGINE_RANKS, Attention, Layout, ModelIdentity, Pool, PoolKind, RankId, Region
from kvgrpc.transfer.layout.heads import runs
from kvgrpc.transfer.layout.topology import (
    NOTHING,
    Part,
    Shape,
    check_layers,
    layers_of_pools,
    owed_part,
    prefill_ranks,
    wanted_part,
)
from kvgrpc.transfer.wire import part_from_pb, part_to_pb

POOL = Pool(
    "kv",
    PoolKind.KV,
    16,
    100,
    "float32",
    tuple(Region(layer, part, 4096, 512, 512) for layer in (2, 3) for part in ("k", "v")),
    heads_total=8,
    head_count=8,
)
STAGE_BEYOND = replace(POOL, regions=tuple(region._replace(layer=region.layer + 1) for region in POOL.regions))
DECODE = Shape(RankId("D"), Layout(), (POOL,), (16,), "shm")
PREFILL = Shape(RankId("P"), Layout(), (replace(POOL, pages=7, location="cuda:1"),), (16,), "shm")


def test_equal_shapes_owe_all_layers_and_aux() -> None:
    assert owed_part(PREFILL, DECODE) == Part(2, 2, 0, 8, True)


def test_without_aux_buffers_no_part_says_aux() -> None:
    assert not owed_part(replace(PREFILL, aux_item_bytes=()), replace(DECODE, aux_item_bytes=())).aux


def test_a_stage_owes_the_layers_that_both_have() -> None:
    half = replace(POOL, regions=POOL.regions[2:])
    smaller = replace(PREFILL, rank=RankId("P", pp=1), layout=Layout(pp=2), pools=(half,))
    assert owed_part(smaller, DECODE) == Part(3, 1, 0, 8, True), "the last one computes the first token"
    first = replace(smaller, rank=RankId("P", pp=0), pools=(replace(POOL, regions=POOL.regions[:2]),))
    assert owed_part(first, DECODE) == Part(2, 1, 0, 8, False)
    assert owed_part(PREFILL, replace(DECODE, layout=Layout(pp=2), pools=(half,))) == Part(3, 1, 0, 8, True)


@pytest.mark.parametrize("stages", [[(2,)], [(2,), (4,)], [(2, 3), (3,)], [(2,), None]])
def test_stages_that_are_not_the_layers_of_decode_are_refused(stages: list[tuple[int, ...] | None]) -> None:
    check_layers(DECODE.pools, [(2,), (3,)])
    with pytest.raises(ParallelLayoutMismatch) as refused:
        check_layers(DECODE.pools, stages)
    assert refused.value.metadata["mismatchedFields"] == "layers"


def test_a_layer_without_a_cache_may_be_the_last_of_a_stage() -> None:
    """As one that is a feed-forward network alone. One rank of decode has the layers on both sides of it."""
    whole, last = of_layers("kv", 0, 1, 3), of_layers("kv", 3)
    check_layers([whole], [(0, 1), (3,)])
    stage = replace(PREFILL, rank=RankId("P", pp=1), layout=Layout(pp=2), pools=(last,))
    assert owed_part(stage, replace(DECODE, pools=(whole,))) == Part(3, 1, 0, 8, True)
    for stages in ([(0, 1), (2,)], [(0, 1), (1, 3)], [(0,), (3,)]):
        with pytest.raises(ParallelLayoutMismatch):
            check_layers([whole], stages)


def test_a_stage_whose_layers_are_all_of_another_one_of_prefill_hears_that_they_do_not_fit() -> None:
    """Decode's Hello says what it expects: no number below zero, which no Hello can hold."""
    stage = replace(DECODE, rank=RankId("D", pp=1), layout=Layout(pp=4), pools=(of_layers("kv", 8, 9),))
    prefill = replace(PREFILL, layout=Layout(pp=2), pools=(of_layers("kv", 0),))
    expected = wanted_part(stage, (0, 0, 0, 0), prefill.layout, (0,))
    assert part_from_pb(part_to_pb(expected)) == NOTHING
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(prefill, stage)
    assert caught.value.metadata["pools[0].layers"] == "0 != 8 to 9"


def of_layers(name: str, *layers: int) -> Pool:
    return replace(POOL, name=name, regions=tuple(Region(layer, "kv", 4096, 512, 512) for layer in layers))


MIXED = of_layers("kv", 1, 3, 5), of_layers("swa", 0, 2, 4)
LATER = of_layers("kv", 3, 5), of_layers("swa", 4)


def test_a_stage_owes_the_layers_of_each_kind_that_it_has() -> None:
    stage = replace(PREFILL, rank=RankId("P", pp=1), layout=Layout(pp=2), pools=LATER)
    assert owed_part(stage, replace(DECODE, pools=MIXED)) == Part(3, 3, 0, 8, True)
    equal = replace(DECODE, rank=RankId("D", pp=1), layout=Layout(pp=2), pools=LATER)
    assert owed_part(stage, equal) == Part(3, 3, 0, 8, True)


@pytest.mark.parametrize(
    ("prefill", "fields"),
    [
        ((of_layers("kv", 3, 5), of_layers("swa", 3)), "pools[1].layers"),  # a layer of the other kind
        ((of_layers("kv", 5), of_layers("swa", 3, 4)), "pools[0].layers,pools[1].layers"),
        ((of_layers("kv", 1, 5), of_layers("swa", 0, 4)), "pools[0].layers,pools[1].layers"),  # some in between are not
    ],
)
def test_a_stage_of_which_a_kind_has_other_layers_is_refused(prefill: tuple[Pool, ...], fields: str) -> None:
    stage = replace(PREFILL, rank=RankId("P", pp=1), layout=Layout(pp=2), pools=prefill)
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(stage, replace(DECODE, pools=MIXED))
    assert caught.value.metadata["mismatchedFields"] == fields
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(replace(PREFILL, pools=MIXED), replace(DECODE, rank=stage.rank, layout=stage.layout, pools=prefill))
    assert caught.value.metadata["mismatchedFields"] == fields
    with pytest.raises(ParallelLayoutMismatch):
        owed_part(stage, replace(DECODE, rank=RankId("D", pp=1), layout=Layout(pp=2), pools=LATER))


# Of a model that keeps nothing of its layers 2 and 5: what each of two stages has, by where they are divided.
SPARSE = of_layers("kv", 1, 4, 7), of_layers("swa", 0, 3, 6)
BEFORE_A_GAP = (of_layers("kv", 1), of_layers("swa", 0)), (of_layers("kv", 4, 7), of_layers("swa", 3, 6))
AROUND_A_GAP = (of_layers("kv", 1, 4), of_layers("swa", 0, 3)), (of_layers("kv", 7), of_layers("swa", 6))


@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        (BEFORE_A_GAP, [Part(0, 2, 0, 8, False), Part(3, 5, 0, 8, True)]),
        (AROUND_A_GAP, [Part(0, 5, 0, 8, False), Part(6, 2, 0, 8, True)]),
    ],
)
def test_layers_that_keep_nothing_may_be_the_first_or_last_of_a_stage(
    stages: tuple[tuple[Pool, ...], ...], parts: list[Part]
) -> None:
    layers = [layers_of_pools(pools) for pools in stages]
    check_layers(SPARSE, layers)
    decode, whole, layout = replace(DECODE, pools=SPARSE), replace(PREFILL, pools=SPARSE), Layout(pp=2)
    for pp, pools in enumerate(stages):
        stage = replace(PREFILL, rank=RankId("P", pp=pp), layout=layout, pools=pools)
        assert owed_part(stage, decode) == wanted_part(decode, (0, pp, 0, 0), layout, layers[pp]) == parts[pp]
        taking = replace(DECODE, rank=RankId("D", pp=pp), layout=layout, pools=pools)
        expected = wanted_part(taking, (0, 0, 0, 0), whole.layout, layers_of_pools(SPARSE))
        assert owed_part(whole, taking) == expected == replace(parts[pp], aux=True)


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([(0, 1), (4, 6, 7)], "0 to 1; 4, 6 to 7"),  # the first of a stage, behind one that keeps nothing
        ([(0,), (3, 4, 6, 7)], "0; 3 to 4, 6 to 7"),  # the last of one
        ([(0, 1), (3, 4, 6)], "0 to 1; 3 to 4, 6"),  # the last of all
        ([(1,), (3, 4, 6, 7)], "1; 3 to 4, 6 to 7"),
        ([(0, 1), (3, 7), (6,)], "0 to 1; 3, 7; 6"),  # one in between
        ([(0, 1)], "0 to 1"),  # a whole stage
        ([(0, 1), (1, 3, 4), (6, 7)], "0 to 1; 1, 3 to 4; 6 to 7"),  # stages that overlap
        ([(0, 1, 2), (3, 4, 6, 7)], "0 to 2; 3 to 4, 6 to 7"),  # one that decode has nothing of
        ([(0, 2**32 - 1), (3, 4, 6, 7)], "0, 4294967295; 3 to 4, 6 to 7"),  # nobody counts up to it
    ],
)
def test_a_layer_that_no_stage_has_or_two_have_is_refused_with_what_each_has(
    stages: list[tuple[int, ...]], text: str
) -> None:
    with pytest.raises(ParallelLayoutMismatch) as refused:
        check_layers(SPARSE, stages)
    assert refused.value.metadata["layers"] == f"{text} != 0 to 1, 3 to 4, 6 to 7"


def test_a_decode_stage_of_which_prefill_has_no_layer_is_refused_with_what_each_has() -> None:
    """Of a smaller model. What decode expects of it, nothing, can be said, and prefill says why it does not fit."""
    layout, rank = Layout(pp=2), RankId("D", pp=1)
    taking = replace(DECODE, rank=rank, layout=layout, pools=(of_layers("kv", 4, 7), of_layers("swa", 3, 6)))
    smaller = replace(PREFILL, pools=(of_layers("kv", 1), of_layers("swa", 0)))
    assert wanted_part(taking, (0, 0, 0, 0), Layout(), layers_of_pools(smaller.pools)).empty
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(smaller, taking)
    assert refused.value.metadata["pools[0].layers"] == "1 != 4, 7"
    assert refused.value.metadata["pools[1].layers"] == "0 != 3, 6"


def test_a_pool_of_which_a_stage_has_no_layer_says_nothing_of_its_bytes() -> None:
    without = replace(POOL, name="swa", regions=(), dtype="", axes="")
    stage = replace(PREFILL, rank=RankId("P", pp=1), layout=Layout(pp=2), pools=(of_layers("kv", 5), without))
    whole = of_layers("kv", 1, 5), replace(of_layers("swa", 0, 2), axes="token,dim")
    assert owed_part(stage, replace(DECODE, pools=whole)) == Part(5, 1, 0, 8, True)
    equal = replace(DECODE, rank=stage.rank, layout=stage.layout, pools=stage.pools)
    assert owed_part(stage, equal) == Part(5, 1, 0, 8, True)
    with pytest.raises(ParallelLayoutMismatch) as caught:  # a layer that the other side has
        owed_part(stage, replace(DECODE, pools=(of_layers("kv", 1), of_layers("swa", 0, 5))))
    assert caught.value.metadata["pools[1].layers"] == "none != 0, 5"
    with pytest.raises(ParallelLayoutMismatch) as caught:  # its pages are numbered all the same
        owed_part(stage, replace(DECODE, pools=(whole[0], replace(whole[1], page_tokens=32))))
    assert caught.value.metadata["mismatchedFields"] == "pools[1].page_tokens"


def test_layers_that_are_not_in_a_row_are_named_each() -> None:
    stage = replace(PREFILL, rank=RankId("P", pp=1), layout=Layout(pp=2), pools=LATER)
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(stage, replace(DECODE, pools=(of_layers("kv", 3, 4, 5), MIXED[1])))
    assert caught.value.metadata["pools[0].layers"] == "3, 5 != 3 to 5"


@pytest.mark.parametrize(
    ("prefill", "fields"),
    [
        (replace(PREFILL, layout=Layout(tp=2)), "pools[0].head_count"),
        (replace(PREFILL, layout=Layout(pp=2), pools=(STAGE_BEYOND,)), "pools[0].layers"),
        (replace(PREFILL, rank=RankId("P", pp=1)), "rank"),
        (
            replace(PREFILL, pools=(replace(POOL, page_tokens=32, dtype="bfloat16"),)),
            "pools[0].page_tokens,pools[0].dtype",
        ),
        (replace(PREFILL, pools=(replace(POOL, regions=POOL.regions[:2]),)), "pools[0].regions"),
        (
            replace(PREFILL, pools=(replace(POOL, regions=tuple(r._replace(page_bytes=256) for r in POOL.regions)),)),
            "pools[0].regions[0].page_bytes",
        ),
        (replace(PREFILL, pools=(POOL, POOL)), "pools"),
        (replace(PREFILL, aux_item_bytes=(8, 8)), "aux_item_bytes"),
        (replace(PREFILL, data_plane="mooncake"), "data_plane"),
    ],
)
def test_what_differs_is_named(prefill: Shape, fields: str) -> None:
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(prefill, DECODE)
    assert caught.value.metadata["mismatchedFields"] == fields


def test_shares_of_heads_that_no_size_makes_are_told_from_both_sides_whatever_pools_there_are() -> None:
    quarter = replace(POOL, head_count=2)
    prefill = replace(PREFILL, layout=Layout(tp=2), pools=(quarter,))
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(prefill, DECODE)
    of_prefill = "2 from 0 on, where tp 0 of 2 is to have 4 from 0 on"
    assert caught.value.metadata["pools[0].head_count"] == f"{of_prefill} != 8 from 0 on at tp 0 of 1"
    assert caught.value.message.endswith("give both engines one tensor-parallel size")
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(replace(prefill, pools=(quarter, replace(quarter, name="swa"))), DECODE)
    assert caught.value.metadata["pools[1].head_count"] == f"{of_prefill} != none"
    assert caught.value.metadata["pools"] == "['kv', 'swa'] != ['kv']"


def test_ranks_that_all_have_all_heads_are_refused_by_the_sizes_that_differ() -> None:
    """Both have eight heads of eight, which "prefill 8, decode 8" said and nothing more."""
    prefill = replace(PREFILL, rank=RankId("P", tp=1), layout=Layout(tp=4))
    decode = replace(DECODE, layout=Layout(tp=2))
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(prefill, decode)
    of_prefill = "prefill 8 from 0 on, where tp 1 of 4 is to have 2 from 2 on"
    of_decode = "decode 8 from 0 on, where tp 0 of 2 is to have 4 from 0 on"
    assert f"pools[0].head_count: {of_prefill}, {of_decode}. Between" in caught.value.message
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(prefill, replace(decode, layout=Layout(tp=4), model=ModelIdentity("other")))
    assert "one tensor-parallel size" not in caught.value.message


def test_half_of_the_heads_cannot_be_taken_from_a_pool_that_does_not_say_where_they_are() -> None:
    """Its pages have the right size, and half of each would be of other heads."""
    unsaid = replace(POOL, axes="")
    half = replace(
        unsaid, head_count=4, regions=tuple(each._replace(page_bytes=each.page_bytes // 2) for each in POOL.regions)
    )
    prefill, decode = replace(PREFILL, pools=(unsaid,)), replace(DECODE, layout=Layout(tp=2), pools=(half,))
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(prefill, decode)
    assert caught.value.metadata["mismatchedFields"] == "pools[0].axes"
    with pytest.raises(ValueError, match="do not translate"):
        runs(unsaid, half)


def test_a_rank_of_prefill_that_has_all_heads_owes_its_equal_those_that_it_wants() -> None:
    """As with states that are divided among ranks while keys and values are not."""
    pool = replace(POOL, axes="token,head,dim")
    half = tuple(region._replace(page_bytes=region.page_bytes // 2) for region in POOL.regions)
    for tp in range(2):
        prefill = replace(PREFILL, rank=RankId("P", tp=tp), layout=Layout(tp=2), pools=(pool,))
        decode = replace(DECODE, rank=RankId("D", tp=tp), layout=Layout(tp=2))
        wanted = replace(pool, head_start=4 * tp, head_count=4, regions=half)
        assert owed_part(prefill, replace(decode, pools=(wanted,))) == Part(2, 2, 4 * tp, 4, True)
        with pytest.raises(ParallelLayoutMismatch) as caught:
            owed_part(replace(prefill, pools=(wanted,)), replace(decode, pools=(pool,)))
        assert "pools[0].head_count" in caught.value.metadata
        for more in (1, 8):  # of which the model has no more than eight
            beyond = replace(wanted, head_start=4 + more)
            with pytest.raises(ParallelLayoutMismatch) as caught:
                owed_part(prefill, replace(decode, pools=(beyond,)))
            assert "pools[0].head_start" in caught.value.metadata
        with pytest.raises(ParallelLayoutMismatch) as caught:
            owed_part(
                replace(prefill, pools=(replace(pool, axes=""),)), replace(decode, pools=(replace(wanted, axes=""),))
            )
        assert caught.value.metadata["mismatchedFields"] == "pools[0].axes"


def test_pools_without_common_heads_have_no_runs() -> None:
    pool = replace(POOL, axes="head,token,dim", head_count=4)
    first, last = replace(pool, head_start=0), replace(pool, head_start=4)
    with pytest.raises(ValueError, match="none of the same heads"):
        runs(first, last)


def test_pools_without_heads_pair_with_equal_sizes_and_across_sizes_only_as_mla() -> None:
    latent = replace(POOL, heads_total=0, head_count=0)
    prefill, decode = replace(PREFILL, pools=(latent,)), replace(DECODE, pools=(latent,))
    assert owed_part(prefill, decode) == Part(2, 2, 0, 0, True)
    wider = replace(prefill, layout=Layout(tp=2))
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(wider, decode)
    assert caught.value.metadata["mismatchedFields"] == "pools[0].heads_total"
    assert caught.value.metadata["pools[0].heads_total"].startswith("0 != above 0")
    mla = ModelIdentity(attention=Attention.MLA)
    assert owed_part(replace(wider, model=mla), replace(decode, model=mla)) == Part(2, 2, 0, 0, True)


def test_any_dp_may_serve_any_other_and_context_parallel_prefill_sends_from_cp_0() -> None:
    assert prefill_ranks(RankId("D", dp=1, tp=1), Layout(dp=2, tp=2), Layout(dp=4, tp=2), 3) == [(3, 0, 0, 1)]
    named = prefill_ranks(RankId("D", tp=1), Layout(tp=2), Layout(cp=4, tp=2), 0)
    assert named == [(0, 0, cp, 1) for cp in range(4)]
    with pytest.raises(ParallelLayoutMismatch):
        prefill_ranks(RankId("D"), Layout(cp=2), Layout(), 0)
    with pytest.raises(ParallelLayoutMismatch):
        prefill_ranks(RankId("D"), Layout(), Layout(dp=2), 2)


def test_sizes_of_which_each_rank_would_name_more_than_an_engine_has_are_refused_by_their_number() -> None:
    """A holder of pages, or a registry, says the sizes of another engine, and decode goes through its ranks."""
    for decode, prefill in ((Layout(), Layout(cp=MAX_ENGINE_RANKS + 1)), (Layout(), Layout(pp=2**9, tp=2**8))):
        with pytest.raises(InvalidRequest) as refused:
            prefill_ranks(RankId("D"), decode, prefill, 0)
        assert refused.value.metadata["field"] == "layout" and int(refused.value.metadata["value"]) > MAX_ENGINE_RANKS
        assert f"{MAX_ENGINE_RANKS} prefill ranks" in refused.value.metadata["rule"]
    assert len(prefill_ranks(RankId("D"), Layout(), Layout(cp=MAX_ENGINE_RANKS), 0)) == MAX_ENGINE_RANKS


FAR = 2**24


def test_layers_that_a_peer_names_far_apart_cost_no_time() -> None:
    """A Hello is compared on the loop of all sessions: a number for each layer in between held it for minutes."""
    stage = replace(DECODE, rank=RankId("D", pp=1), layout=Layout(pp=2), pools=(of_layers("kv", 3, FAR),))
    before = time.thread_time()
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(PREFILL, stage)
    assert time.thread_time() - before < 0.2
    assert caught.value.metadata["pools[0].layers"] == f"2 to 3 != 3, {FAR}"
    before = time.thread_time()
    with pytest.raises(ParallelLayoutMismatch):
        check_layers(DECODE.pools, [(2, FAR), (3, FAR)])  # as a registry says of prefill
    assert time.thread_time() - before < 0.2
