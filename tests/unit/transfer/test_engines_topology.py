"""For any two layouts that fit: every byte of every (layer, head, page) arrives exactly once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvgrpc.errors import InvalidRequest, ParallelLayoutMismatch
from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, Region
from kvgrpc.transfer.layout.engines import MOST_LAYERS, MOST_PAGE_TOKENS, EngineShape, layers_of, topology
from kvgrpc.transfer.layout.heads import runs, shared_layers
from kvgrpc.transfer.layout.plan import geometry, joined
from kvgrpc.transfer.layout.topology import (
    Coordinates,
    Shape,
    decode_ranks_of,
    heads_of,
    owed_part,
    place_of,
    prefill_ranks,
)

SIZES = st.sampled_from([1, 2, 4, 8])
PAGES, TOKENS, DIM = 5, 3, 2
AXES = st.sampled_from(["token,head,dim", "head,token,dim"])
PAGES_SENT, PAGES_WANTED = np.array([3, 1, 2], np.uint32), np.array([0, 4, 2], np.uint32)


@st.composite
def engines(draw: st.DrawFn) -> tuple[EngineShape, EngineShape]:
    prefill_pp, decode_pp = draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (2, 1), (1, 2), (4, 2), (2, 4), (3, 1)]))
    cp = draw(st.sampled_from([1, 2]))
    prefill = Layout(dp=draw(SIZES), pp=prefill_pp, cp=cp, tp=draw(SIZES))
    decode = Layout(dp=draw(SIZES), pp=decode_pp, cp=draw(st.sampled_from([1, cp])), tp=draw(SIZES))
    heads, layers, axes = draw(st.sampled_from([0, 1, 2, 8, 16])), draw(st.integers(3, 7)), draw(AXES)
    if prefill_pp != decode_pp:  # of stages of equal shares the small ones lie within the large ones
        layers = max(prefill_pp, decode_pp) * draw(st.sampled_from([1, 2]))
    made = [EngineShape(layout, heads, layers, axes, TOKENS) for layout in (prefill, decode)]
    return made[0], made[1]


@given(engines())
@settings(max_examples=150, deadline=None)
def test_every_byte_arrives_exactly_once(both: tuple[EngineShape, EngineShape]) -> None:
    """Real memories, real plans: each decode rank is written to by all who owe it, then compared with what it wants."""
    prefill, decode = both
    memories = {at: Memory(prefill, at) for at in ranks(prefill.layout, dp=1)}
    for source in memories.values():
        source.fill()
    lines = topology(prefill, decode)
    for target in ranks(decode.layout, dp=1):
        memory = Memory(decode, target)
        written = np.zeros(memory.array.nbytes, np.uint8)
        for line in (line for line in lines if line.decode == target and not line.part.empty):
            source = memories[line.prefill]
            shape = geometry([source.pool], [memory.pool])
            plan = shape.plan(PAGES_SENT, PAGES_WANTED)
            assert len(plan.nbytes) <= 3 * line.descriptors
            for origin, destination, nbytes in zip(*plan.columns, strict=True):
                start = int(destination) - memory.address
                memory.bytes[start : start + int(nbytes)] = source.bytes[int(origin) - source.address :][: int(nbytes)]
                written[start : start + int(nbytes)] += 1
        expected = Memory(decode, target)
        expected.fill()
        pages_written = written.reshape(memory.layers, PAGES, -1)
        assert (pages_written[:, [0, 2, 4]] == 1).all() and not pages_written[:, [1, 3]].any()
        shown = memory.array.reshape(memory.layers, PAGES, -1)
        assert (shown[:, [0, 4, 2]] == expected.array.reshape(memory.layers, PAGES, -1)[:, [3, 1, 2]]).all()


@given(engines(), AXES, st.sampled_from([1, 2]))
@settings(max_examples=50, deadline=None)
def test_every_byte_of_every_pool_arrives_exactly_once(
    both: tuple[EngineShape, EngineShape], axes: str, times: int
) -> None:
    """A second pool with pages, axes and heads of its own, and a page set of its own: one write of both pools."""
    first = both
    assume(times == 1 or not 0 < both[0].heads < max(engine.layout.tp for engine in both))
    second = tuple(replace(engine, heads=engine.heads * times, axes=axes) for engine in both)
    sets = [(PAGES_SENT, PAGES_WANTED), (np.array([4, 0], np.uint32), np.array([1, 3], np.uint32))]
    memories = {at: [Memory(first[0], at), Memory(second[0], at)] for at in ranks(first[0].layout, dp=1)}
    for source in itertools.chain(*memories.values()):
        source.fill()
    lines = topology(*first)
    for target in ranks(first[1].layout, dp=1):
        pools = [Memory(first[1], target), Memory(second[1], target)]
        written = [np.zeros(memory.array.nbytes, np.uint8) for memory in pools]
        for line in (line for line in lines if line.decode == target and not line.part.empty):
            shapes = [
                geometry([one.pool], [other.pool]) for one, other in zip(memories[line.prefill], pools, strict=True)
            ]
            plan = joined([shape.plan(*pages) for shape, pages in zip(shapes, sets, strict=True)])
            for origin, destination, nbytes in zip(*plan.columns, strict=True):
                (source,) = (one for one in memories[line.prefill] if one.holds(int(origin)))
                ((number, memory),) = ((n, one) for n, one in enumerate(pools) if one.holds(int(destination)))
                start = int(destination) - memory.address
                memory.bytes[start : start + int(nbytes)] = source.bytes[int(origin) - source.address :][: int(nbytes)]
                written[number][start : start + int(nbytes)] += 1
        for engine, memory, times_written, (sent, wanted) in zip(
            (first[1], second[1]), pools, written, sets, strict=True
        ):
            expected = Memory(engine, target)
            expected.fill()
            times_of_page = times_written.reshape(memory.layers, PAGES, -1)
            assert (times_of_page[:, wanted] == 1).all()
            assert times_of_page.sum() == times_of_page[:, wanted].size
            shown = memory.array.reshape(memory.layers, PAGES, -1)
            assert (shown[:, wanted] == expected.array.reshape(memory.layers, PAGES, -1)[:, sent]).all()


@given(engines())
def test_every_prefill_rank_is_named_by_as_many_decode_ranks_as_it_expects(
    both: tuple[EngineShape, EngineShape],
) -> None:
    """Also one that owes nothing: its sender waits for them."""
    prefill, decode = both
    if prefill.layout.cp == decode.layout.cp > 1:
        decode = replace(decode, layout=replace(decode.layout, cp=prefill.layout.cp))
    lines = topology(prefill, decode)
    expected = decode_ranks_of(prefill.layout, decode.layout)
    for at in ranks(prefill.layout, dp=1):
        named_by = [line.decode for line in lines if line.prefill == at]
        assert len(named_by) == expected
        places = {place_of(decode.shape(by).rank, prefill.layout, decode.layout) for by in named_by}
        assert places == set(range(expected))


@given(engines())
def test_exactly_one_rank_sends_aux_to_each_decode_rank(both: tuple[EngineShape, EngineShape]) -> None:
    prefill, decode = both
    lines = topology(prefill, decode)
    for target in ranks(decode.layout, dp=1):
        mine = [line for line in lines if line.decode == target]
        assert sum(line.part.aux for line in mine) == 1
        (sends,) = (line.prefill for line in mine if line.part.aux)
        assert sends == prefill_ranks(decode.shape(target).rank, decode.layout, prefill.layout, 0)[0]


def test_equal_layouts_are_pairs_of_equal_ranks() -> None:
    layout = Layout(dp=2, pp=2, tp=4)
    lines = topology(EngineShape(layout, 8, 4), EngineShape(layout, 8, 4))
    assert [(line.prefill, line.decode) for line in lines] == [(at, at) for at in ranks(layout, dp=1)]
    assert {line.descriptors for line in lines} == {2}


def test_head_slices_cost_a_descriptor_for_each_token_where_tokens_come_first() -> None:
    for axes, expected in (("head,token,dim", 4), ("token,head,dim", 4 * 16)):
        lines = topology(EngineShape(Layout(tp=4), 8, 4, axes), EngineShape(Layout(tp=2), 8, 4, axes))
        assert {line.descriptors for line in lines} == {expected}


def test_of_copies_the_first_one_sends_and_the_others_owe_nothing() -> None:
    grouped = topology(EngineShape(Layout(tp=4), 2), EngineShape(Layout(tp=1), 2))
    assert [line.part.head_count for line in grouped] == [1, 0, 1, 0]
    assert [line.descriptors > 0 for line in grouped] == [True, False, True, False]
    latent = topology(EngineShape(Layout(tp=4)), EngineShape(Layout(tp=2)))
    assert [(line.decode[3], line.part.empty) for line in latent] == [(0, False), (0, True), (1, False), (1, True)]


def test_layouts_of_which_neither_divides_the_other_are_refused_with_the_field() -> None:
    for one, other, field in (
        (Layout(tp=3), Layout(tp=2), "layout.tp"),
        (Layout(pp=2), Layout(pp=3), "layout.pp"),
        (Layout(cp=1), Layout(cp=2), "layout.cp"),
        (Layout(cp=4), Layout(cp=2), "layout.cp"),
    ):
        with pytest.raises(ParallelLayoutMismatch) as refused:
            topology(EngineShape(one, 6, 3), EngineShape(other, 6, 3))
        assert refused.value.metadata["mismatchedFields"] == field
    with pytest.raises(ParallelLayoutMismatch) as refused:  # stages of 3 and 3 layers, and of 2, 2, 1 and 1
        topology(EngineShape(Layout(pp=2), 6, 6), EngineShape(Layout(pp=4), 6, 6))
    assert refused.value.metadata["mismatchedFields"] == "pools[0].layers"
    with pytest.raises(InvalidRequest):
        topology(EngineShape(Layout(pp=2)), EngineShape(Layout()))
    with pytest.raises(InvalidRequest):
        topology(EngineShape(Layout(tp=1)), EngineShape(Layout(tp=1 << 20)))


@pytest.mark.parametrize(
    ("prefill", "decode", "lines"),
    [
        (Layout(tp=4), Layout(tp=2), 4),
        (Layout(tp=2), Layout(tp=4), 4),
        (Layout(pp=4, tp=2), Layout(pp=2, tp=2), 8),
        (Layout(dp=5, pp=2, cp=2, tp=4), Layout(dp=3, tp=2), 16),
    ],
)
def test_a_topology_has_a_bound_that_is_told_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, prefill: Layout, decode: Layout, lines: int
) -> None:
    both = EngineShape(prefill, 8, 4), EngineShape(decode, 8, 4)
    monkeypatch.setattr("kvgrpc.transfer.layout.engines.MOST_LINES", lines)
    work = lines * max(-(-4 // layout.pp) + 16 + 8 // layout.tp for layout in (prefill, decode))
    monkeypatch.setattr("kvgrpc.transfer.layout.engines.MOST_WORK", work)
    assert len(topology(*both)) == lines
    monkeypatch.setattr("kvgrpc.transfer.layout.engines.MOST_WORK", work - 1)
    with pytest.raises(InvalidRequest) as refused:
        topology(*both)
    assert (refused.value.metadata["field"], refused.value.metadata["value"]) == ("layout", str(work))
    monkeypatch.setattr("kvgrpc.transfer.layout.engines.MOST_LINES", lines - 1)
    with pytest.raises(InvalidRequest) as refused:
        topology(*both)
    assert (refused.value.metadata["field"], refused.value.metadata["value"]) == ("layout", str(lines))


def test_a_stage_has_one_layer_at_least() -> None:
    assert len(topology(EngineShape(Layout(pp=4), 8, 4), EngineShape(Layout(pp=2), 8, 4))) == 4
    for prefill, decode in ((4, 2), (2, 4)):
        with pytest.raises(InvalidRequest) as refused:
            topology(EngineShape(Layout(pp=prefill), 8, 3), EngineShape(Layout(pp=decode), 8, 3))
        assert refused.value.metadata["field"] == "layers"


def test_models_that_differ_are_refused_with_the_field() -> None:
    prefill, decode = EngineShape(Layout(), 8).shape((0, 0, 0, 0)), EngineShape(Layout(), 8).shape((0, 0, 0, 0))
    llama = ModelIdentity("llama", "main", "bfloat16", Attention.MHA)
    for field, other in (
        ("model.name", replace(llama, name="qwen")),
        ("model.revision", replace(llama, revision="v2")),
        ("model.cache_dtype", replace(llama, cache_dtype="fp8_e4m3")),
        ("model.attention", replace(llama, attention=Attention.MLA)),
    ):
        with pytest.raises(ParallelLayoutMismatch) as refused:
            owed_part(replace(prefill, model=llama), replace(decode, model=other))
        assert refused.value.metadata["mismatchedFields"] == field
    owed_part(replace(prefill, model=llama), replace(decode, model=ModelIdentity(name="llama")))


def test_a_pool_of_which_a_copy_of_another_pool_would_send_heads_is_refused() -> None:
    """Of two ranks with one head of the first pool the second owes nothing: its heads of another pool would be lost."""
    layouts = Layout(tp=2), Layout(tp=1)
    assert EngineShape(Layout()).shape((0, 0, 0, 0)).pools[0].heads_total == 0, "without heads it is MLA"
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(*(with_second_pool(layout, 1, 2, rank) for layout, rank in zip(layouts, (1, 0), strict=True)))
    assert refused.value.metadata["mismatchedFields"] == "pools[1].heads_total"
    assert "pools[0] with its 1 heads" in refused.value.metadata["pools[1].heads_total"]
    part = owed_part(*(with_second_pool(layout, 2, 4, rank) for layout, rank in zip(layouts, (1, 0), strict=True)))
    assert (part.head_start, part.head_count) == (1, 1)


def with_second_pool(layout: Layout, heads: int, more_heads: int, tp: int) -> Shape:
    first, second = (
        EngineShape(layout, heads).shape((0, 0, 0, tp)),
        EngineShape(layout, more_heads).shape((0, 0, 0, tp)),
    )
    return replace(first, pools=(*first.pools, replace(second.pools[0], name="state")))


def test_heads_are_shares_or_copies_and_none_where_they_do_not_apply() -> None:
    assert [heads_of(8, 4, tp) for tp in range(4)] == [(0, 2, 8), (2, 4, 8), (4, 6, 8), (6, 8, 8)]
    assert [heads_of(2, 4, tp) for tp in range(4)] == [(0, 1, 2), (0, 1, 2), (1, 2, 2), (1, 2, 2)]
    assert [heads_of(0, 4, tp) for tp in range(4)] == [(0, 0, 0)] * 4


def test_stages_share_layers_and_the_first_have_what_is_left_over() -> None:
    assert [layers_of(7, 3, pp) for pp in range(3)] == [(0, 3), (3, 2), (5, 2)]


def ranks(layout: Layout, dp: int) -> list[Coordinates]:
    return list(itertools.product(range(dp), range(layout.pp), range(layout.cp), range(layout.tp)))


class Memory:
    """The pool of one rank in real memory: one region a layer, DIM bytes a token and head (or token)."""

    def __init__(self, engine: EngineShape, at: Coordinates) -> None:
        shape = engine.shape(at)
        (pool,) = shape.pools
        self.layers = len(pool.regions)
        heads = max(pool.head_count, 1)
        self.order = (TOKENS, heads) if engine.axes.startswith("token") or not engine.heads else (heads, TOKENS)
        self.head_first = self.order == (heads, TOKENS) and bool(engine.heads) and not engine.axes.startswith("token")
        self.array = np.zeros((self.layers, PAGES, *self.order, DIM), np.uint8)
        self.bytes = self.array.reshape(-1)
        self.address = self.array.__array_interface__["data"][0]
        page_bytes = TOKENS * heads * DIM
        regions = tuple(
            Region(region.layer, "kv", self.address + number * PAGES * page_bytes, page_bytes, page_bytes)
            for number, region in enumerate(pool.regions)
        )
        self.pool: Pool = replace(pool, regions=regions, pages=PAGES)

    def holds(self, address: int) -> bool:
        return bool(self.address <= address < self.address + self.array.nbytes)

    def fill(self) -> None:
        """Every byte tells its layer, page, token, head and place."""
        for number, region in enumerate(self.pool.regions):
            for page, token, head, place in itertools.product(
                range(PAGES), range(TOKENS), range(max(self.pool.head_count, 1)), range(DIM)
            ):
                value = (region.layer * 31 + page * 7 + token * 5 + (self.pool.head_start + head) * 11 + place) % 251
                where = (head, token) if self.head_first else (token, head)
                at = (number, page, *where, place)
                self.array[at] = value


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        (EngineShape(Layout(), layers=MOST_LAYERS + 1), "layers"),
        (EngineShape(Layout(), page_tokens=MOST_PAGE_TOKENS + 1), "page_tokens"),
    ],
)
def test_layers_and_tokens_that_nobody_has_are_refused(engine: EngineShape, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        topology(engine, engine)
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize(("one", "other"), [("token,head,dim", "token,head,dim"), ("head,token,dim", "head,token,dim")])
def test_descriptors_are_those_of_all_layers(one: str, other: str) -> None:
    """Of made-up pools all layers are alike: one is looked at, and stands for the others."""
    prefill, decode = EngineShape(Layout(tp=2), 8, 6, one, 4), EngineShape(Layout(tp=4, pp=2), 8, 6, other, 4)
    for line in topology(prefill, decode):
        source, target = prefill.shape(line.prefill), decode.shape(line.decode)
        assert line.descriptors == len(runs(*shared_layers(source.pools[0], target.pools[0]))[0])
