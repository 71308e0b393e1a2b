"""Page numbers come in every form that engines use, are copied, and never raise anything but InvalidRequest."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.transfer import room_from_transfer_id
from kvgrpc.transfer.layout.pools import as_pages
from kvgrpc.transfer.protocol.types import MAX_ROOM


@pytest.mark.parametrize("given", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), np.array([1, 2, 3], np.int64)])
def test_lists_and_integer_arrays_become_uint32(given: object) -> None:
    pages = as_pages(given)  # type: ignore[arg-type]
    assert pages.dtype == np.uint32 and pages.tolist() == [1, 2, 3]


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int32), np.array([], np.float64)])
def test_nothing_is_legal(empty: object) -> None:
    assert len(as_pages(empty)) == 0  # type: ignore[arg-type]


def test_the_engine_may_reuse_its_array_at_once() -> None:
    given = np.array([1, 2], np.uint32)
    pages = as_pages(given)
    given[:] = 9
    assert pages.tolist() == [1, 2]


class Hostile:
    def __array__(self, *args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("an engine's object")


@pytest.mark.parametrize("wrong", [[-1], [2**32], [[1, 2]], [1.5], "pages", None, {1: 2}, Hostile()])
def test_anything_else_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        as_pages(wrong)  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == "pages"


def test_a_transfer_id_maps_to_one_legal_room() -> None:
    room = room_from_transfer_id("chatcmpl-7")
    assert room == 7813418494045842964 <= MAX_ROOM
    assert room == room_from_transfer_id("chatcmpl-7") != room_from_transfer_id("chatcmpl-8")
