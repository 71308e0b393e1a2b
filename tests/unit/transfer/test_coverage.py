"""Coverage says what a set of positions would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.transfer.protocol.prefill.chunks import Coverage

pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=20)


@given(pieces, st.integers(0, 45), st.integers(0, 12))
def test_it_equals_a_set(added: list[tuple[int, int]], start: int, length: int) -> None:
    coverage, naive = Coverage(), set[int]()
    for first, count in added:
        positions = set(range(first, first + count))
        assert coverage.add(first, count) == naive.isdisjoint(positions)
        if naive.isdisjoint(positions):
            naive |= positions
    prefix = next(position for position in range(100) if position not in naive)
    assert coverage.prefix == prefix
    assert coverage.stop == max(naive, default=-1) + 1
    assert coverage.covers(start, start + length) == set(range(start, start + length)).issubset(naive)
    assert coverage.first_gap(start) == next(position for position in range(start, 200) if position not in naive)


def test_two_islands_cover_nothing_of_what_lies_between_them() -> None:
    coverage = Coverage()
    assert coverage.add(0, 2) and coverage.add(4, 2) and coverage.add(8, 2)
    assert not coverage.covers(4, 10) and not coverage.covers(0, 6) and coverage.covers(8, 10)
    assert (coverage.first_gap(4), coverage.first_gap(8), coverage.prefix) == (6, 10, 2)
    assert coverage.add(6, 2) and coverage.covers(4, 10) and coverage.prefix == 2
    assert coverage.add(2, 2) and coverage.prefix == 10
