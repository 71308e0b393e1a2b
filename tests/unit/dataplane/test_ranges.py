"""No descriptor that leaves known memory gets through, and none that stays inside is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.dataplane.ranges import ADDRESS_END, RangeTable, arrays, first_outside, merged, split


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[int, int]]:
    ranges, position = [], draw(st.integers(1, 50))
    for _ in range(draw(st.integers(0, 6))):
        nbytes = draw(st.integers(1, 40))
        ranges.append((position, nbytes))
        position += nbytes + draw(st.integers(0, 20))
    return draw(st.permutations(ranges))


@given(tables(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=20))
@settings(deadline=None)
def test_a_descriptor_is_found_exactly_when_one_range_holds_it(
    ranges: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    table = RangeTable(ranges)
    addresses, nbytes = u64(*(a for a, _ in asked)), u64(*(n for _, n in asked))
    found = table.find(addresses, nbytes)
    for (address, size), number in zip(asked, found.tolist(), strict=True):
        holders = [(base, length) for base, length in ranges if base <= address and address + size <= base + length]
        assert (number >= 0) == bool(holders) == table.contains(address, size)
        assert number < 0 or table.ranges[number] in holders


def test_lengths_that_wrap_around_the_address_space_are_outside() -> None:
    table = RangeTable([(1000, 100)])
    addresses, nbytes = u64(1010, 2**64 - 10, 0, 1000), u64(2**64 - 5, 1020, 2**64 - 1, 101)
    assert table.find(addresses, nbytes).tolist() == [-1] * 4
    assert (
        first_outside(table.find(addresses, nbytes), addresses, nbytes) == "descriptor 0 (0x3f2+18446744073709551611)"
    )
    assert RangeTable([(ADDRESS_END - 10, 10)]).find(u64(ADDRESS_END - 10), u64(10)).tolist() == [0]


@pytest.mark.parametrize("bad", [[(0, 5)], [(5, 0)], [(5, -1)], [(10, 5), (14, 2)], [(ADDRESS_END - 1, 2)]])
def test_ranges_that_are_no_memory_are_refused(bad: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="range"):
        RangeTable(bad)


def test_adjacent_ranges_become_one_and_overlaps_are_refused() -> None:
    assert merged([(30, 5), (10, 10), (20, 10), (10, 10), (40, 1)]) == [(10, 25), (40, 1)]
    with pytest.raises(ValueError, match="overlaps"):
        merged([(10, 10), (19, 5)])


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 100)), max_size=20))
@settings(deadline=None)
def test_splitting_keeps_every_byte_where_it_was(rows: list[tuple[int, int, int]]) -> None:
    columns = arrays([s for s, _, _ in rows], [d for _, d, _ in rows], [n for _, _, n in rows])
    pieces = list(zip(*(column.tolist() for column in split(16, *columns)), strict=True))
    assert all(0 < nbytes <= 16 for _, _, nbytes in pieces)
    moved = [(source + i, destination + i) for source, destination, nbytes in pieces for i in range(nbytes)]
    assert moved == [(source + i, destination + i) for source, destination, nbytes in rows for i in range(nbytes)]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        arrays([1, 2], [1], [1, 2])
    with pytest.raises(ValueError, match="shapes"):
        arrays([[1]], [[1]], [[1]])
