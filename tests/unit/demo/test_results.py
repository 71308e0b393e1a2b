"""The demo says OK only when everything was equal, and else the first thing that was not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvgrpc.demo.event_check import EventResult
from kvgrpc.demo.prompts import Prompt
from kvgrpc.demo.protocol import AnswerToken, Finished, Prefilled, Received, RoomFailed
from kvgrpc.demo.results import CacheResult, DemoResult, PromptResult, note


def a_result() -> DemoResult:
    """One prompt of two pages, all of it equal."""
    prompt = PromptResult(Prompt("title", (256, 65)), room=7)
    for kind, message in (
        ("prefill", Prefilled(7, reused_pages=0, compute_seconds=0.1, sent_at=10.0)),
        ("decode", Received(7, pages=2, reused_pages=0, received_at=10.5, digest="d")),
        ("decode", AnswerToken(7, 1)),
        ("decode", AnswerToken(7, 2)),
        ("decode", Finished(7)),
        ("reference", AnswerToken(7, 1)),
        ("reference", AnswerToken(7, 2)),
        ("reference", Finished(7, digest="d")),
    ):
        note(prompt, kind, message)
    return DemoResult("shm", [prompt], [EventResult("prefill", 3)], page_bytes=100, written_bytes=200, seconds=1.0)


def test_all_equal_is_ok() -> None:
    result = a_result()
    assert result.difference == ""
    assert result.summary.startswith("kvgrpc demo: OK (1 prompts, 2 tokens")
    assert result.as_json()["ok"] is True
    assert result.prompts[0].handoff_seconds == 0.5


def test_what_did_not_come_has_no_time_and_is_not_equal() -> None:
    """A process that dies ends the demo with prompts that nobody has answered."""
    prompt = PromptResult(Prompt("title", (256, 65)), room=7, asked_at=1e6, sent_at=1e6)
    result = DemoResult("shm", [prompt], problem="the decode process ended")
    (told,) = result.as_json()["prompts"]
    assert (told["equal"], told["handoffSeconds"], told["firstTokenSeconds"]) == (False, None, None)
    assert "not answered" in told["difference"]


def set_token(result: DemoResult) -> None:
    result.prompts[0].tokens[1] = 3


def cut_token(result: DemoResult) -> None:
    del result.prompts[0].tokens[1:]


def set_digest(result: DemoResult) -> None:
    result.prompts[0].digest = "e"


def lose_bytes(result: DemoResult) -> None:
    result.written_bytes = 100


def set_event(result: DemoResult) -> None:
    result.events = [EventResult("decode", difference="2 batches came live, 3 were replayed")]


def fail_room(result: DemoResult) -> None:
    note(result.prompts[0], "decode", RoomFailed(7, "PEER_LOST", "prefill is gone"))
    note(result.prompts[0], "prefill", RoomFailed(7, "ROOM_CANCELLED", "later"))


def went_through_storage(result: DemoResult) -> CacheResult:
    found = {"found_after": (0, 0, 3), "prefetched_pages": 3, "loaded_pages": 3, "asked_pages": 3}
    cache = CacheResult("title", [1, 2], 3, 3, tokens=[1, 2], **found)  # type: ignore[arg-type]
    result.cache = cache
    return cache


def lose_a_page(result: DemoResult) -> None:
    went_through_storage(result).prefetched_pages = 2


def leave_a_page(result: DemoResult) -> None:
    went_through_storage(result).found_after = (0, 1, 3)


def find_too_few(result: DemoResult) -> None:
    went_through_storage(result).asked_pages = 4


def answer_otherwise(result: DemoResult) -> None:
    went_through_storage(result).tokens = [1, 3]


def meet_problem(result: DemoResult) -> None:
    result.problem = "the prefill process ended"


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (set_token, "prompt 1: token 2 differs from the single process"),
        (cut_token, "prompt 1: token 2 differs from the single process"),
        (set_digest, "prompt 1: the KV cache that arrived differs from the single process's"),
        (lose_bytes, "100 bytes were written, the pages that arrived have 200"),
        (set_event, "events of decode: 2 batches came live, 3 were replayed"),
        (fail_room, "prompt 1: decode says PEER_LOST: prefill is gone"),
        (lose_a_page, "storage: of 3 pages 3 were stored, 3 found, 2 prefetched and 3 loaded"),
        (leave_a_page, "storage: pages were left on device or host after they were dropped"),
        (find_too_few, "storage: of 4 pages of the prompt only 3 were found"),
        (answer_otherwise, "storage: token 2 differs from the first answer"),
        (meet_problem, "the prefill process ended"),
    ],
)
def test_anything_unequal_is_a_failure_that_says_what(spoil: Callable[[DemoResult], None], difference: str) -> None:
    result = a_result()
    spoil(result)
    assert result.difference == difference
    assert result.summary == f"kvgrpc demo: FAILED ({difference})"
    assert result.as_json()["ok"] is False


def test_a_conversation_that_went_through_storage_unchanged_is_well() -> None:
    result = a_result()
    went_through_storage(result)
    assert result.difference == ""
