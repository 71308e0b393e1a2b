"""The plan writes exactly the bytes that a naive loop writes, in as few descriptors as runs allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.errors import KvIndexOutOfRange
from kvgrpc.model import Region
from kvgrpc.transfer.layout.plan import Geometry, Plan, check_pages, joined

PAGES = 64


def regions(base: int, count: int, page_bytes: int, stride: int) -> list[Region]:
    return [Region(layer, "k", base + layer * PAGES * stride, stride, page_bytes) for layer in range(count)]


def naive_bytes(source: list[Region], destination: list[Region], pairs: list[tuple[int, int]]) -> dict[int, int]:
    """Destination byte -> source byte, page by page and byte by byte."""
    moved = {}
    for ours, theirs in zip(source, destination, strict=True):
        for page, other in pairs:
            for byte in range(ours.page_bytes):
                moved[theirs.address + other * theirs.page_stride_bytes + byte] = (
                    ours.address + page * ours.page_stride_bytes + byte
                )
    return moved


def planned_bytes(plan: Plan) -> dict[int, int]:
    moved = {}
    for source, destination, nbytes in zip(*(column.tolist() for column in plan.columns), strict=True):
        for byte in range(nbytes):
            assert destination + byte not in moved, "a byte is written twice"
            moved[destination + byte] = source + byte
    return moved


page_lists = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, PAGES - 1), min_size=count, max_size=count, unique=True),
        st.lists(st.integers(0, PAGES - 1), min_size=count, max_size=count, unique=True),
    )
)


@given(page_lists, st.integers(1, 3), st.integers(1, 8), st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_plan_moves_what_a_naive_loop_moves(
    pages: tuple[list[int], list[int]], layers: int, page_bytes: int, gap: int, other_gap: int, ascending: bool
) -> None:
    source_pages, destination_pages = (sorted(side) for side in pages) if ascending else pages
    source = regions(1 << 20, layers, page_bytes, page_bytes + gap)
    destination = regions(1 << 30, layers, page_bytes, page_bytes + other_gap)
    plan = Geometry(source, destination).plan(
        np.array(source_pages, dtype=np.uint32), np.array(destination_pages, dtype=np.uint32)
    )
    assert planned_bytes(plan) == naive_bytes(
        source, destination, list(zip(source_pages, destination_pages, strict=True))
    )


def test_contiguous_on_both_sides_is_one_descriptor_a_region() -> None:
    geometry = Geometry(regions(4096, 3, 8, 8), regions(1 << 30, 3, 8, 8))
    plan = geometry.plan(np.arange(10, 20, dtype=np.uint32), np.arange(30, 40, dtype=np.uint32))
    assert [len(column) for column in plan.columns] == [3, 3, 3]
    assert plan.nbytes.tolist() == [80, 80, 80]
    assert geometry.bytes_of_a_page == 24


def test_two_pages_that_follow_each_other_are_one_descriptor_and_one_page_is_one() -> None:
    geometry = Geometry(regions(4096, 1, 8, 8), regions(1 << 30, 1, 8, 8))
    for count in (1, 2, 3):
        pages = np.arange(7, 7 + count, dtype=np.uint32)
        assert geometry.plan(pages, pages).nbytes.tolist() == [8 * count]


def test_a_gap_on_one_side_breaks_the_run() -> None:
    geometry = Geometry(regions(4096, 1, 8, 8), regions(1 << 30, 1, 8, 8))
    plan = geometry.plan(np.array([1, 2, 3, 4], np.uint32), np.array([1, 2, 9, 10], np.uint32))
    assert plan.nbytes.tolist() == [16, 16]


def test_padding_between_pages_is_never_written() -> None:
    geometry = Geometry(regions(4096, 1, 8, 16), regions(1 << 30, 1, 8, 8))
    plan = geometry.plan(np.array([1, 2], np.uint32), np.array([1, 2], np.uint32))
    assert plan.nbytes.tolist() == [8, 8]


def test_a_padded_destination_is_never_written_from_a_dense_source() -> None:
    geometry = Geometry(regions(4096, 1, 8, 8), regions(1 << 30, 1, 8, 16))
    plan = geometry.plan(np.array([1, 2], np.uint32), np.array([1, 2], np.uint32))
    assert plan.nbytes.tolist() == [8, 8]


def test_a_run_does_not_go_on_into_the_next_rooms_chunk() -> None:
    geometry = Geometry(regions(4096, 1, 8, 8), regions(1 << 30, 1, 8, 8))
    first, second = (np.array(pages, np.uint32) for pages in ([1, 2], [3, 4]))
    plans = geometry.plans([(first, first), (second, second)])
    assert [plan.nbytes.tolist() for plan in plans] == [[16], [16]]
    assert [plan.source.tolist() for plan in plans] == [[4096 + 8], [4096 + 24]]


def test_plans_are_joined_in_their_order_and_none_are_nothing() -> None:
    geometry = Geometry(regions(4096, 1, 8, 8), regions(1 << 30, 1, 8, 8))
    plans = [geometry.plan(pages, pages) for pages in (np.array([5], np.uint32), np.array([1, 2], np.uint32))]
    together = joined(plans)
    assert together.source.tolist() == [4096 + 40, 4096 + 8]
    assert together.destination.tolist() == [(1 << 30) + 40, (1 << 30) + 8]
    assert together.nbytes.tolist() == [8, 16]
    assert [len(column) for column in joined([]).columns] == [0, 0, 0]


def test_a_page_outside_the_pool_is_named() -> None:
    with pytest.raises(KvIndexOutOfRange) as caught:
        check_pages(np.array([1, 64, 2], np.uint32), PAGES, "kv")
    assert caught.value.metadata == {"pool": "kv", "page": "64", "pages": "64", "position": "1"}
    check_pages(np.array([63], np.uint32), PAGES, "kv")
    check_pages(np.array([], np.uint32), PAGES, "kv")


@given(st.data())
@settings(deadline=None)
def test_chunks_that_are_planned_together_are_planned_as_each_by_itself(data: st.DataObject) -> None:
    page_stride = data.draw(st.sampled_from([8, 12]))
    geometry = Geometry(regions(0, 2, 8, page_stride), regions(10**6, 2, 8, page_stride))
    pages = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=6)
    chunks = []
    for source in data.draw(st.lists(pages, min_size=1, max_size=5)):
        destination = data.draw(st.lists(st.integers(0, PAGES - 1), min_size=len(source), max_size=len(source)))
        chunks.append((np.array(source, np.uint32), np.array(destination, np.uint32)))
    together = geometry.plans(chunks)
    for chunk, plan in zip(chunks, together, strict=True):
        alone = geometry.plan(*chunk)
        assert [column.tolist() for column in plan.columns] == [column.tolist() for column in alone.columns]
