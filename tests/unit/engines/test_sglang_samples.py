"""Samples of one request are attempts of its room; SGLang's own steps with them, without SGLang."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.engines.sglang.samples import attempt_of, counting, naming_attempt, numbered


def regenerate(one: Any) -> str:
    one.rid = f"{next(NUMBERS):032x}"
    return str(one.rid)


NUMBERS = itertools.count(1)


def samples(room: int | None = 7, parallel: int = 2, ours: bool = True) -> list[str]:
    """The ids that a tokenizer process makes of one request: for the prefix cache first, then for each sample."""
    one = SimpleNamespace(rid="a", bootstrap_room=room)
    counting(lambda: ours)(one, SimpleNamespace(parallel_sample_num=parallel), 0)
    return [str(numbered(regenerate, copy.copy(one))) for _ in range(1 + parallel)]


def test_both_sides_give_the_samples_the_same_attempts() -> None:
    prefill, decode = samples(), samples()
    assert [attempt_of(rid) for rid in prefill] == [attempt_of(rid) for rid in decode] == [0, 1, 2]
    assert len({*prefill, *decode}) == 6


@pytest.mark.parametrize(
    "other", [{"room": None}, {"parallel": 1}, {"ours": False}], ids=["no room", "one sample", "another backend"]
)
def test_ids_of_other_requests_stay_sglangs(other: dict[str, Any]) -> None:
    assert all(len(rid) == 32 and attempt_of(rid) == 0 for rid in samples(**other))


@pytest.mark.parametrize("rid", [None, "", "mine", ["a-kvgrpc-sample-1"], "a-kvgrpc-sample-1-more", "a-kvgrpc-sample-"])
def test_an_id_that_is_no_samples_is_attempt_0(rid: Any) -> None:
    assert attempt_of(rid) == 0


def test_the_manager_knows_the_attempt_while_the_sender_is_made_and_no_longer() -> None:
    queue = SimpleNamespace(kv_manager=SimpleNamespace(attempt=0))
    seen = []

    def create(queue: Any, request: Any, heads: int) -> str:
        seen.append((queue.kv_manager.attempt, heads))
        if heads == 3:
            raise ValueError
        return "made"

    request = SimpleNamespace(rid="a-kvgrpc-sample-2")
    assert naming_attempt(create, queue, request, heads=2) == "made"
    with pytest.raises(ValueError):
        naming_attempt(create, queue, request, 3)
    assert (seen, queue.kv_manager.attempt) == ([(2, 2), (2, 3)], 0)


def test_another_backends_manager_is_left_alone() -> None:
    queue = SimpleNamespace(kv_manager=SimpleNamespace())
    naming_attempt(lambda queue, request: None, queue, SimpleNamespace(rid="a-kvgrpc-sample-2"))
    assert vars(queue.kv_manager) == {}
