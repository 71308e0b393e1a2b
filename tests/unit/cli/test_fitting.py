"""Tables that have no room for all of their columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.cli.fitting import GAP, Name, cut_to, fit

RANK = Name("prefill-0/dp0/pp0/cp0/tp0", "prefill-0")
HEADS = ("rank", "room", "attempt", "held", "failure")
ROW = (RANK, "7000000000001", "0", "-", "ROOM_CANCELLED")
GOING = (2, 3, 1)


def test_where_there_is_room_all_is_shown_in_full() -> None:
    found = fit(HEADS, [ROW], 200, GOING)
    assert (list(found.shown), found.short, list(found.left_out)) == ([0, 1, 2, 3, 4], False, [])
    assert found.total == len("prefill-0/dp0/pp0/cp0/tp0" + "7000000000001" + "attempt" + "held" + ROW[4]) + 4 * GAP


def test_names_are_short_before_a_column_goes() -> None:
    found = fit(HEADS, [ROW], 60, GOING)
    assert (list(found.shown), found.short) == ([0, 1, 2, 3, 4], True)


def test_a_column_without_any_value_goes_first_and_nobody_misses_it() -> None:
    found = fit(HEADS, [ROW], 51, GOING)
    assert (list(found.shown), list(found.left_out)) == ([0, 1, 2, 4], [])


def test_then_columns_go_by_their_order_and_are_named_the_most_important_first() -> None:
    assert (list(fit(HEADS, [ROW], 42, GOING).shown), list(fit(HEADS, [ROW], 42, GOING).left_out)) == ([0, 1, 4], [2])
    found = fit(HEADS, [ROW], 26, GOING)
    assert (list(found.shown), list(found.left_out), found.total) == ([0, 4], [1, 2], 25)


def test_what_always_stays_is_wider_than_there_is_room_for_rather_than_gone() -> None:
    found = fit(HEADS, [ROW], 10, GOING)
    assert list(found.shown) == [0, 4] and found.total > 10
    assert cut_to(found.widths, 20) == [9, 9] and cut_to(found.widths, 4) == [8, 8]


def test_cells_of_several_words_are_folded_and_words_never_broken() -> None:
    found = fit(("what", "remark"), [("port", "something listens " * 9), ("x", "a" * 30)], 60)
    assert list(found.widths) == [4, 54]
    assert list(fit(("what", "remark"), [("port", "b c"), ("x", "a " + "b" * 30)], 10).widths) == [4, 30]


def test_a_rank_that_did_not_answer_widens_no_column() -> None:
    assert fit(HEADS, [ROW, (RANK, "no answer: PEER_UNREACHABLE")], 200, GOING).widths == fit(HEADS, [ROW], 200).widths


TEXT = st.text("ab ", max_size=40).map(str.strip)


@given(st.lists(st.tuples(*[TEXT] * 5), max_size=5), st.integers(1, 250), st.permutations(range(5)), st.integers(0, 5))
def test_no_table_is_wider_unless_all_that_may_go_is_gone(
    rows: list[tuple[str, ...]], width: int, order: list[int], count: int
) -> None:
    going = order[:count]
    found = fit(HEADS, rows, width, going)
    assert found.total <= width or not set(going) & set(found.shown)
    assert set(found.left_out) <= set(going) - set(found.shown)
    assert set(range(5)) - set(going) <= set(found.shown)
    assert all(wide >= len(HEADS[number]) for number, wide in zip(found.shown, found.widths, strict=True))


@pytest.mark.parametrize("width", [10, 80])
def test_no_rows_are_a_table_too(width: int) -> None:
    assert list(fit(("a", "b"), [], width).widths) == [1, 1]
