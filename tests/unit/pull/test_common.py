"""Pages in the order that engines of all kinds know: every head of every token comes to its place."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest

from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull.common import ORDER, CommonPages, PageAxes, is_common

Bytes = npt.NDArray[np.uint8]
LAYERS, TOKENS, HEADS, HEAD_BYTES = 3, 4, 5, 6
OF_ONE_BLOCK = tuple(axis for axis in ORDER if axis != "block")


def page_in(order: tuple[str, ...], blocks: int) -> Bytes:
    """Each byte says where it belongs."""
    sizes = (2, LAYERS, blocks, TOKENS, HEADS, HEAD_BYTES)
    belongs = np.arange(np.prod(sizes), dtype=np.uint16).astype(np.uint8).reshape(sizes)
    whole = order if "block" in order else ("block", *order)
    return np.ascontiguousarray(belongs.transpose(*(ORDER.index(axis) for axis in whole), 5)).reshape(-1)


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_page_of_any_order_is_copied_to_the_common_one_and_back(blocks: int) -> None:
    orders = [*permutations(ORDER), *(permutations(OF_ONE_BLOCK) if blocks == 1 else ())]
    for order in orders:
        check(PageAxes(order, LAYERS, TOKENS, HEADS, HEAD_BYTES, blocks))


def check(axes: PageAxes) -> None:
    order, blocks = axes.order, axes.blocks
    own, common, back = page_in(order, blocks), np.zeros(axes.nbytes, np.uint8), np.zeros(axes.nbytes, np.uint8)
    assert own.nbytes == axes.nbytes and axes.is_common == (order in (ORDER, OF_ONE_BLOCK))
    axes.to_common(own.ctypes.data, common.ctypes.data)
    assert (common == page_in(ORDER, blocks)).all(), order
    axes.from_common(common.ctypes.data, back.ctypes.data)
    assert (back == own).all(), order


def test_axes_that_are_not_those_of_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="head"):
        PageAxes(("kv", "layer", "token"), LAYERS, TOKENS, HEADS, HEAD_BYTES)
    with pytest.raises(ValueError, match="3 blocks"):
        PageAxes(OF_ONE_BLOCK, LAYERS, TOKENS, HEADS, HEAD_BYTES, blocks=3)


def test_what_a_page_is_does_not_depend_on_the_order_at_its_engine() -> None:
    own = PageIdentity(model="m", revision="r", dtype="bfloat16", layout="its own", page_size=4)
    found = {PageAxes(order, LAYERS, TOKENS, HEADS, HEAD_BYTES).identity(own) for order in permutations(ORDER)}
    found.add(PageAxes(ORDER, LAYERS, 1, HEADS, HEAD_BYTES, blocks=TOKENS).identity(own))
    (identity,) = found
    assert is_common(identity.layout) and not is_common(own.layout)
    assert (identity.model, identity.revision, identity.dtype, identity.page_size) == ("m", "r", "bfloat16", 4)
    assert PageAxes(ORDER, LAYERS + 1, TOKENS, HEADS, HEAD_BYTES).identity(own) != identity


@pytest.mark.parametrize("total", [1, 2, 4])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_engines_of_other_sizes_ask_each_rank_for_the_pages_that_it_says_to_have(
    total: int, ours: int, theirs: int
) -> None:
    def rank_of(tp_size: int, tp: int) -> tuple[CommonPages, PageIdentity]:
        axes = PageAxes(ORDER, LAYERS, TOKENS, max(1, total // tp_size), HEAD_BYTES)
        own = PageIdentity(
            model=f"of {tp_size}", dtype="float16", layout="its own", page_size=TOKENS, tp_rank=tp, tp_size=tp_size
        )
        return CommonPages(axes, model="m", heads_total=total), own

    for tp in range(ours):
        pages, own = rank_of(ours, tp)
        asked = pages.shares(own, theirs)
        has = [rank_of(theirs, share.tp) for share in asked]
        assert [share.identity for share in asked] == [
            their_pages.identity(their_own) for their_pages, their_own in has
        ]
        heads = pages.heads(own)
        come = {head for share in asked for part in share.parts for head in range(part.start, part.start + part.count)}
        assert come >= set(range(heads.start, heads.start + heads.count))


def test_an_engine_that_does_not_say_how_many_heads_there_are_asks_none_of_another_size() -> None:
    own = PageIdentity(model="m", dtype="float16", layout="its own", page_size=TOKENS)
    assert CommonPages(PageAxes(ORDER, LAYERS, TOKENS, HEADS, HEAD_BYTES)).shares(own, 2) == []
