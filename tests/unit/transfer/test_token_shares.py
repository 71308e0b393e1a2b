"""Decode context parallelism at decode alone: each rank gets every Nth token of prefill's pages, and nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import ParallelLayoutMismatch
from kvgrpc.model import UNKNOWN_MODEL, Attention, Layout, ModelIdentity, Pool, PoolKind, RankId, Region
from kvgrpc.transfer.layout.plan import geometry
from kvgrpc.transfer.layout.token_shares import axes_of_shares
from kvgrpc.transfer.layout.topology import Shape, owed_part, parts_of_pages
from kvgrpc.transfer.protocol.destination import Destination

LAYERS, PAGES, DIM, UNTOUCHED = 2, 12, 3, -1
Memory = npt.NDArray[np.int32]


def memory(tokens: int) -> Memory:
    """[layer, page, token, dim]"""
    return np.full((LAYERS, PAGES, tokens, DIM), UNTOUCHED, np.int32)


def pool(latents: Memory, axes: str, page_tokens: int, share: int = 0, component: str = "latent") -> Pool:
    nbytes = latents[0, 0].nbytes
    regions = tuple(Region(layer, component, latents[layer].ctypes.data, nbytes, nbytes) for layer in range(LAYERS))
    return Pool("kv", PoolKind.KV, page_tokens, PAGES, "bfloat16", regions, axes, 0, share, int("over" in axes))


def shape(pool: Pool, tp_size: int = 1, tp: int = 0) -> Shape:
    return Shape(
        RankId("engine", tp=tp), Layout(tp=tp_size), (pool,), (), "shm", ModelIdentity(attention=Attention.MLA)
    )


@given(
    st.sampled_from([("", "latent"), ("token,dim", "latent"), ("head,token,dim", "kv")]),
    st.sampled_from([2, 3, 4]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, PAGES - 1),
)
def test_each_rank_gets_its_tokens_and_no_byte_beside_them(
    form: tuple[str, str], size: int, rows: int, pages_of_ours: int, length: int
) -> None:
    """Of a prompt of ``length`` of prefill's pages, ``pages_of_ours`` of which are one of decode's."""
    rng = np.random.default_rng(rows * 100 + length)
    ours = memory(rows * size)
    sent, taken = rng.permutation(PAGES)[:length], rng.permutation(PAGES)[: -(-length // pages_of_ours)]
    prompt = rng.integers(1, 1 << 30, (LAYERS, length * rows * size, DIM), np.int32)
    ours[:, sent] = prompt.reshape(LAYERS, length, rows * size, DIM)
    source = pool(ours, form[0], rows * size, component=form[1])
    for rank in range(size):
        theirs = memory(rows * pages_of_ours)
        target = pool(theirs, axes_of_shares(size), rows * pages_of_ours * size, rank, form[1])
        owed_part(shape(source), shape(target))
        assert parts_of_pages([source], [target]) == pages_of_ours
        to = Destination(taken.astype(np.uint32), 0).divided(pages_of_ours).pages[:length]
        plan = geometry([source], [target]).plan(sent.astype(np.uint32), to)
        for one, other, nbytes in zip(*plan.columns, strict=True):
            ctypes.memmove(int(other), int(one), int(nbytes))
        expected = memory(rows * pages_of_ours).reshape(LAYERS, PAGES, -1, DIM)
        mine = prompt[:, rank::size]
        for at in range(mine.shape[1]):
            page, row = divmod(at, rows * pages_of_ours)
            expected[:, taken[page], row] = mine[:, at]
        assert np.array_equal(theirs, expected)


WHOLE = pool(memory(8), "", 8)
SHARE = pool(memory(8), axes_of_shares(2), 16, 1)


@pytest.mark.parametrize("tp_sizes", [(2, 2), (4, 2)], ids=["equal tp", "other tp"])
@pytest.mark.parametrize(
    ("source", "target", "field"),
    [
        (replace(SHARE, head_start=0), SHARE, "head_start"),
        (SHARE, WHOLE, "axes"),
        (replace(WHOLE, axes="a quantized form"), SHARE, "axes"),
        (WHOLE, replace(SHARE, head_start=2), "axes"),
        (WHOLE, pool(memory(8), axes_of_shares(3), 24, 1), "axes"),
        (WHOLE, pool(memory(7), axes_of_shares(2), 14, 1), "page_tokens"),
        (WHOLE, pool(memory(16), axes_of_shares(2), 16, 1), "page_bytes"),
    ],
)
def test_what_does_not_fit_fails_by_name(source: Pool, target: Pool, field: str, tp_sizes: tuple[int, int]) -> None:
    ours, theirs = tp_sizes
    with pytest.raises(ParallelLayoutMismatch, match=field):
        owed_part(shape(source, ours, ours // 2), shape(target, theirs, 1))


@pytest.mark.parametrize("components", [("v", "k"), ("k", "v"), ("latent", "kv")])
def test_of_what_is_in_several_regions_a_layer_no_shares_are_taken(components: tuple[str, str]) -> None:
    """Their words tell them apart, keys and values, and shares are planned without: one side's order is the other's."""

    def in_two(pool: Pool, words: tuple[str, ...]) -> Pool:
        regions = [region._replace(layer=0, component=word) for region, word in zip(pool.regions, words, strict=True)]
        return replace(pool, regions=regions)

    source = in_two(replace(WHOLE, axes="token,head,dim"), components)
    with pytest.raises(ParallelLayoutMismatch, match="axes"):
        owed_part(shape(source), shape(in_two(SHARE, components[::-1])))


def test_shares_are_of_latents_alone() -> None:
    """A pool of other heads than the model says names none, and its pages may have all tokens of one, then the next."""
    whole = replace(shape(replace(WHOLE, axes="head,token,dim")), model=UNKNOWN_MODEL)
    assert not owed_part(whole, shape(SHARE)).empty
    with pytest.raises(ParallelLayoutMismatch) as caught:
        owed_part(whole, replace(shape(SHARE), model=UNKNOWN_MODEL))
    assert caught.value.metadata["mismatchedFields"] == "pools[0].axes"


def test_equal_shares_fit() -> None:
    assert not owed_part(shape(SHARE), shape(SHARE)).empty
    assert parts_of_pages([SHARE], [SHARE]) == 1


def test_the_first_of_prefills_copies_sends_to_each_rank_what_it_keeps() -> None:
    for tp in range(2):
        target = shape(replace(SHARE, head_start=tp), 2, tp)
        owed = [owed_part(shape(WHOLE, 4, 2 * tp + copy), target) for copy in range(2)]
        assert [part.empty for part in owed] == [False, True]
