"""Runs are the pages that they stand for, and take no memory until somebody writes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgrpc.transfer.protocol.destination import Destination

runs = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), max_size=8)


def spelled_out(parts: list[tuple[int, int]]) -> list[int]:
    return [page for start, length in parts for page in range(start, start + length)]


@given(runs, st.data())
def test_any_slice_of_runs_is_that_of_their_pages(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    pages = spelled_out(parts)
    destination = Destination.of_runs([start for start, _ in parts], [length for _, length in parts], 3)
    assert (destination.count, destination.first_page, destination.pages.tolist()) == (len(pages), 3, pages)
    first = data.draw(st.integers(0, len(pages)))
    stop = data.draw(st.integers(first, len(pages)))
    assert destination.slice(first, stop).tolist() == pages[first:stop]
    assert destination.slice(first, stop).dtype == np.uint32
    listed, raw = Destination(np.array(pages, np.uint32), 3), Destination(np.array(pages, "<u4").tobytes(), 3)
    assert destination.same(listed) and listed.same(destination) and destination.same(destination)
    assert listed.same(raw) and raw.same(destination) and raw.count == len(pages)
    assert raw.raw == listed.raw == destination.raw
    assert raw.slice(first, stop).tolist() == listed.slice(first, stop).tolist() == pages[first:stop]
    assert not destination.same(Destination(np.array(pages, np.uint32), 4))
    assert not destination.same(Destination(np.array([*pages, 1], np.uint32), 3))


@given(runs)
def test_a_page_that_is_there_twice_is_found_in_runs_as_in_lists(parts: list[tuple[int, int]]) -> None:
    pages = spelled_out(parts)
    twice = {page for page in pages if pages.count(page) > 1}
    for each in (
        Destination.of_runs([start for start, _ in parts], [length for _, length in parts]),
        Destination(np.array(pages, np.uint32)),
        Destination(np.array(pages, "<u4").tobytes()),
    ):
        found = each.twice()
        assert found in twice if twice else found is None


@given(st.integers(2, 2000), st.integers(1, 3), st.integers(0, 2**32 - 1), st.booleans())
def test_a_page_that_is_there_twice_is_found_in_many_runs_in_any_order(
    count: int, longest: int, seed: int, again: bool
) -> None:
    """Of no pages to three, some side by side, up to the last page that there can be."""
    random = np.random.default_rng(seed)
    lengths, gaps = random.integers(0, longest + 1, count), random.integers(0, 2, count)
    starts = np.cumsum(lengths + gaps) - lengths
    starts += 2**32 - int((starts + lengths).max())
    order = random.permutation(count)
    starts, lengths = starts[order], lengths[order]
    if again:
        lengths[0], lengths[1] = 2, 1
        starts[0], starts[1] = 7, 8
        assert Destination.of_runs(starts, lengths).twice() == 8
    else:
        assert Destination.of_runs(starts, lengths).twice() is None


def test_runs_in_any_order_are_checked_without_an_order_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order of a million runs takes 60 ms of the loop that all sessions share, two sorted columns 9 ms."""

    def argsort(*_: object) -> None:
        raise AssertionError("an order was made")

    starts = np.random.default_rng(1).permutation(2**17) * 8
    monkeypatch.setattr(np, "argsort", argsort)
    assert Destination.of_runs(starts, np.full(2**17, 8)).twice() is None


@given(st.integers(2, 2000), st.sampled_from([1, 2, 31, 32, 33, 200]), st.integers(0, 2**32 - 1), st.booleans())
def test_a_page_that_is_there_twice_is_found_in_lists_of_any_length_and_spread(
    count: int, spread: int, seed: int, again: bool
) -> None:
    random = np.random.default_rng(seed)
    pages = random.permutation(count * spread)[:count].astype(np.uint32)
    if again:
        pages[random.integers(1, count)] = pages[0]
        assert Destination(pages).twice() == pages[0]
    else:
        assert Destination(pages).twice() is None


