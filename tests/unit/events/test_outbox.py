"""Numbers are taken where batches are published; a full outbox leaves a hole and a clear, never a blocked engine."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.events.journal import Dropped
from kvgrpc.events.outbox import Clear, Outbox


def numbered(outbox: Outbox) -> list[tuple[int, object]]:
    """What is taken, each item with the number that it has."""
    taken = outbox.take(0)
    result, sequence = [], taken.first
    for item in taken.items:
        result.append((sequence, item))
        sequence = item.last + 1 if isinstance(item, Dropped) else sequence + 1
    return result


def test_numbers_follow_each_other_over_takes() -> None:
    outbox = Outbox(10)
    assert outbox.put("a")
    assert outbox.put("b")
    assert numbered(outbox) == [(0, "a"), (1, "b")]
    outbox.put("c")
    assert outbox.next_sequence == 3
    assert numbered(outbox) == [(2, "c")]


def test_full_is_one_hole_followed_by_a_clear() -> None:
    outbox = Outbox(2)
    assert [outbox.put(name) for name in "abcd"] == [True, True, False, False]
    assert numbered(outbox) == [(0, "a"), (1, "b"), (2, Dropped(2, 3, "queue_full")), (4, Clear.CLEAR)]
    assert outbox.dropped == 2


def test_what_was_taken_counts_until_it_is_settled() -> None:
    outbox = Outbox(2)
    outbox.put("a")
    outbox.put("b")
    outbox.take(0)
    assert not outbox.put("c")
    outbox.settle(2)
    assert outbox.unsent == 2
    assert outbox.put("d")
    assert numbered(outbox) == [(2, Dropped(2, 2, "queue_full")), (3, Clear.CLEAR), (4, "d")]


def test_an_owed_clear_takes_the_next_number() -> None:
    outbox = Outbox(10)
    outbox.put("a")
    outbox.owe_clear()
    outbox.put("b")
    assert numbered(outbox) == [(0, "a"), (1, Clear.CLEAR), (2, "b")]


def test_an_owed_clear_needs_no_further_batch() -> None:
    outbox = Outbox(10)
    outbox.owe_clear()
    assert outbox.unsent == 1
    assert numbered(outbox) == [(0, Clear.CLEAR)]
    assert numbered(outbox) == []


def test_closed_refuses_and_counts_but_hands_out_what_was_put() -> None:
    outbox = Outbox(10)
    outbox.put("a")
    outbox.close()
    assert not outbox.put("b")
    assert (outbox.refused, outbox.next_sequence) == (1, 1)
    assert numbered(outbox) == [(0, "a")]


def test_a_put_wakes_the_reader() -> None:
    outbox = Outbox(10)
    threading.Timer(0.05, outbox.put, ("a",)).start()
    began = time.monotonic()
    while not (items := outbox.take(10).items):
        assert time.monotonic() - began < 5
    assert list(items) == ["a"]
    assert time.monotonic() - began < 5


def test_closing_wakes_the_reader() -> None:
    outbox = Outbox(10)
    threading.Timer(0.05, outbox.close).start()
    began = time.monotonic()
    assert not outbox.take(10).items
    assert time.monotonic() - began < 5


@given(st.integers(1, 4), st.lists(st.sampled_from(["put", "take", "settle", "fail"]), max_size=60))
def test_every_number_is_told_once_and_each_hole_is_cleared(limit: int, steps: list[str]) -> None:
    outbox, told = Outbox(limit), []
    published = 0
    for step in [*steps, "take", "take"]:
        if step == "put":
            published += 1
            outbox.put(published)
        elif step == "take":
            told += numbered(outbox)
        elif step == "settle":
            outbox.settle(outbox._taken)
        else:
            outbox.owe_clear()
        # Beyond the limit: two clears and a hole among what was taken, a hole and a clear after it.
        assert outbox.unsent <= limit + 5
    expected = 0
    for position, (sequence, item) in enumerate(told):
        assert sequence == expected
        expected = item.last + 1 if isinstance(item, Dropped) else sequence + 1
        if isinstance(item, Dropped):
            assert told[position + 1][1] is Clear.CLEAR
    assert expected == outbox.next_sequence
    batches = [item for _, item in told if isinstance(item, int)]
    holes = [item.last - item.first + 1 for _, item in told if isinstance(item, Dropped)]
    assert batches == sorted(batches)
    assert len(batches) + sum(holes) == published


def test_many_threads_share_one_numbering() -> None:
    outbox = Outbox(10_000)
    threads = [threading.Thread(target=lambda: [outbox.put(n) for n in range(1_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outbox.take(0).items) == outbox.next_sequence == 4_000
