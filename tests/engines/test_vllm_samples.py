"""Samples of one request (``n`` above 1) in the scheduler's half of the connector, with vLLM's own requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request, RequestStatus

from kvgrpc.engines.vllm.groups import Group
from kvgrpc.engines.vllm.scheduler import Scheduler

TOKENS = 40
ONE_GROUP = (Group(0, "kv", 16, False),)
AT_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
AT_DECODE: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "transfer_id": "x",
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
}


def blocks(*numbers: int) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(number) for number in numbers],))


def samples(params: dict[str, Any], count: int = 2, number: str = "7-0a1b2c3d") -> list[Request]:
    """As vLLM makes them, each with parameters of its own."""
    sampling = SamplingParams(n=count, max_tokens=1, temperature=1.0, extra_args={"kv_transfer_params": params})
    asked = EngineCoreRequest(
        request_id=number,
        external_req_id="7",
        prompt_token_ids=list(range(TOKENS)),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    parent, made = ParentRequest(asked), []
    for index in range(count):
        name, own = parent.get_child_info(index)
        own = own.clone()
        own.extra_args = {"kv_transfer_params": dict(params)}
        made.append(Request(name, list(range(TOKENS)), own, None))
    return made


def test_at_decode_the_others_wait_for_the_prompt_of_the_first() -> None:
    scheduler, (first, second) = Scheduler(False, ONE_GROUP), samples(AT_DECODE)
    scheduler.on_new(first)
    scheduler.on_new(second)
    assert list(scheduler.take().queued) == [first.request_id]
    assert scheduler.tokens_elsewhere(second, computed=0) is None
    assert scheduler.tokens_elsewhere(first, computed=0) == TOKENS
    scheduler.on_blocks(first, blocks(1, 2, 3), elsewhere=TOKENS)
    assert scheduler.tokens_elsewhere(second, computed=0) is None
    scheduler.on_output((), (), [first.request_id])
    assert scheduler.tokens_elsewhere(second, computed=0) == 0
    scheduler.on_blocks(second, blocks(1, 2, 4), elsewhere=0)
    assert list(scheduler.take().receives) == [first.request_id]


@pytest.mark.parametrize("ends", ["aborted", "held already"])
def test_nobody_waits_for_a_prompt_that_does_not_come(ends: str) -> None:
    scheduler, (first, second) = Scheduler(False, ONE_GROUP), samples(AT_DECODE)
    scheduler.on_new(first)
    scheduler.on_new(second)
    if ends == "aborted":
        first.status = RequestStatus.FINISHED_ABORTED
        scheduler.on_finished(first, ([],))
    else:
        scheduler.on_blocks(first, blocks(1, 2, 3), elsewhere=0)
    assert scheduler.tokens_elsewhere(second, computed=0) == 0


@pytest.mark.parametrize(("prefill", "params"), [(True, AT_PREFILL), (False, AT_DECODE)], ids=["prefill", "decode"])
def test_a_sample_at_another_engine_core_than_the_first_is_a_request_of_the_same_hand_off(
    prefill: bool, params: dict[str, Any]
) -> None:
    """So the later one ends ROOM_CONFLICT (tests/unit/transfer: a second sender, and another decode, of a room)."""
    asked: list[str] = []
    for sample in samples(params):
        core = Scheduler(prefill, ONE_GROUP)
        core.on_new(sample)
        core.on_blocks(sample, blocks(1, 2, 3), TOKENS * (not prefill))
        said = core.take()
        asked += said.announced.values() if prefill else [wanted.transfer_id for wanted in said.receives.values()]
    assert asked == ["x", "x"]


@pytest.mark.parametrize("named", [True, False], ids=["the proxy names the hand-off", "prefill names it"])
def test_prefill_hands_over_the_first_and_each_answers_with_its_hand_off(named: bool) -> None:
    scheduler = Scheduler(True, ONE_GROUP)
    made = samples({**AT_PREFILL, "transfer_id": "x" if named else None}, count=3)
    for each in made:
        scheduler.on_new(each)
    for each in made:
        scheduler.on_blocks(each, blocks(4, 5, 6), 0)
        each.status = RequestStatus.FINISHED_LENGTH_CAPPED
    ended = [scheduler.on_finished(each, ([4, 5, 6],)) for each in made]
    assert [keeps for keeps, _ in ended] == [True, False, False]
    said, first = scheduler.take(), made[0].request_id
    assert (list(said.announced), list(said.computed), said.dropped) == ([first], [first], {})
    assert {answer["transfer_id"] for _, answer in ended if answer} == {said.announced[first]}
    assert all(answer and answer["do_remote_prefill"] for _, answer in ended)


def test_requests_whose_clients_call_them_alike_are_no_samples() -> None:
    scheduler = Scheduler(False, ONE_GROUP)
    for name in ("0_x-11111111", "1_x-22222222"):
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": dict(AT_DECODE)})
        scheduler.on_new(Request(name, list(range(TOKENS)), sampling, None))
    assert list(scheduler.take().queued) == ["0_x-11111111", "1_x-22222222"]


def test_two_connectors_that_answer_proxies_of_two_steps_are_more_than_vllm_allows() -> None:
    """Ours inside MultiConnector beside NIXL's, which answers with these names among others."""
    prefill, (asked,) = Scheduler(True, ONE_GROUP), samples(AT_PREFILL, count=1)
    prefill.on_new(asked)
    prefill.on_blocks(asked, blocks(1, 2, 3), 0)
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    theirs = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "n", "remote_block_ids": [[1]]}
    ours = prefill.on_finished(asked, ([1, 2, 3],))
    both = [SimpleNamespace(request_finished=lambda *_, said=said: said) for said in (ours, (True, theirs))]
    vllms = object.__new__(MultiConnector)
    vars(vllms).update(_connectors=both, _requests_to_connector={}, _extra_async_saves={})
    with pytest.raises(RuntimeError, match="Key clash in kv_transfer_params"):
        vllms.request_finished(asked, [1, 2, 3])
