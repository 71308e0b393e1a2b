"""Page sizes and page tokens: bounded, opaque, and refused for any other list."""

from __future__ import annotations

import base64

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.paging import MAX_PAGE, numbers_token, page_size, page_token, read_numbers_token, read_page_token


@pytest.mark.parametrize(
    ("asked", "size"),
    [(0, 100), (1, 1), (101, 101), (MAX_PAGE, MAX_PAGE), (MAX_PAGE + 1, MAX_PAGE), (2**32 - 1, MAX_PAGE)],
)
def test_a_page_has_what_was_asked_for_up_to_the_bound(asked: int, size: int) -> None:
    assert page_size(asked) == size


def test_a_token_continues_the_list_that_it_was_made_for() -> None:
    assert read_page_token("List?role=1", page_token("List?role=1", "engine/3")) == "engine/3"
    assert read_numbers_token("Rooms", numbers_token("Rooms", (7, 0)), 2) == (7, 0)
    assert read_page_token("List", "") == "" and read_numbers_token("List", "", 2) is None


@pytest.mark.parametrize(
    "token",
    [
        page_token("another list", "engine/3"),
        page_token("List", "engine/3") + "!",  # no base64
        "*" + page_token("List", "engine/3"),
        base64.urlsafe_b64encode(b"1234").decode(),
        base64.urlsafe_b64encode(b"1234text").decode(),
        page_token("List", "engine/3")[:-4],
        "\u20ac",
        "x" * 5000,
    ],
)
def test_any_other_token_is_refused_and_shown_in_part(token: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_page_token("List", token)
    assert refused.value.metadata["field"] == "page_token"
    assert len(refused.value.metadata["value"]) <= 102


@pytest.mark.parametrize("after", ["1", "1,2,3", "1,x"])
def test_a_token_of_other_numbers_is_refused(after: str) -> None:
    with pytest.raises(InvalidRequest):
        read_numbers_token("Rooms", page_token("Rooms", after), 2)
