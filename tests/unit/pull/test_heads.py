"""Pages of engines with other tensor-parallel sizes: every head comes to its place, from the fewest ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.pull.heads import HeadRows, PageHeads, divides, moves, place, ranks_with

Bytes = npt.NDArray[np.uint8]
SECTIONS = (HeadRows(3, 4), HeadRows(2, 8))


def model_page(total: int, sections: Sequence[HeadRows], seed: int) -> list[Bytes]:
    """A page of the whole model: of each section the bytes of all heads, row by row."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (each.rows, total, each.head_bytes), dtype=np.uint8) for each in sections]


def page_of(part: PageHeads, model: list[Bytes]) -> Bytes:
    """What a rank with these heads has."""
    heads = slice(part.start, part.start + part.count)
    return np.concatenate([np.ascontiguousarray(section[:, heads]).reshape(-1) for section in model])


def address(page: Bytes) -> int:
    return int(page.ctypes.data)


def whole(total: int, tp_size: int, tp: int, sections: Sequence[HeadRows] = SECTIONS) -> PageHeads:
    return PageHeads(total, 0, total, tuple(sections)).of_rank(tp_size, tp)


rows = st.builds(HeadRows, st.integers(1, 5), st.integers(1, 9))
sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@given(total=sizes, ours=sizes, theirs=sizes, sections=st.lists(rows, min_size=1, max_size=3), data=st.data())
def test_every_head_of_a_page_comes_to_its_place(
    total: int, ours: int, theirs: int, sections: list[HeadRows], data: Any
) -> None:
    own = whole(total, ours if divides(total, ours) else 1, 0, sections)
    if divides(total, ours):
        own = whole(total, ours, data.draw(st.integers(0, ours - 1)), sections)
    ranks = ranks_with(own, theirs)
    assert bool(ranks) == divides(total, theirs)
    if not ranks:
        return
    model = model_page(total, sections, 7)
    shares = [own.of_rank(theirs, tp) for tp in ranks]
    sources = [page_of(share, model) for share in shares]
    page = np.zeros(own.nbytes, np.uint8)
    place(moves([own], [[share] for share in shares]), [address(each) for each in sources], address(page))
    assert (page == page_of(own, model)).all()
    assert len(ranks) == max(1, own.count * min(theirs, total) // total)


@given(total=st.sampled_from([2, 4, 8]), ours=st.sampled_from([1, 2, 4]), theirs=st.sampled_from([1, 2, 4]))
def test_pages_that_hold_the_parts_of_several_workers(total: int, ours: int, theirs: int) -> None:
    """As chunks of vLLM: worker after worker, at either side."""
    own, other = ([whole(total, size, tp) for tp in range(size)] for size in (ours, theirs))
    model = model_page(total, SECTIONS, 3)
    source = np.concatenate([page_of(part, model) for part in other])
    page = np.zeros(source.nbytes, np.uint8)
    if total % ours == 0 and total % theirs == 0:
        place(moves(own, [other]), [address(source)], address(page))
        assert (page == np.concatenate([page_of(part, model) for part in own])).all()


def test_a_page_of_which_a_head_is_missing_is_not_made() -> None:
    with pytest.raises(ValueError, match="nobody has head 2 of 4"):
        moves([whole(4, 1, 0)], [[whole(4, 2, 0)]])


def test_pages_that_are_divided_otherwise_are_not_made() -> None:
    with pytest.raises(ValueError, match="not divided alike"):
        moves([whole(4, 1, 0)], [[whole(4, 2, 0, SECTIONS[:1])], [whole(4, 2, 1, SECTIONS[:1])]])


def test_ranks_with_copies_are_asked_once() -> None:
    """Two heads on four ranks: each head lies at two of them."""
    assert ranks_with(whole(2, 1, 0), 4) == [0, 2]
    assert ranks_with(whole(2, 2, 1), 4) == [2]
