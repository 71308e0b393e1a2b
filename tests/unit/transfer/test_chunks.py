"""Chunks with pages of several pools: each pool gets its pages in order, as many as decode wants of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.transfer.protocol.prefill.chunks import Chunk, Chunks
from kvgrpc.transfer.protocol.types import Align, Destination, RoomKey, U32Array

KEY = RoomKey(5)


def pages(*numbers: int) -> U32Array:
    return np.array(numbers, np.uint32)


def wanted(first: U32Array, *others: U32Array) -> Destination:
    return Destination(first, others=tuple(map(Destination, others)))


def chunks_of(*chunks: tuple[U32Array, tuple[U32Array, ...] | None], ends: bool = True) -> Chunks:
    made, start = Chunks(), 0
    for number, (first, others) in enumerate(chunks, 1):
        assert made.add(KEY, Chunk(first, start, ends and number == len(chunks), None, others), 16) is None
        start += len(first)
    return made


def test_pages_of_the_other_pools_go_on_where_the_chunk_before_ended() -> None:
    made = chunks_of((pages(1, 2), (pages(11), pages(21, 22))), (pages(3), (pages(12, 13), pages())))
    destination = wanted(pages(101, 102, 103), pages(111, 112, 113), pages(121, 122))
    assert made.misfit(KEY, destination) is None and made.missing(KEY, destination) is None
    moved = [
        [list(zip(source.tolist(), to.tolist(), strict=True)) for source, to in each.others or ()]
        for each in made.place(destination)
    ]
    assert moved == [[[(11, 111)], [(21, 121), (22, 122)]], [[(12, 112), (13, 113)], []]]


def test_a_chunk_of_other_pools_alone_is_placed_and_one_of_nothing_is_not() -> None:
    made = chunks_of((pages(1), (pages(),)), (pages(), (pages(11),)), (pages(), (pages(),)))
    placed = made.place(wanted(pages(101), pages(111)))
    assert [(each.source.tolist(), [to.tolist() for _, to in each.others or ()]) for each in placed] == [
        ([1], [[]]),
        ([], [[111]]),
    ]


@pytest.mark.parametrize(
    ("sent", "ends", "fits"),
    [((2, 1), True, True), ((2, 1), False, True), ((1, 1), False, True), ((1, 1), True, False), ((2, 2), True, False)],
)
def test_each_other_pool_gets_as_many_pages_as_decode_wants(sent: tuple[int, int], ends: bool, fits: bool) -> None:
    others = [pages(*range(count)) for count in sent]
    made = chunks_of((pages(1), (others[0][:1], others[1][:1])), (pages(2), (others[0][1:], others[1][1:])), ends=ends)
    misfit = made.misfit(KEY, wanted(pages(7, 8), pages(5, 6), pages(9)))
    assert (misfit is None) is fits
    if misfit is not None:
        pool = 1 if sent[0] == 1 else 2
        assert f"{sent[pool - 1]} pages of pool {pool}, decode wants {3 - pool}" in misfit.message


@pytest.mark.parametrize("ends", [True, False])
def test_with_the_tail_aligned_each_pool_gives_its_last_pages_once_all_are_known(ends: bool) -> None:
    made = chunks_of((pages(1, 2), (pages(11, 12), pages(21))), (pages(3), (pages(13), pages(22))), ends=ends)
    made.align, made.total = Align.TAIL, 3
    destination = wanted(pages(102, 103), pages(113), pages(121, 122))
    assert made.misfit(KEY, destination) is None and made.missing(KEY, destination) is None
    placed = made.place(destination)
    assert made.waiting is not ends
    pools = [[(each.source, each.destination), *(each.others or ())] for each in placed]
    moved = [[list(zip(source.tolist(), to.tolist(), strict=True)) for source, to in chunk] for chunk in pools]
    first = [[(2, 102)], [], [(21, 121)]]
    assert moved == ([first, [[(3, 103)], [(13, 113)], [(22, 122)]]] if ends else [])


def test_with_the_tail_aligned_too_few_pages_of_a_pool_fail_the_room() -> None:
    made = chunks_of((pages(1), (pages(11),)))
    made.align = Align.TAIL
    misfit = made.misfit(KEY, wanted(pages(101), pages(111, 112)))
    assert misfit is not None and "1 pages of pool 1, decode wants 2" in misfit.message


def test_both_sides_give_pages_for_each_pool_or_neither_does() -> None:
    for_all, for_each = chunks_of((pages(1), None)), chunks_of((pages(1), (pages(2),)))
    misfit = for_all.misfit(KEY, wanted(pages(7), pages(8)))
    assert misfit is not None and misfit.metadata["value"] == "2"
    assert for_each.misfit(KEY, Destination(pages(7))) is not None
    assert for_all.misfit(KEY, Destination(pages(7))) is None
    assert for_each.misfit(KEY, wanted(pages(7), pages(8))) is None


def test_a_copy_goes_its_own_way() -> None:
    made = chunks_of((pages(1, 2), (pages(11, 12),)), ends=False)
    other = made.copy()
    assert made.add(KEY, Chunk(pages(3), 2, True, None, (pages(13),)), 16) is None
    assert made.total == 3 and made.last_seen
    assert other.total is None and not other.last_seen
    two = wanted(pages(7, 8), pages(5, 6))
    assert made.misfit(KEY, two) is not None and other.misfit(KEY, two) is None
    for each, moved in ((other, [[(11, 5), (12, 6)]]), (made, [[(11, 5), (12, 6)], [(13, 4)]])):
        placed = each.place(wanted(pages(7, 8, 9), pages(5, 6, 4)))
        pools = [one.others[0] for one in placed if one.others]
        assert [list(zip(source.tolist(), to.tolist(), strict=True)) for source, to in pools] == moved
    refused = other.add(KEY, Chunk(pages(9), 1, False, None, (pages(),)), 16)
    assert refused is not None and "sent before" in refused.message


def test_a_chunk_of_which_decode_wants_the_other_pools_alone_writes_no_page_of_the_first() -> None:
    made = chunks_of((pages(1), (pages(),)), (pages(2, 3), (pages(11),)))
    _, last = made.place(wanted(pages(101), pages(111)))
    assert (len(last.source), len(last.destination)) == (0, 0)
    assert [(source.tolist(), to.tolist()) for source, to in last.others or ()] == [([11], [111])]


@pytest.mark.parametrize(("first_page", "expected"), [(0, {3: 103}), (2, {3: 101, 4: 102})])
def test_of_a_chunk_at_the_end_decode_gets_what_it_wants(first_page: int, expected: dict[int, int]) -> None:
    made = chunks_of((pages(1, 2), None), (pages(3, 4), None))
    destination = Destination(pages(101, 102, 103)[: 3 if not first_page else 2], first_page)
    *_, last = made.place(destination)
    assert dict(zip(last.source.tolist(), last.destination.tolist(), strict=True)) == expected


@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 8))
def test_of_any_chunk_the_positions_that_decode_has_go_to_its_pages(start: int, count: int, wants: int) -> None:
    made = Chunks()
    assert made.add(KEY, Chunk(np.arange(10 + start, 10 + start + count, dtype=np.uint32), start, True), 16) is None
    placed = made.place(Destination(np.arange(100, 100 + wants, dtype=np.uint32)))
    moved = [list(zip(each.source.tolist(), each.destination.tolist(), strict=True)) for each in placed]
    expected = [(10 + position, 100 + position) for position in range(start, min(start + count, wants))]
    assert moved == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("align", "first_page", "chunks", "page"),
    [
        (Align.TAIL, 0, [(0, 2)], 0),
        (Align.HEAD, 0, [(0, 1), (2, 3)], 1),
        (Align.HEAD, 4, [(0, 5), (6, 8)], 1),
    ],
)
def test_what_will_not_come_is_named_by_its_place_among_decodes_pages(
    align: Align, first_page: int, chunks: list[tuple[int, int]], page: int
) -> None:
    made = Chunks()
    made.align = align
    for start, stop in chunks:
        numbers = np.arange(start, stop, dtype=np.uint32)
        assert made.add(KEY, Chunk(numbers, start, stop == chunks[-1][1]), 16) is None
    missing = made.missing(KEY, Destination(pages(7, 8, 9), first_page))
    assert missing is not None and f"decode's page {page} of 3" in missing.message


def test_one_chunk_may_wait_where_the_bound_is_one() -> None:
    made = Chunks()
    assert made.add(KEY, Chunk(pages(1), 0, False), 1) is None
    refused = made.add(KEY, Chunk(pages(2), 1, False), 1)
    assert refused is not None and refused.metadata["value"] == "1"


def test_from_the_end_a_chunk_that_decode_wants_in_part_goes_to_the_first_of_its_pages() -> None:
    made = chunks_of((pages(1, 2), (pages(11, 12, 13),)), (pages(3), (pages(14),)))
    made.align = Align.TAIL
    placed = made.place(wanted(pages(101, 102, 103), pages(111, 112)))
    assert [[(source.tolist(), to.tolist()) for source, to in each.others or ()] for each in placed] == [
        [([13], [111])],
        [([14], [112])],
    ]
