"""What keys make of the table of ``kvgrpc top``."""

from __future__ import annotations

import io
from functools import reduce

import pytest
from rich.console import Console

from kvgrpc.cli.fitting import Name
from kvgrpc.cli.top import command
from kvgrpc.cli.top.arrangement import BACKSPACE, ESCAPE, RETURN, Arrangement, arranged, lines_around, pressed
from kvgrpc.cli.top.looking import COLUMNS as ALL
from kvgrpc.cli.top.looking import RankLine, cells, columns_of, fill, hit_rate
from kvgrpc.cli.top.screens import KEYS, ranks_screen
from kvgrpc.client import SyncClient
from kvgrpc.v1 import common_pb2, transfer_service_pb2
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
    assert after("j", RETURN, "r", "/") == after("j", RETURN)
    assert not after("/", "x", RETURN).opened and after("/", "x", RETURN, RETURN).opened


def test_columns_in_which_no_rank_has_a_value_are_left_out() -> None:
    values: list[object] = [None] * len(ALL)
    values[0], values[ALL.index("#GB/s")], values[ALL.index("#hits")] = "P/dp0", 1.234, 0.5
    line = RankLine(values)
    shown = columns_of([line, RankLine([None] * len(ALL))])
    assert [ALL[number] for number in shown] == ["rank", "role", "server", "health", "lease", "#GB/s", "#hits"]
    assert cells(line, shown) == ["P/dp0", None, None, None, None, "1.23", "50%"]


def test_tiers_say_how_full_they_are_and_how_often_they_had_what_was_asked_for() -> None:
    host = CacheTierUse(tier=common_pb2.TIER_HOST, pages=64, used_pages=16, counts={"hits": 6, "misses": 1})
    storage = CacheTierUse(tier=common_pb2.TIER_STORAGE, used_pages=9, counts={"misses": 1})
    assert fill([host, storage]) == "host 25 %"
    assert hit_rate([host, storage]) == 0.75
    assert hit_rate([CacheTierUse()]) is None and fill([]) == ""


@pytest.mark.parametrize("width", [40, 80, 120, 400])
@pytest.mark.parametrize("sorted_by", ["rank", "server"])
def test_a_narrow_terminal_shows_what_matters_and_the_column_that_is_sorted_by(width: int, sorted_by: str) -> None:
    rank = Name("prefill-0/dp0/pp0/cp0/tp0", "prefill-0")
    line = RankLine([rank, "prefill", "10.12.33.7:9001", *["some"] * (len(ALL) - 3)])
    shown = screen([line] * 50, Arrangement(ALL.index(sorted_by), chosen=30), width)
    assert max(map(len, shown)) <= max(width, len(KEYS))
    head = shown[2].split()
    assert {"rank", "health", sorted_by} <= set(head) and head[head.index(sorted_by) + 1] == "^"
    assert ("no room for: " in shown[-1]) == (width < 400)


def screen(ranks: list[RankLine], order: Arrangement, width: int) -> list[str]:
    console = Console(width=1000, file=io.StringIO())
    console.print(ranks_screen("registry", ranks, ranks, order, width, 20))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_rank_that_is_chosen_is_always_on_the_screen() -> None:
    assert list(lines_around(0, 50, 15)) == list(range(15))
    assert list(lines_around(30, 50, 15)) == list(range(16, 31))
    assert list(lines_around(49, 50, 15)) == list(range(35, 50))
    assert list(lines_around(0, 2, 15)) == [0, 1] and list(lines_around(3, 9, 0)) == [3]


def test_a_room_of_an_opened_rank_is_chosen_opened_and_closed_again() -> None:
    assert after(RETURN, "j", "j", "k").chosen_room == 1
    opened = after(RETURN, "j", RETURN)
    assert opened.opened and opened.room_opened and opened.chosen_room == 1
    assert after(RETURN, "j", RETURN, "j", "r", "/") == opened
    closed = after(RETURN, "j", RETURN, ESCAPE)
    assert closed.opened and not closed.room_opened
    assert after(RETURN, "j", RETURN, ESCAPE, ESCAPE) == Arrangement()


def test_a_rank_and_a_room_stay_chosen_where_others_come_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(name: str, *rooms: int) -> RankLine:
        values = [name, *[None] * (len(ALL) - 1)]
        return RankLine(values, rooms=[transfer_service_pb2.Room(room=room) for room in rooms])

    looks = [[line("P0"), line("P1", 8, 9)], [line("A"), line("P0"), line("P1", 7, 8, 9)], [line("P1", 7)]]
    monkeypatch.setattr(command, "look_at_ranks", lambda client: looks.pop(0))
    with SyncClient("127.0.0.1:1") as client:
        shown = command.Shown(client)
        for key in ("j", RETURN, "j"):
            shown.press(key)
        assert (shown.order.chosen, shown.order.chosen_room) == (1, 1)
        shown.look()
        assert (shown.order.chosen, shown.order.chosen_room, shown.order.opened) == (2, 2, True)
        shown.look()
    assert (shown.order.chosen, shown.order.chosen_room, shown.order.opened) == (0, 0, True)
