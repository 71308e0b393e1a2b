"""Page numbers come in every form that engines use, are copied, and never raise anything but InvalidRequest."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.errors import InvalidRequest, KvIndexOutOfRange
from kvgrpc.transfer import room_from_transfer_id
from kvgrpc.transfer.layout.plan import (
    check_destination,
    check_each_pool,
    check_first_page,
    check_pages,
)
from kvgrpc.transfer.layout.pools import as_pages, copy_of, count_of, destination_of, pages_of_pools
from kvgrpc.transfer.protocol.destination import Destination
from kvgrpc.transfer.protocol.types import MAX_ROOM


@pytest.mark.parametrize("given", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), np.array([1, 2, 3], np.int64)])
def test_lists_and_integer_arrays_become_uint32(given: object) -> None:
    pages = as_pages(given)  # type: ignore[arg-type]
    assert pages.dtype == np.uint32 and pages.tolist() == [1, 2, 3]


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int32), np.array([], np.float64)])
def test_nothing_is_legal(empty: object) -> None:
    assert len(as_pages(empty)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, ">i4"])
def test_the_engine_may_reuse_its_array_at_once(kind: str) -> None:
    given = np.array([0, 1, 0, 2], kind)[1::2]
    copied = copy_of(given, ("kv",))
    given[:] = 9
    pages, others = pages_of_pools(copied)
    assert (pages.tolist(), pages.dtype, others, count_of(copied)) == ([1, 2], np.uint32, None, 2)


class Hostile:
    def __array__(self, *args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("an engine's object")


@pytest.mark.parametrize("wrong", [[-1], [2**32], [[1, 2]], [1.5], "pages", None, {1: 2}, Hostile()])
def test_anything_else_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        copy_of(wrong, ("kv",))  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == "pages"


def test_a_transfer_id_maps_to_one_legal_room() -> None:
    room = room_from_transfer_id("chatcmpl-7")
    assert room == 7813418494045842964 <= MAX_ROOM
    assert room == room_from_transfer_id("chatcmpl-7") != room_from_transfer_id("chatcmpl-8")


def test_the_largest_page_number_is_one_and_a_negative_one_is_named_in_both_ways() -> None:
    """Over the wire a page of 2^31 and more is none that is negative."""
    assert as_pages([0, 2**32 - 1]).tolist() == [0, 2**32 - 1]
    with pytest.raises(KvIndexOutOfRange, match=r"page 4294967295 \(-1 as int32\) at position 1 is outside pool 'kv'"):
        check_pages(pages_of_pools(copy_of(np.array([3, -1], np.int32), ("kv",)))[0], 4, "kv")
    with pytest.raises(KvIndexOutOfRange, match=r"page 3000000000 \(-1294967296 as int32\) at"):
        check_destination(Destination.of_runs([3_000_000_000], [2]), 4, "kv")
    with pytest.raises(KvIndexOutOfRange, match=f"page {2**31 - 1} at"):
        check_pages(as_pages([2**31 - 1]), 4, "kv")


def test_pages_are_of_all_pools_or_of_those_that_they_name() -> None:
    names = ("kv", "swa", "index")
    first, others = pages_of_pools(copy_of([1, 2], names))
    assert first.tolist() == [1, 2] and others is None
    copied = copy_of({"index": np.array([5], np.int32), "kv": [1, 2]}, names)
    first, others = pages_of_pools(copied)
    assert first.tolist() == [1, 2] and others is not None and count_of(copied) == 2
    assert [each.tolist() for each in others] == [[], [5]]
    assert pages_of_pools(copy_of({"kv": [1]}, ("kv",)))[1] is None
    with pytest.raises(InvalidRequest) as refused:
        copy_of({"kv": [1], "mamba": [2]}, names)
    assert refused.value.metadata["value"] == "'mamba'" and "kv, swa, index" in refused.value.metadata["rule"]


def test_each_pool_has_the_bounds_of_its_own() -> None:
    pages = [np.array(each, np.uint32) for each in ([7], [3], [])]
    check_each_pool(check_pages, pages[0], pages[1:], (8, 4, 1), ("kv", "swa", "index"))
    with pytest.raises(KvIndexOutOfRange) as refused:
        check_each_pool(check_pages, pages[0], pages[1:], (8, 3, 1), ("kv", "swa", "index"))
    assert (refused.value.metadata["pool"], refused.value.metadata["pages"]) == ("swa", "3")
    check_each_pool(check_pages, pages[1], None, (8, 4), ("kv", "swa"))
    with pytest.raises(KvIndexOutOfRange, match="outside pool 'swa' of 4 pages"):
        check_each_pool(check_pages, pages[0], None, (8, 4), ("kv", "swa"))
    check_each_pool(check_pages, pages[0], None, (8,), ("kv",))
    with pytest.raises(KvIndexOutOfRange) as refused:
        check_each_pool(check_pages, pages[0], None, (7,), ("kv",))
    assert (refused.value.metadata["pool"], refused.value.metadata["pages"]) == ("kv", "7")


@pytest.mark.parametrize("count", [1, 40])
def test_a_destination_is_inside_of_each_pool(count: int) -> None:
    pages = list(range(count))
    for_all, for_each = destination_of((as_pages(pages),), 0), destination_of((as_pages(pages), as_pages([7])), 0)
    check_each_pool(check_destination, for_all, for_all.others, (count + 1, count), ("kv", "swa"))
    check_each_pool(check_destination, for_each, for_each.others, (count, 8), ("kv", "swa"))
    for wrong, sizes in ((for_all, (count, count - 1)), (for_each, (count - 1, 8)), (for_each, (count, 7))):
        with pytest.raises(KvIndexOutOfRange):
            check_each_pool(check_destination, wrong, wrong.others, sizes, ("kv", "swa"))


@pytest.mark.parametrize("pages", [[3, 3], {"kv": [1], "swa": [2, 2]}])
def test_no_pool_of_a_destination_has_a_page_twice(pages: object) -> None:
    with pytest.raises(InvalidRequest, match="there once"):
        destination = destination_of(copy_of(pages, ("kv", "swa")), 0)  # type: ignore[arg-type]
        check_each_pool(check_destination, destination, destination.others, (4, 4), ("kv", "swa"))


@pytest.mark.parametrize("pages", [[], [4], [1, 2, 9], [9, 2, 1], [0, 2**32 - 1]])
def test_pages_in_any_order_are_distinct(pages: list[int]) -> None:
    check_destination(Destination(np.array(pages, np.uint32)), 2**32, "kv")


@pytest.mark.parametrize(("pages", "twice"), [([3, 3], 3), ([1, 2, 2, 5], 2), ([7, 1, 7], 7)])
def test_a_page_that_is_there_twice_is_named(pages: list[int], twice: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_destination(Destination(np.array(pages, np.uint32)), 2**32, "kv", "pages[0]")
    assert (refused.value.metadata["field"], refused.value.metadata["value"]) == ("pages[0]", str(twice))


def test_the_first_page_of_a_chunk_is_a_number_of_32_bits() -> None:
    for legal in (0, 2**32 - 1):
        check_first_page(legal)
    for wrong in (-1, 2**32, "3", 1.0, None):
        with pytest.raises(InvalidRequest):
            check_first_page(wrong)  # type: ignore[arg-type]
