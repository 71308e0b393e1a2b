"""What an index computes for one question leaves the loop to the others, and the answer is the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from kvgrpc.client import sglang_hashes, vllm_hashes
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.index_servicer import ON_THE_LOOP_TOKENS, IndexServicer
from kvgrpc.events.following.sources import NO_LABELS, CacheScore, LabelSet, Question, SourcesPage, Wanted
from kvgrpc.observability import metrics
from kvgrpc.rpc.callers import CALLER, Caller
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.scoring import question

TOKENS = [token * 7919 % 130_000 for token in range(ON_THE_LOOP_TOKENS)]


class Asked:
    """An index that follows nobody, and notes which blocks it was asked for."""

    def __init__(self) -> None:
        self.hashes: list[list[int]] = []

    def ask(self, question: Question, wanted: Wanted) -> list[CacheScore]:
        self.hashes += map(list, question.chains.values())
        return []

    def plan_in_steps(self, questions: Any, wanted: Wanted, *, reserve: bool = False) -> Generator[Any, None, None]:
        return ([] for _ in questions)

    def page_sizes(
        self, wanted: Wanted, model: str = "", field: str = "model", labels: LabelSet = NO_LABELS
    ) -> set[int]:
        return {4, 16}

    def page_in_steps(self, page: SourcesPage, **more: Any) -> Iterator[None]:
        return iter(())

    def not_followed(self) -> list[str]:
        return []


async def score(servicer: IndexServicer, request: pb.ScoreRequest) -> pb.ScoreResponse:
    context: Any = None
    return await servicer.Score(request, context)


def sglang(**more: Any) -> tuple[pb.ScoreRequest, list[int]]:
    prompt = pb.SglangPrompt(token_ids=TOKENS, page_tokens=1, cache_salt="s", **more)
    return question(sglang=prompt), sglang_hashes(TOKENS, 1, cache_salt="s", **more)


def vllm(size: int, algorithm: str) -> tuple[pb.ScoreRequest, list[int]]:
    more: Any = {"hash_seed": "0", "algorithm": algorithm, "cache_salt": "s"}
    prompt = pb.VllmPrompt(token_ids=TOKENS, page_tokens=size, lora=pb.LoraAdapter(name="l", path="/l"), **more)
    return question(vllm=prompt), vllm_hashes(TOKENS, size, lora=("l", "/l"), **more)


@pytest.mark.parametrize(
    ("request_", "hashes"),
    [sglang(), sglang(bigram=True), vllm(1, "sha256"), vllm(1, "sha256_cbor"), vllm(16, "sha256_cbor")],
)
async def test_the_longest_prompt_of_the_loop_takes_many_turns_of_it(
    request_: pb.ScoreRequest, hashes: list[int]
) -> None:
    """In one turn it takes 20 to 70 ms; sessions of the same process say each 300 ms that they live."""
    index = Asked()
    servicer, turns = IndexServicer(index), 0
    asking = asyncio.ensure_future(score(servicer, request_))
    while not asking.done():
        turns += 1
        await asyncio.sleep(0)
    servicer.close()
    assert asking.result().prompts[0].blocks == len(hashes) and index.hashes == [hashes]
    assert turns > 3


async def test_long_prompts_take_turns_and_a_short_one_waits_for_none() -> None:
    index = Asked()
    servicer, (long, hashes) = IndexServicer(index), vllm(1, "sha256_cbor")
    asking = [asyncio.ensure_future(score(servicer, long)) for _ in range(4)]
    await asyncio.sleep(0)  # each begins
    await score(servicer, question(vllm=pb.VllmPrompt(token_ids=TOKENS[:16], page_tokens=16)))
    assert len(index.hashes) == 1, "it was before the four"
    longest = [await longest_turn_of(asking)]
    assert index.hashes[1:] == [hashes] * 4
    # A turn that is long by itself is so each time; one in which all garbage was looked for is not.
    while min(longest) >= 0.06 and len(longest) < 3:
        longest.append(await longest_turn_of([asyncio.ensure_future(score(servicer, long)) for _ in range(4)]))
    servicer.close()
    assert min(longest) < 0.06, "the longest turn, in which four of them had none of their 70 ms"


async def longest_turn_of(asking: Sequence[asyncio.Future[pb.ScoreResponse]]) -> float:
    """In CPU time of this thread, until all are answered."""
    longest, before = 0.0, time.thread_time()
    while not all(each.done() for each in asking):
        await asyncio.sleep(0)
        longest, before = max(longest, time.thread_time() - before), time.thread_time()
    return longest


async def test_however_many_long_prompts_one_caller_asks_another_has_every_second_turn() -> None:
    """They came one after the other: whoever asked a ninth waited for eight."""
    servicer, (long, _) = IndexServicer(Asked()), vllm(1, "sha256_cbor")

    async def ask(name: str) -> None:
        CALLER.set(Caller(name))
        await score(servicer, long)

    greedy = [asyncio.ensure_future(ask("greedy")) for _ in range(8)]
    await asyncio.sleep(0)  # each begins
    await asyncio.ensure_future(ask("other"))
    assert not any(each.done() for each in greedy)
    await asyncio.gather(*greedy)
    servicer.close()


async def test_blocks_too_long_for_a_turn_are_hashed_on_threads() -> None:
    index = Asked()
    servicer, (request, hashes) = IndexServicer(index), vllm(ON_THE_LOOP_TOKENS, "sha256_cbor")
    asking = asyncio.ensure_future(score(servicer, request))
    await asyncio.sleep(0)
    assert servicer._large._places.count == 1
    assert (await asking).prompts[0].blocks == 1 and index.hashes == [hashes]
    servicer.close()


async def test_what_is_no_question_is_refused_before_any_hash() -> None:
    servicer = IndexServicer(Asked())
    for request, field in (
        (question(), "prompts[0].prefix"),
        (question(vllm=pb.VllmPrompt(token_ids=[1], page_tokens=1, algorithm="md5")), "prompts[0].vllm.algorithm"),
        (question(hashes=range(65_537)), "prompts[0].block_hashes.values"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await score(servicer, request)
        assert refused.value.metadata["field"] == field
    servicer.close()


async def test_prompts_and_those_that_nobody_holds_are_counted() -> None:
    def counts() -> tuple[float | None, float | None]:
        sample = metrics.REGISTRY.get_sample_value
        return sample("kvgrpc_index_prompts_total"), sample("kvgrpc_index_prompt_misses_total")

    servicer, before = IndexServicer(Asked()), counts()
    await score(servicer, pb.ScoreRequest(prompts=question(hashes=[1]).prompts[:] * 3))
    servicer.close()
    assert counts() == tuple((each or 0) + 3 for each in before)


async def test_a_prompt_that_leaves_sizes_open_is_hashed_for_each() -> None:
    index = Asked()
    servicer = IndexServicer(index)
    answer = await score(servicer, question(sglang=pb.SglangPrompt(token_ids=TOKENS[:64])))
    servicer.close()
    assert index.hashes == [sglang_hashes(TOKENS[:64], 4), sglang_hashes(TOKENS[:64], 16)]
    assert answer.prompts[0].blocks == 16
