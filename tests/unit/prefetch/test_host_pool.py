"""Where the bytes of a page lie: no two pages share one, and every layout gives back what was put in."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.errors import InvalidRequest, PageStateInvalid
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import DTYPE_BYTES, Component, HostLayout, PageShape

SHAPES = {
    "mha": PageShape.mha(3, 4, 2, 8, "float32"),
    "mla": PageShape.mla(3, 4, 20, "bfloat16"),
    "mla with indexer": PageShape.mla(3, 4, 20, "float8_e4m3fn", indexer_bytes=5),
    "state that is not of tokens": PageShape(2, 4, (Component("k", 64), Component("state", 7))),
}


@pytest.fixture(params=[(shape, layout) for shape in SHAPES for layout in HostLayout], ids=str)
def pool(request: pytest.FixtureRequest) -> HostPool:
    shape, layout = request.param
    return HostPool(SHAPES[shape], 5, layout)


def test_pages_share_no_byte_and_lie_in_the_pool(pool: HostPool) -> None:
    seen = np.zeros(pool.nbytes, dtype=np.int32)
    for page in range(pool.pages):
        buffers = pool.page_buffers(page)
        assert sum(nbytes for _, nbytes in buffers) == pool.shape.page_bytes
        for address, nbytes in buffers:
            start = address - pool.address
            assert start >= 0 and start + nbytes <= pool.nbytes
            seen[start : start + nbytes] += 1
    assert seen.max() == 1 and seen.sum() == pool.pages * pool.shape.page_bytes


def test_a_flat_page_comes_back_as_it_was_and_touches_no_other(pool: HostPool) -> None:
    pages = pool.table.take(pool.pages)
    assert not isinstance(pages, NotEnoughPages)
    rng = np.random.default_rng(1)
    data = {int(page): rng.integers(0, 256, pool.shape.page_bytes, dtype=np.uint8) for page in pages}
    for page, each in data.items():
        pool.set_flat(page, each)
    for page, each in data.items():
        assert (pool.flat(page) == each).all()


def test_page_first_pages_are_one_piece_for_each_component() -> None:
    for layout in (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT):
        assert len(HostPool(SHAPES["mha"], 4, layout).page_buffers(2)) == 2
    assert len(HostPool(SHAPES["mha"], 4, HostLayout.LAYER_FIRST).page_buffers(2)) == 2 * 3


def test_only_a_reserved_page_is_written() -> None:
    pool = HostPool(SHAPES["mha"], 2)
    with pytest.raises(PageStateInvalid):
        pool.set_flat(0, np.zeros(pool.shape.page_bytes, dtype=np.uint8))


def test_a_page_of_another_size_is_refused() -> None:
    pool = HostPool(SHAPES["mha"], 2)
    with pytest.raises(InvalidRequest):
        pool.set_flat(0, np.zeros(3, dtype=np.uint8))


def test_a_pool_is_not_unmapped_while_a_page_may_still_be_written() -> None:
    pool = HostPool(SHAPES["mha"], 2)
    pages = pool.table.take(1)
    assert not isinstance(pages, NotEnoughPages)
    assert not pool.close()
    pool.table.release(pages)
    assert pool.close() and pool.close()


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_page_sizes_by_dtype(dtype: str) -> None:
    assert PageShape.mha(3, 4, 2, 8, dtype).page_bytes == 3 * 2 * 4 * 2 * 8 * DTYPE_BYTES[dtype]
    assert PageShape.mla(3, 4, 20, dtype, indexer_bytes=5).page_bytes == 3 * 4 * (20 * DTYPE_BYTES[dtype] + 5)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("shape.layers", lambda: PageShape.mha(0, 4, 2, 8)),
        ("shape.heads", lambda: PageShape.mha(1, 4, 0, 8)),
        ("shape.page_tokens", lambda: PageShape(1, 0, (Component("k", 4),))),
        ("shape.components", lambda: PageShape(1, 4, ())),
        ("shape.components", lambda: PageShape(1, 4, (Component("k", 4), Component("k", 4)))),
        ("dtype", lambda: PageShape.mha(1, 4, 2, 8, "int3")),
        ("host_pages", lambda: HostPool(SHAPES["mha"], 0)),
    ],
)
def test_what_no_page_can_be_is_named(field: str, make: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()  # type: ignore[operator]
    assert refused.value.metadata["field"] == field
