"""The common names of an engine's pages: known for what it has met, leading pages first, and bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvgrpc.hashing import each_block_hash, page_hashes, storage_seed
from kvgrpc.pull import names as names_of_pages
from kvgrpc.pull.names import NotedNames

PAGE = 4


@pytest.fixture
def names() -> Iterator[NotedNames]:
    found = NotedNames(PAGE, most=8)
    yield found
    found.close()


def prompt(pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + pages * PAGE + 1))


def own_of(tokens: Sequence[int]) -> list[bytes]:
    return list(each_block_hash(tokens, PAGE))


def common_of(tokens: Sequence[int], salt: str | None = None) -> list[str]:
    whole = tokens[: len(tokens) // PAGE * PAGE]
    return [each.hex() for each in page_hashes(whole, PAGE, after=storage_seed(None, salt))]


def hexed(hashes: Sequence[bytes]) -> list[str]:
    return [each.hex() for each in hashes]


def test_a_prompt_that_was_met_is_known_by_both_names(names: NotedNames) -> None:
    tokens = prompt(3)
    names.note(own_of(tokens), tokens)
    assert names.common(hexed(own_of(tokens))) == common_of(tokens)
    assert names.own(common_of(tokens)) == hexed(own_of(tokens))


def test_only_leading_pages_that_were_met_have_a_name(names: NotedNames) -> None:
    shorter, longer = prompt(2), prompt(5)
    names.note(own_of(shorter), shorter)
    assert names.common(hexed(own_of(longer))) == common_of(shorter)
    assert names.own(common_of(prompt(2, 1000))) == []
    assert names.common([hashlib.sha256(b"other").hexdigest(), *hexed(own_of(shorter))]) == []


def test_a_salt_is_in_both_names(names: NotedNames) -> None:
    tokens = prompt(2)
    salted = list(each_block_hash(tokens, PAGE, cache_salt="tenant"))
    names.note(salted, tokens, storage_seed(None, "tenant"))
    assert names.common(hexed(salted)) == common_of(tokens, "tenant")
    assert names.own(common_of(tokens)) == []


def test_what_was_met_last_is_remembered_and_leading_pages_longest(names: NotedNames) -> None:
    first, second = prompt(5), prompt(5, 1000)
    for tokens in (first, second):
        names.note(own_of(tokens), tokens)
    assert names.own(common_of(second)) == hexed(own_of(second))
    assert names.own(common_of(first)) == hexed(own_of(first))[:3]
    assert len(names._own) == len(names._common) == 8


def test_a_page_that_is_noted_again_counts_once(names: NotedNames) -> None:
    for pages in (2, 4, 3, 4):
        names.note(own_of(prompt(pages)), prompt(pages))
    assert names.own(common_of(prompt(4))) == hexed(own_of(prompt(4)))
    assert len(names._own) == len(names._common) == 4


def test_tokens_that_wait_to_be_hashed_are_bounded(names: NotedNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_of_pages, "MOST_TOKENS", 20)
    with names._lock:  # nothing is hashed meanwhile
        for first in (0, 1000, 2000):
            names.note(own_of(prompt(2, first)), prompt(2, first))
    assert names.own(common_of(prompt(2, 1000))) and not names.own(common_of(prompt(2, 2000)))


def test_a_closed_engine_notes_nothing(names: NotedNames) -> None:
    names.close()
    names.note(own_of(prompt(2)), prompt(2))
    assert names.own(common_of(prompt(2))) == []


def test_a_prompt_is_noted_though_no_thread_can_be_had(names: NotedNames, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an engine's own thread that notes it."""

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", no_thread)
    tokens = prompt(3)
    own = own_of(tokens)
    names.note(own, tokens)
    assert len(names.common([each.hex() for each in own])) == 3
