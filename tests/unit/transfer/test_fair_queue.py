"""Peers take turns for the transfer thread, whatever one of them asks for."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.transfer.runtime.writing.queues import SubmissionQueue


class Submission:
    """As much of one as the queue looks at."""

    def __init__(self, pair: int) -> None:
        self.pair: Any = pair


def submissions(*pairs: int) -> list[Any]:
    return [Submission(pair) for pair in pairs]


def test_one_peer_alone_has_the_whole_turn() -> None:
    queue, all_of_it = SubmissionQueue(), submissions(*[1] * 300)
    queue.extend(all_of_it)
    assert queue.take(256) == all_of_it[:256] and queue.take(256) == all_of_it[256:] and not queue


def test_what_a_peer_does_not_need_of_its_share_the_others_get() -> None:
    queue = SubmissionQueue()
    queue.extend(submissions(*[1] * 100, 2))
    taken = queue.take(10)
    assert Counter(each.pair for each in taken) == {1: 9, 2: 1}


def test_with_more_peers_than_a_turn_has_places_all_have_had_one_before_any_has_two() -> None:
    queue = SubmissionQueue()
    for _ in range(3):
        queue.extend(submissions(*range(10)))
    taken = [each.pair for _ in range(3) for each in queue.take(4)]
    assert taken[:10] == list(range(10))


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 8)), max_size=20))
def test_each_is_taken_once_in_the_order_of_its_peer_and_no_turn_wastes_a_place(
    steps: list[tuple[list[int], int]],
) -> None:
    queue, waiting, said, taken = SubmissionQueue(), 0, defaultdict(list), defaultdict(list)
    for pairs, most in steps:
        added = submissions(*pairs)
        for each in added:
            said[each.pair].append(each)
        queue.extend(added)
        waiting += len(added)
        turn = queue.take(most)
        assert len(turn) == min(most, waiting)
        waiting -= len(turn)
        assert len(queue) == waiting
        for each in turn:
            taken[each.pair].append(each)
    while queue:
        for each in queue.take(3):
            taken[each.pair].append(each)
    assert taken == said
