"""What keys make of the table of ``kvgrpc top``."""

from __future__ import annotations

from functools import reduce

from kvgrpc.cli.top.arrangement import BACKSPACE, ESCAPE, RETURN, Arrangement, arranged, pressed

COLUMNS = 3
LINES = [("decode-a", 5, 0.9), ("decode-b", 30, None), ("prefill", 4, 0.1)]


def shown(*keys: str) -> list[str]:
    order = reduce(lambda before, key: pressed(before, key, COLUMNS), keys, Arrangement())
    return [line[0] for line in arranged(LINES, order, lambda line: line)]


def test_names_come_first_and_turn() -> None:
    assert shown() == ["decode-a", "decode-b", "prefill"]
    assert shown("r") == ["prefill", "decode-b", "decode-a"]


def test_numbers_sort_by_their_value() -> None:
    assert shown(">") == ["prefill", "decode-a", "decode-b"]
    assert shown(">", "r") == ["decode-b", "decode-a", "prefill"]


def test_what_has_no_value_is_last_either_way() -> None:
    assert shown(">", ">") == ["prefill", "decode-a", "decode-b"]
    assert shown("<", "r") == ["decode-a", "prefill", "decode-b"]


def test_text_behind_a_slash_keeps_ranks_and_keys_are_letters_meanwhile() -> None:
    assert shown("/", "f", "i") == ["prefill"]
    assert shown("/", *"DECODE") == ["decode-a", "decode-b"]
    assert shown("/", *"decode", RETURN, "r") == ["decode-b", "decode-a"]
    assert shown("/", *"fix", BACKSPACE) == ["prefill"]


def test_escape_keeps_all_again() -> None:
    assert len(shown("/", "x", "y", ESCAPE)) == 3
    assert shown("/", "x", ESCAPE, "r")[0] == "prefill"


def test_a_key_that_means_nothing_changes_nothing() -> None:
    assert pressed(Arrangement(), "\x01", COLUMNS) == Arrangement()
    assert pressed(Arrangement(typing=True), "\x01", COLUMNS) == Arrangement(typing=True)
