"""Pages in the order that engines of all kinds know: every head of every token comes to its place."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest

from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull.common import ORDER, PageAxes, is_common

Bytes = npt.NDArray[np.uint8]
SIZES = {"kv": 2, "layer": 3, "token": 4, "head": 5}
HEAD_BYTES = 6


def page_in(order: tuple[str, ...]) -> Bytes:
    """Each byte says where it belongs."""
    belongs = np.arange(2 * 3 * 4 * 5 * HEAD_BYTES, dtype=np.uint16).astype(np.uint8).reshape(*SIZES.values(), -1)
    return np.ascontiguousarray(belongs.transpose(*(ORDER.index(axis) for axis in order), 4)).reshape(-1)


@pytest.mark.parametrize("order", list(permutations(ORDER)), ids="-".join)
def test_a_page_of_any_order_is_copied_to_the_common_one_and_back(order: tuple[str, ...]) -> None:
    axes = PageAxes(order, 3, 4, 5, HEAD_BYTES)
    own, common, back = page_in(order), np.zeros(axes.nbytes, np.uint8), np.zeros(axes.nbytes, np.uint8)
    assert own.nbytes == axes.nbytes and axes.is_common == (order == ORDER)
    axes.to_common(own.ctypes.data, common.ctypes.data)
    assert (common == page_in(ORDER)).all()
    axes.from_common(common.ctypes.data, back.ctypes.data)
    assert (back == own).all()


def test_axes_that_are_not_those_of_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="head"):
        PageAxes(("kv", "layer", "token"), 3, 4, 5, HEAD_BYTES)


def test_what_a_page_is_does_not_depend_on_the_order_at_its_engine() -> None:
    own = PageIdentity(model="m", revision="r", dtype="bfloat16", layout="its own", page_size=4)
    found = {PageAxes(order, 3, 4, 5, HEAD_BYTES).identity(own) for order in permutations(ORDER)}
    (identity,) = found
    assert is_common(identity.layout) and not is_common(own.layout)
    assert (identity.model, identity.revision, identity.dtype, identity.page_size) == ("m", "r", "bfloat16", 4)
    assert PageAxes(ORDER, 4, 4, 5, HEAD_BYTES).identity(own) != identity
