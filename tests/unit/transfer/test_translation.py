"""Between pools of other axes every key and value of every head and token arrives, and nothing else is touched."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.errors import ParallelLayoutMismatch
from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, RankId
from kvgrpc.transfer.layout.plan import Plan, geometry
from kvgrpc.transfer.layout.topology import Shape, owed_part
from kvgrpc.transfer.layout.translation import translated, translates
from tests.unit.transfer.axes import tokens_of

LAYERS, PAGES, TOKENS, HEADS, DIM = 2, 4, 3, 4, 2
APART = [",".join((*order, "dim")) for order in itertools.permutations(("token", "head"))]
TOGETHER = [",".join((*order, "dim")) for order in itertools.permutations(("kv", "token", "head"))]


class Memory:
    """A pool in numpy; ``values[layer, part, page, token, head, dim]`` is what it holds, whatever its order."""

    def __init__(self, axes: str, tp_size: int = 1, tp: int = 0) -> None:
        self.axes = axes.split(",")
        self.heads = range(tp * HEADS // tp_size, (tp + 1) * HEADS // tp_size)
        sizes = {"kv": 2, "token": TOKENS, "head": len(self.heads), "dim": DIM}
        shape = [sizes[axis] for axis in self.axes]
        names = ["kv"] if "kv" in self.axes else ["k", "v"]
        self.arrays = {(layer, name): np.zeros((PAGES, *shape), np.int32) for layer in range(LAYERS) for name in names}
        self.pool = Pool.from_arrays(
            self.arrays, page_tokens=TOKENS, axes=axes, heads_total=HEADS, head_start=self.heads[0],
            head_count=len(self.heads),
        )  # fmt: skip
        self.shape = Shape(
            RankId("engine", tp=tp),
            Layout(tp=tp_size),
            (self.pool,),
            (),
            "shm",
            ModelIdentity(attention=Attention.MHA),
        )  # fmt: skip

    def view(self, layer: int, part: int) -> npt.NDArray[np.int32]:
        """(page, token, head, dim), of this very memory."""
        return tokens_of(self.arrays, self.axes, layer, part)


def copy(pieces: Plan) -> None:
    for source, destination, nbytes in zip(*pieces.columns, strict=True):
        ctypes.memmove(int(destination), int(source), int(nbytes))


@given(st.sampled_from(APART + TOGETHER), st.sampled_from(APART + TOGETHER), st.sampled_from([(1, 1), (2, 1), (1, 2)]))
@settings(max_examples=120, deadline=None)
def test_every_key_and_value_arrives(one: str, other: str, sizes: tuple[int, int]) -> None:
    sources = [Memory(one, sizes[0], tp) for tp in range(sizes[0])]
    for memory in sources:
        for layer, part in itertools.product(range(LAYERS), range(2)):
            view = memory.view(layer, part)
            for page, token, head, dim in np.ndindex(view.shape):
                view[page, token, head, dim] = value(layer, part, page, token, memory.heads[head], dim)
    for tp in range(sizes[1]):
        target = Memory(other, sizes[1], tp)
        assert translates(sources[0].pool, target.pool)
        for memory in sources:
            if set(memory.heads) & set(target.heads):
                owed_part(memory.shape, target.shape)
                pages = geometry([memory.pool], [target.pool])
                copy(pages.plan(np.array([0, 3], np.uint32), np.array([1, 2], np.uint32)))
        for layer, part in itertools.product(range(LAYERS), range(2)):
            view = target.view(layer, part)
            for page, token, head, dim in np.ndindex(view.shape):
                expected = {1: 0, 2: 3}.get(page)
                found = view[page, token, head, dim]
                if expected is None:
                    assert found == 0
                else:
                    assert found == value(layer, part, expected, token, target.heads[head], dim)


def value(*index: int) -> int:
    return 1 + int(np.ravel_multi_index(index, (LAYERS, 2, PAGES, TOKENS, HEADS, DIM)))


def test_what_lies_together_on_both_sides_is_one_piece() -> None:
    keys_apart, together = Memory("head,token,dim"), Memory("head,kv,token,dim")
    sources, destinations, *_ = translated(keys_apart.pool, together.pool)
    assert len(sources) == len(destinations) == LAYERS * 2 * HEADS
    assert {region.page_bytes for region in sources} == {TOKENS * DIM * 4}
    assert len(translated(Memory("token,head,dim").pool, together.pool)[0]) == LAYERS * 2 * HEADS * TOKENS


@pytest.mark.parametrize("axes", ["", "token,dim", "head,dim,token", "head,token,x,dim", "head,head,token,dim"])
def test_axes_that_do_not_say_where_everything_is_are_refused_with_the_field(axes: str) -> None:
    source, target = Memory("token,head,dim"), Memory("head,kv,token,dim")
    other = replace(target.shape, pools=(replace(target.pool, axes=axes),))
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(source.shape, other)
    assert "pools[0].axes" in str(refused.value.metadata["mismatchedFields"])


@pytest.mark.parametrize("wrong", [{"component": "state"}, {"page_bytes": 7}, {"page_bytes": 0}])
def test_a_region_that_is_no_whole_number_of_keys_and_values_translates_to_nothing(wrong: dict[str, Any]) -> None:
    source, target = Memory("token,head,dim").pool, Memory("head,kv,token,dim").pool
    assert translates(source, target)
    first, *rest = target.regions
    assert not translates(source, replace(target, regions=(first._replace(**wrong), *rest)))


def test_pages_with_bytes_that_no_head_accounts_for_translate_to_nothing_though_both_sides_have_them() -> None:
    longer = [
        replace(pool, regions=tuple(each._replace(page_bytes=each.page_bytes + 1) for each in pool.regions))
        for pool in (Memory("token,head,dim").pool, Memory("head,token,dim").pool)
    ]
    assert not translates(*longer)


def test_another_number_of_layers_or_tokens_is_refused() -> None:
    source, target = Memory("token,head,dim"), Memory("head,kv,token,dim")
    fewer = replace(target.pool, regions=target.pool.regions[:1])
    longer = replace(target.pool, page_tokens=2 * TOKENS)
    for pool in (fewer, longer):
        with pytest.raises(ParallelLayoutMismatch):
            owed_part(source.shape, replace(target.shape, pools=(pool,)))


def test_a_decode_without_aux_takes_the_pages_of_a_prefill_that_has_it() -> None:
    source, target = Memory("token,head,dim"), Memory("head,kv,token,dim")
    assert not owed_part(replace(source.shape, aux_item_bytes=(8, 64)), target.shape).aux
    with pytest.raises(ParallelLayoutMismatch):
        owed_part(source.shape, replace(target.shape, aux_item_bytes=(8, 64)))
