"""Numbers are taken where batches are published; a full queue leaves a hole and a clear, never a blocked engine."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.events.log.batch_queue import BatchQueue, QueuedClear
from kvgrpc.events.log.journal import DroppedRange


def numbered(queue: BatchQueue) -> list[tuple[int, object]]:
    """What is taken, each item with the number that it has."""
    taken = queue.take(0)
    result, sequence = [], taken.first
    for item in taken.items:
        result.append((sequence, item))
        sequence = item.last + 1 if isinstance(item, DroppedRange) else sequence + 1
    return result


def test_numbers_follow_each_other_over_takes() -> None:
    queue = BatchQueue(10)
    assert queue.put("a")
    assert queue.put("b")
    assert numbered(queue) == [(0, "a"), (1, "b")]
    queue.put("c")
    assert queue.next_sequence == 3
    assert numbered(queue) == [(2, "c")]


def test_full_is_one_hole_followed_by_a_clear() -> None:
    queue = BatchQueue(2)
    assert [queue.put(name) for name in "abcd"] == [True, True, False, False]
    assert numbered(queue) == [(0, "a"), (1, "b"), (2, DroppedRange(2, 3, "queue_full")), (4, QueuedClear.CLEAR)]
    assert queue.dropped == 2


def test_what_was_taken_counts_until_it_is_settled() -> None:
    queue = BatchQueue(2)
    queue.put("a")
    queue.put("b")
    queue.take(0)
    assert not queue.put("c")
    queue.settle(2)
    assert queue.unsent == 2
    assert queue.put("d")
    assert numbered(queue) == [(2, DroppedRange(2, 2, "queue_full")), (3, QueuedClear.CLEAR), (4, "d")]


def test_an_owed_clear_takes_the_next_number() -> None:
    queue = BatchQueue(10)
    queue.put("a")
    queue.drop(1)
    queue.put("b")
    assert numbered(queue) == [(0, "a"), (1, QueuedClear.CLEAR), (2, "b")]


def test_an_owed_clear_needs_no_further_batch() -> None:
    queue = BatchQueue(10)
    queue.drop(1)
    assert queue.unsent == 1
    assert numbered(queue) == [(0, QueuedClear.CLEAR)]
    assert numbered(queue) == []


def test_closed_refuses_and_counts_but_hands_out_what_was_put() -> None:
    queue = BatchQueue(10)
    queue.put("a")
    queue.close()
    assert not queue.put("b")
    assert (queue.refused, queue.next_sequence) == (1, 1)
    assert numbered(queue) == [(0, "a")]


def test_abandoned_in_a_forked_child_it_refuses_even_where_its_lock_was_held() -> None:
    queue = BatchQueue(10)
    queue._lock.acquire()  # by a thread that the child does not have
    queue.abandon()
    assert not queue.put("a") and queue.refused == 1


def test_a_put_wakes_the_reader() -> None:
    queue = BatchQueue(10)
    threading.Timer(0.05, queue.put, ("a",)).start()
    began = time.monotonic()
    while not (items := queue.take(10).items):
        assert time.monotonic() - began < 5
    assert list(items) == ["a"]
    assert time.monotonic() - began < 5


def test_closing_wakes_the_reader() -> None:
    queue = BatchQueue(10)
    threading.Timer(0.05, queue.close).start()
    began = time.monotonic()
    assert not queue.take(10).items
    assert time.monotonic() - began < 5


def test_a_new_one_has_nothing_and_took_nothing() -> None:
    queue = BatchQueue(10)
    assert (queue.accepted, queue.dropped, queue.refused, queue.unsent, queue.next_sequence) == (0, 0, 0, 0, 0)
    assert queue.idle and not queue.closed and numbered(queue) == []
    assert numbered(BatchQueue(10, clear_first=True)) == [(0, QueuedClear.CLEAR)]


def test_it_counts_what_it_took_and_what_it_did_not() -> None:
    queue = BatchQueue(2)
    for name in "abcd":
        queue.put(name)
    assert (queue.accepted, queue.dropped, queue.unsent, queue.idle) == (2, 2, 4, False)
    queue.drop(3)
    queue.close()
    queue.put("e")
    queue.put("f")
    assert (queue.accepted, queue.dropped, queue.refused, queue.closed) == (2, 5, 2, True)


@pytest.mark.parametrize("what", ["a batch", "a clear", "its end"])
def test_a_reader_waits_for_nothing_that_is_there_already(what: str) -> None:
    queue = BatchQueue(10, clear_first=what == "a clear")
    if what == "a batch":
        queue.put("a")
    elif what == "its end":
        queue._closed = True  # as abandon leaves it, without a word to the reader
    began = time.monotonic()
    assert bool(queue.take(10).items) is (what != "its end")
    assert time.monotonic() - began < 5


def test_a_reader_of_an_empty_queue_waits_and_does_not_turn_in_a_circle() -> None:
    queue = BatchQueue(10)
    began = time.monotonic()
    assert not queue.take(0.05).items
    assert time.monotonic() - began >= 0.049


def test_a_reader_that_waits_has_done_with_what_it_took() -> None:
    queue = BatchQueue(1)
    queue.put("a")
    queue.take(0)
    threading.Timer(0.05, queue.put, ("b",)).start()
    began = time.monotonic()
    while not (items := queue.take(10).items):
        assert time.monotonic() - began < 5
    assert list(items) == ["b"]


def test_what_waits_can_be_forgotten_and_the_reader_hears_of_it() -> None:
    queue = BatchQueue(10)
    queue.put("a")
    queue.drop(1)
    queue.discard()
    assert (queue.unsent, queue.closed, queue.put("b")) == (0, True, False)
    waiting = BatchQueue(10)
    threading.Timer(0.05, waiting.discard).start()
    began = time.monotonic()
    assert not waiting.take(10).items
    assert time.monotonic() - began < 5


@given(st.integers(1, 4), st.lists(st.sampled_from(["put", "take", "settle", "fail"]), max_size=60))
def test_every_number_is_told_once_and_each_hole_is_cleared(limit: int, steps: list[str]) -> None:
    queue, told = BatchQueue(limit), []
    published = 0
    for step in [*steps, "take", "take"]:
        if step == "put":
            published += 1
            queue.put(published)
        elif step == "take":
            told += numbered(queue)
        elif step == "settle":
            queue.settle(queue._taken)
        else:
            queue.drop(1)
        # Beyond the limit: two clears and a hole among what was taken, a hole and a clear after it.
        assert queue.unsent <= limit + 5
    expected = 0
    for position, (sequence, item) in enumerate(told):
        assert sequence == expected
        expected = item.last + 1 if isinstance(item, DroppedRange) else sequence + 1
        if isinstance(item, DroppedRange):
            assert told[position + 1][1] is QueuedClear.CLEAR
    assert expected == queue.next_sequence
    batches = [item for _, item in told if isinstance(item, int)]
    holes = [item.last - item.first + 1 for _, item in told if isinstance(item, DroppedRange)]
    assert batches == sorted(batches)
    assert len(batches) + sum(holes) == published


def test_many_threads_share_one_numbering() -> None:
    queue = BatchQueue(10_000)
    threads = [threading.Thread(target=lambda: [queue.put(n) for n in range(1_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queue.take(0).items) == queue.next_sequence == 4_000
