"""What keys make of the table of ``kvgrpc top``."""

from __future__ import annotations

from functools import reduce

import pytest

from kvgrpc.cli.top.arrangement import BACKSPACE, ESCAPE, RETURN, Arrangement, arranged, pressed
from kvgrpc.cli.top.looking import COLUMNS as ALL
from kvgrpc.cli.top.looking import GAP, RankLine, cells, columns_of, fill, fitting, hit_rate
from kvgrpc.v1 import common_pb2
from kvgrpc.v1.prefetch_service_pb2 import CacheTierUse

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


def after(*keys: str) -> Arrangement:
    return reduce(lambda before, key: pressed(before, key, COLUMNS), keys, Arrangement())


def test_a_rank_is_chosen_opened_and_closed_again() -> None:
    assert after("j", "j", "k").chosen == 1 and after("k").chosen == 0
    assert after("j", RETURN).opened and not after("j", RETURN, ESCAPE).opened
    assert after("j", RETURN, "k", "r", "/") == after("j", RETURN)
    assert not after("/", "x", RETURN).opened and after("/", "x", RETURN, RETURN).opened


def test_columns_in_which_no_rank_has_a_value_are_left_out() -> None:
    values: list[object] = [None] * len(ALL)
    values[0], values[ALL.index("#GB/s")], values[ALL.index("#hits")] = "P/dp0", 1.234, 0.5
    line = RankLine(values, "P")
    shown = columns_of([line, RankLine([None] * len(ALL), "D")])
    assert [ALL[number] for number in shown] == ["rank", "role", "server", "health", "lease", "#GB/s", "#hits"]
    assert cells(line, shown, short=True) == ["P", None, None, None, None, "1.23", "50%"]


def test_tiers_say_how_full_they_are_and_how_often_they_had_what_was_asked_for() -> None:
    host = CacheTierUse(tier=common_pb2.TIER_HOST, pages=64, used_pages=16, counts={"hits": 6, "misses": 1})
    storage = CacheTierUse(tier=common_pb2.TIER_STORAGE, used_pages=9, counts={"misses": 1})
    assert fill([host, storage]) == "host 25 %"
    assert hit_rate([host, storage]) == 0.75
    assert hit_rate([CacheTierUse()]) is None and fill([]) == ""


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_a_narrow_terminal_shows_what_matters_and_the_column_that_is_sorted_by(width: int) -> None:
    line = RankLine(
        ["prefill-0/dp0/pp0/cp0/tp0", "prefill", "10.12.33.7:9001", *["some text"] * (len(ALL) - 3)], "prefill-0"
    )
    everything = range(len(ALL))
    assert fitting([line], everything, 400, 0) == list(everything)
    shown, kept = fitting([line], everything, width, 0), ALL.index("server")
    texts = [[ALL[number].removeprefix("#"), str(cells(line, [number], short=True)[0])] for number in shown]
    assert sum(max(map(len, each)) + GAP for each in texts) <= width + GAP
    assert {"rank", "health"} < {ALL[number] for number in shown}
    assert kept in fitting([line], everything, width, kept)
