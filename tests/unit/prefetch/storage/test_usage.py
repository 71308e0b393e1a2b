"""Which pages make room, and how much is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.prefetch.storage.file.folder import BLOCK, TOUCH_SECONDS, Usage


def test_what_was_not_used_for_longest_goes_first() -> None:
    usage = Usage(3 * BLOCK)
    for now, name in enumerate("abc"):
        assert usage.reserve(name, BLOCK, now) == []
    usage.used("a", BLOCK, 3)
    assert usage.reserve("d", BLOCK, 4) == ["b"]
    assert usage.reserve("e", 2 * BLOCK, 5) == ["c", "a"]


def test_a_page_larger_than_all_there_is_evicts_nothing() -> None:
    usage = Usage(2 * BLOCK)
    usage.reserve("a", BLOCK, 0)
    assert usage.reserve("b", 3 * BLOCK, 1) is None
    assert usage.nbytes == BLOCK


def test_writing_a_page_again_counts_it_once() -> None:
    usage = Usage(2 * BLOCK)
    assert usage.reserve("a", BLOCK, 0) == usage.reserve("a", BLOCK, 1) == []
    assert (usage.nbytes, len(usage)) == (BLOCK, 1)


def test_a_file_is_touched_once_a_minute() -> None:
    usage = Usage(None)
    usage.reserve("a", 1, 1000.0)
    assert [usage.used("a", 1, 1000 + after) for after in (1, TOUCH_SECONDS + 1, TOUCH_SECONDS + 2)] == [
        False,
        True,
        False,
    ]
    assert usage.used("of another process", 1, 2000.0)


def test_a_scan_keeps_the_order_of_use_and_what_was_written_meanwhile() -> None:
    usage = Usage(3 * BLOCK)
    for now, name in enumerate("abc"):
        usage.reserve(name, BLOCK, now)
    usage.used("a", BLOCK, 10)
    usage.reserve("d", BLOCK, 21)  # evicts b
    usage.replace({"a": (BLOCK, 0.0), "c": (BLOCK, 2.0), "x": (BLOCK, 5.0)}, began=20)
    assert usage.nbytes == 4 * BLOCK
    assert usage.excess() == ["c"]
    assert usage.reserve("e", BLOCK, 30) == ["x"]


@given(st.lists(st.tuples(st.sampled_from("rud"), st.integers(0, 9), st.integers(1, 3 * BLOCK)), max_size=60))
def test_the_bound_holds_and_the_sum_is_right(steps: list[tuple[str, int, int]]) -> None:
    usage = Usage(5 * BLOCK)
    there: dict[str, int] = {}
    for now, (what, number, nbytes) in enumerate(steps):
        name, blocks = str(number), -(-nbytes // BLOCK) * BLOCK
        if what == "d":
            usage.remove(name)
            there.pop(name, None)
        elif what == "u" and name in there:
            usage.used(name, there[name], now)
        elif what == "r":
            gone = usage.reserve(name, nbytes, now)
            there.pop(name, None)
            for each in gone or ():
                del there[each]
            there[name] = blocks
        assert usage.nbytes == sum(there.values()) <= 5 * BLOCK
        assert len(usage) == len(there)