def test_a_long_list_of_a_pool_in_any_order_is_checked_without_sorting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting 131,072 pages takes 3 ms of the loop that all sessions share, and marking them 0.2 ms."""

    def sort(*_: object) -> None:
        raise AssertionError("sorted")

    pages = np.random.default_rng(1).permutation(2**17).astype(np.uint32)
    monkeypatch.setattr(np, "sort", sort)
    assert Destination(pages).twice() is None
    assert Destination(pages * np.uint32(31)).twice() is None


@given(runs, st.integers(1, 1010))
def test_the_first_page_that_a_pool_does_not_have_is_found_without_making_any(
    parts: list[tuple[int, int]], pool: int
) -> None:
    pages = spelled_out(parts)
    wrong = next(((position, page) for position, page in enumerate(pages) if page >= pool), None)
    assert Destination.of_runs([start for start, _ in parts], [length for _, length in parts]).outside(pool) == wrong
    assert Destination(np.array(pages, np.uint32)).outside(pool) == wrong


@given(st.lists(st.integers(0, 20), max_size=18), st.integers(1, 21))
@example(list(range(16)), 16)
@example(list(range(17)), 17)
def test_what_fits_at_a_glance_has_no_page_twice_and_none_outside(pages: list[int], pool: int) -> None:
    destination = Destination(np.array(pages, np.uint32))
    right = destination.outside(pool) is None and destination.twice() is None
    assert destination.clearly_fits(pool) is (right and len(pages) <= 16)
    assert not Destination.of_runs([0], [1]).clearly_fits(pool)  # runs are looked at as runs


def test_a_run_of_millions_of_pages_takes_no_memory_until_it_is_written() -> None:
    tracemalloc.start()
    destinations = [Destination.of_runs([0], [2**24]) for _ in range(60)]
    assert all(destination.outside(2**24) is None for destination in destinations)
    assert destinations[0].slice(2**23, 2**23 + 3).tolist() == [2**23, 2**23 + 1, 2**23 + 2]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_the_pages_of_all_pools_are_held() -> None:
    of_pools = (Destination(np.arange(2, dtype=np.uint32)), Destination.of_runs([7], [5]))
    first = np.arange(3, dtype=np.uint32)
    assert Destination(first).held == 3
    assert Destination(first, others=of_pools).held == 10


def test_destinations_differ_where_one_of_them_alone_has_pools_of_its_own() -> None:
    pages = np.arange(3, dtype=np.uint32)
    plain, pooled = Destination(pages), Destination(pages, others=(Destination(pages),))
    assert not plain.same(pooled) and not pooled.same(plain)
    assert pooled.same(Destination(pages, others=(Destination.of_runs([0], [3]),)))
    assert (plain.first_page, Destination.of_runs([0], [3]).first_page) == (0, 0)


def test_destinations_are_the_same_only_where_each_pool_is() -> None:
    def of(first: list[int], *others: list[int]) -> Destination:
        made = [Destination(np.array(each, np.uint32)) for each in (first, *others)]
        return Destination(np.array(first, np.uint32), others=tuple(made[1:]))

    assert of([1, 2], [3], [4]).same(of([1, 2], [3], [4]))
    for other in (of([1, 2], [3]), of([1, 2], [3], [5]), of([1, 9], [3], [4]), of([1, 2], [3], [4], [5])):
        assert not of([1, 2], [3], [4]).same(other) and not other.same(of([1, 2], [3], [4]))


def test_runs_are_the_same_only_where_they_begin_and_end_alike() -> None:
    runs_of = Destination.of_runs
    assert runs_of([0, 8], [2, 2]).same(runs_of([0, 8], [2, 2]))
    assert not runs_of([0, 8], [2, 2]).same(runs_of([0, 9], [2, 2]))
    assert not runs_of([0, 8], [2, 2]).same(runs_of([0, 8], [1, 3]))
