"""The scheduler's half of the connector, with vLLM's own requests and blocks, and no engine."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

import kvgrpc.engines.vllm
from kvgrpc.engines.compatibility import HAND_OFFS, VLLM
from kvgrpc.engines.vllm.groups import Group
from kvgrpc.engines.vllm.handoffs import Handoffs, Receive, Send
from kvgrpc.engines.vllm.scheduler import DECODE, UNUSED, Scheduler
from kvgrpc.engines.vllm.stats import TransferMetrics, TransferStats
from kvgrpc.errors import FeatureDisabled

BLOCK = 16
ONE_GROUP = (Group(0, "kv", BLOCK, False),)
# As vLLM numbers them: one of windows, whose blocks are twice as large, before the other.
TWO_GROUPS = (Group(1, "kv", BLOCK, False), Group(0, "swa-1", 2 * BLOCK, True))
# States: vLLM has a block for each BLOCK tokens, of which those that are not the last are none.
WITH_STATES = (Group(0, "kv", BLOCK, False), Group(1, "state-1", BLOCK, False, True))
AT_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
AT_DECODE: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "transfer_id": "x",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
}


def request(params: dict[str, Any] | None, tokens: int = 40) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args=None if params is None else {"kv_transfer_params": dict(params)})
    return Request("r", list(range(tokens)), sampling, None)


def blocks(*numbers: int) -> KVCacheBlocks:
    return blocks_of_groups(numbers)


def blocks_of_groups(*groups: Sequence[int]) -> KVCacheBlocks:
    return KVCacheBlocks(tuple([KVCacheBlock(number) for number in numbers] for numbers in groups))


def finished(params: dict[str, Any], status: RequestStatus) -> Request:
    done = request(params)
    done.status = status
    return done


def test_decode_takes_the_blocks_behind_those_that_it_holds() -> None:
    scheduler, wanted = Scheduler(False, ONE_GROUP), request(AT_DECODE)
    assert scheduler.tokens_elsewhere(wanted, computed=16) == 24
    scheduler.on_blocks(wanted, blocks(5, 9, 7, 8), elsewhere=24)  # 8 is for tokens to come
    assert scheduler.take().receives == {"r": Receive("x", AT_DECODE["remote_bootstrap_addr"], "e", {"kv": (9, 7)}, 1)}


def test_with_windows_decode_takes_of_each_group_what_its_next_token_will_see() -> None:
    scheduler, wanted = Scheduler(False, TWO_GROUPS), request(AT_DECODE, tokens=5 * BLOCK + 1)
    assert scheduler.tokens_elsewhere(wanted, computed=BLOCK) == 4 * BLOCK  # it computes the last token itself
    given = blocks_of_groups([0, 21, 22], [11, 12, 13, 14, 15, 16])  # 0: no block; 16 is for tokens to come
    scheduler.on_blocks(wanted, given, elsewhere=4 * BLOCK)
    receive = scheduler.take().receives["r"]
    assert (receive.pages, receive.first_page) == ({"kv": (12, 13, 14, 15), "swa-1": (21, 22)}, 1)


def test_with_windows_a_prompt_that_decode_holds_but_for_its_last_token_needs_nothing() -> None:
    scheduler, wanted = Scheduler(False, TWO_GROUPS), request(AT_DECODE, tokens=2 * BLOCK + 1)
    assert scheduler.tokens_elsewhere(wanted, computed=2 * BLOCK) == 0
    scheduler.on_blocks(wanted, blocks_of_groups([0, 21], [11, 12, 13]), elsewhere=0)
    receive = scheduler.take().receives["r"]
    assert (receive.pages, receive.first_page) == ({}, 2)


def test_with_states_decode_takes_the_one_behind_all_tokens_but_the_last() -> None:
    scheduler, wanted = Scheduler(False, WITH_STATES), request(AT_DECODE, tokens=3 * BLOCK + 1)
    assert scheduler.tokens_elsewhere(wanted, computed=BLOCK) == 2 * BLOCK
    given = blocks_of_groups([11, 12, 13], [31, 0, 32])  # 31: the state that it holds already
    scheduler.on_blocks(wanted, given, elsewhere=2 * BLOCK)
    receive = scheduler.take().receives["r"]
    assert (receive.pages, receive.first_page) == ({"kv": (12, 13), "state-1": (32,)}, 1)


@pytest.mark.parametrize(
    ("tokens", "own", "pages"),
    [
        (1, ([11], [31]), {"kv": (), "state-1": ()}),
        (2, ([11], [31]), {"kv": (11,), "state-1": (31,)}),
        (BLOCK + 1, ([11], [31]), {"kv": (11,), "state-1": (31,)}),
        (BLOCK + 2, ([11, 12], [31, 32]), {"kv": (11, 12), "state-1": (32,)}),
        (3 * BLOCK, ([11, 12, 13, 14], [0, 0, 33, 34]), {"kv": (11, 12, 13), "state-1": (33,)}),  # 34: speculation
    ],
)
def test_with_states_prefill_stops_before_the_last_token(tokens: int, own: Any, pages: Any) -> None:
    scheduler, asked = Scheduler(True, WITH_STATES), request(AT_PREFILL, tokens)
    scheduler.on_new(asked)
    assert asked.num_prompt_tokens == max(tokens - 1, 1)
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.on_finished(asked, own)[0]
    assert scheduler.take().computed["r"].pages == pages


def test_a_state_of_one_block_a_request_is_that_block_whatever_the_length() -> None:
    """Without vLLM's prefix cache: its block size is the longest prompt's."""
    (state,) = (replace(group, block_tokens=512) for group in WITH_STATES if group.has_state)
    assert [state.blocks_of(([11], [31]), 0, stop) for stop in (0, 1, 40, 512)] == [(), (31,), (31,), (31,)]


@pytest.mark.parametrize("prompt", ["of embeddings", "of which the log-probabilities are wanted"])
def test_a_state_that_has_gone_past_the_last_token_but_one_is_given_to_nobody(prompt: str) -> None:
    """The tokens of embeddings are not known, so prefill cannot leave the last one away, and what is wanted of each
    token is wanted of the last one too."""
    scheduler, asked = Scheduler(True, WITH_STATES), request(AT_PREFILL, 40)
    if prompt == "of embeddings":
        asked.prompt_embeds = torch.zeros(1)
    else:
        asked.sampling_params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    scheduler.on_new(asked)
    assert asked.num_prompt_tokens == 40
    scheduler.on_blocks(asked, blocks_of_groups([11, 12, 13], [0, 0, 31]), 0)
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert not scheduler.on_finished(asked, ([11, 12, 13], [0, 0, 31]))[0]
    assert scheduler.take().dropped == {"r": "x"}


def test_decode_asks_once_and_computes_its_prompt_itself_when_it_was_preempted() -> None:
    scheduler, wanted = Scheduler(False, ONE_GROUP), request(AT_DECODE)
    scheduler.on_blocks(wanted, blocks(1, 2, 3), elsewhere=40)
    scheduler.on_blocks(wanted, blocks(1, 2, 3), elsewhere=0)
    assert len(scheduler.take().receives) == 1
    assert scheduler.tokens_elsewhere(wanted, computed=0) == 0
    assert scheduler.take() == Handoffs()


def test_a_request_that_waits_for_its_turn_is_named_at_once() -> None:
    """Else prefill kept the blocks of what a killed decode had queued until their deadline."""
    scheduler, wanted = Scheduler(False, ONE_GROUP), request(AT_DECODE)
    scheduler.on_new(wanted)
    assert scheduler.take() == Handoffs(queued={"r": Receive("x", AT_DECODE["remote_bootstrap_addr"], "e")})
    scheduler.on_blocks(wanted, blocks(1, 2, 3), elsewhere=40)
    assert scheduler.take().queued == {}


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_has_its_turn_in_the_same_step_is_said_once(ends: bool) -> None:
    scheduler, wanted = Scheduler(False, ONE_GROUP), request(AT_DECODE)
    scheduler.on_new(wanted)
    if ends:
        wanted.status = RequestStatus.FINISHED_ABORTED
        scheduler.on_finished(wanted, ([],))
    else:
        scheduler.on_blocks(wanted, blocks(1, 2, 3), elsewhere=40)
    said = scheduler.take()
    assert (list(said.receives), said.queued) == (["r"], {})


def test_what_others_ask_for_is_not_named() -> None:
    for prefill, params in ((True, AT_PREFILL), (False, {}), (True, AT_DECODE)):
        scheduler = Scheduler(prefill, ONE_GROUP)
        scheduler.on_new(request(params))
        assert scheduler.take() == Handoffs()


def test_decode_that_loads_nothing_says_so_to_prefill() -> None:
    scheduler = Scheduler(False, ONE_GROUP)
    scheduler.on_blocks(request(AT_DECODE), blocks(1, 2, 3), elsewhere=0)
    assert scheduler.take().receives["r"] == Receive("x", AT_DECODE["remote_bootstrap_addr"], "e", {}, 3)


def test_the_trace_of_a_request_goes_with_its_hand_off() -> None:
    scheduler, wanted = Scheduler(False, ONE_GROUP), request(AT_DECODE)
    wanted.trace_headers = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": "x=y"}
    scheduler.on_blocks(wanted, blocks(1, 2, 3), elsewhere=40)
    assert scheduler.take().receives["r"].traceparent == wanted.trace_headers["traceparent"]


def test_a_request_that_ended_before_it_had_blocks_is_called_off_at_prefill() -> None:
    scheduler = Scheduler(False, ONE_GROUP)
    assert not scheduler.on_finished(finished(AT_DECODE, RequestStatus.FINISHED_ABORTED), ([],))[0]
    assert scheduler.take().receives["r"].abort


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED])
def test_prefill_keeps_the_blocks_of_a_prompt_that_it_computed(status: RequestStatus) -> None:
    scheduler = Scheduler(True, ONE_GROUP)
    scheduler.on_blocks(request(AT_PREFILL), blocks(4, 5, 6), 0)
    assert scheduler.take().announced == {"r": "x"}
    assert scheduler.on_finished(finished(AT_PREFILL, status), ([4, 5, 6, 7],))[0]
    assert scheduler.take().computed == {"r": Send("x", {"kv": (4, 5, 6)})}


def test_a_proxy_that_has_chosen_decode_names_its_engine_to_prefill() -> None:
    scheduler = Scheduler(True, ONE_GROUP)
    scheduler.on_blocks(request({**AT_PREFILL, DECODE: "decode-7"}), blocks(4, 5, 6), 0)
    handoffs = scheduler.take()
    assert (handoffs.announced, handoffs.bound) == ({"r": "x"}, {"r": "decode-7"})


@pytest.mark.parametrize(
    ("tokens", "own", "pages"),
    [
        (1, ([21], [11]), {"kv": (), "swa-1": ()}),
        (2 * BLOCK, ([21], [11, 12]), {"kv": (11, 12), "swa-1": (21,)}),
        (2 * BLOCK + 1, ([21, 22], [11, 12, 13]), {"kv": (11, 12), "swa-1": (21,)}),
        (4 * BLOCK, ([0, 22], [11, 12, 13, 14]), {"kv": (11, 12, 13, 14), "swa-1": (22,)}),
    ],
)
def test_with_windows_prefill_leaves_the_last_token_to_decode(
    tokens: int, own: tuple[list[int], list[int]], pages: Any
) -> None:
    scheduler, asked = Scheduler(True, TWO_GROUPS), request(AT_PREFILL, tokens)
    scheduler.on_new(asked)
    computed = max(tokens - 1, 1)
    assert asked.num_prompt_tokens == asked.num_tokens == len(asked.prompt_token_ids or ()) == computed
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.on_finished(asked, own)[0]
    assert scheduler.take().computed["r"].pages == pages


def test_both_sides_hand_over_as_many_tokens_of_a_prompt_that_prefill_cannot_shorten() -> None:
    """Its tokens are not known: the last block that decode wants is still the last one that prefill sends."""
    scheduler, asked = Scheduler(True, TWO_GROUPS), request(AT_PREFILL, 2 * BLOCK + 1)
    asked.prompt_embeds = torch.zeros(1)
    scheduler.on_new(asked)
    assert asked.num_prompt_tokens == 2 * BLOCK + 1
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.on_finished(asked, ([21, 22], [11, 12, 13]))[0]
    assert scheduler.take().computed["r"].pages == {"kv": (11, 12), "swa-1": (21,)}


@pytest.mark.parametrize("params", [None, AT_DECODE])
def test_requests_that_prefill_does_not_hand_over_keep_their_last_token(params: dict[str, Any] | None) -> None:
    scheduler, ordinary = Scheduler(True, TWO_GROUPS), request(params)
    scheduler.on_new(ordinary)
    assert ordinary.num_prompt_tokens == 40


def test_prefill_that_gives_up_lets_its_blocks_go() -> None:
    scheduler = Scheduler(True, ONE_GROUP)
    assert not scheduler.on_finished(finished(AT_PREFILL, RequestStatus.FINISHED_ABORTED), ([4, 5, 6],))[0]
    assert scheduler.take().dropped == {"r": "x"}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True},
        {**AT_DECODE, "transfer_id": ""},
        {**AT_DECODE, "remote_bootstrap_addr": 0},
        {"do_remote_decode": False, "do_remote_prefill": False},
    ],
)
@pytest.mark.parametrize("prefill", [True, False])
def test_a_request_without_a_hand_off_is_left_to_vllm(params: dict[str, Any] | None, prefill: bool) -> None:
    scheduler, ordinary = Scheduler(prefill, ONE_GROUP), request(params)
    assert scheduler.tokens_elsewhere(ordinary, 0) == 0
    scheduler.on_blocks(ordinary, blocks(1, 2, 3), 0)
    ordinary.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert not scheduler.on_finished(ordinary, ([1, 2, 3],))[0]
    assert scheduler.take() == Handoffs()


NIXL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
REACHED = {"remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "e"}


def test_prefill_names_the_hand_off_where_the_proxy_does_not_and_answers_what_decode_needs() -> None:
    prefill, decode = Scheduler(True, ONE_GROUP, reached=REACHED), Scheduler(False, ONE_GROUP)
    asked = request(NIXL)
    prefill.on_new(asked)
    prefill.on_blocks(asked, blocks(4, 5, 6), elsewhere=0)
    (announced,) = prefill.take().announced.values()
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    held, answer = prefill.on_finished(asked, ([4, 5, 6],))
    assert held and answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": announced,
        **REACHED,
    }
    assert prefill.take().computed["r"].transfer_id == announced

    wanted = request(answer)
    assert decode.tokens_elsewhere(wanted, 0) == 40
    decode.on_blocks(wanted, blocks(1, 2, 3), 40)
    assert decode.take().receives["r"] == Receive(announced, "http://10.0.0.1:8998", "e", {"kv": (1, 2, 3)}, 0)
    decode.on_output((), (), {"r"})
    assert decode.on_finished(wanted, ([1, 2, 3],)) == (False, None) and decode.take_stats() is None


def test_each_request_gets_a_hand_off_of_its_own() -> None:
    prefill = Scheduler(True, ONE_GROUP, reached=REACHED)
    names: set[str] = set()
    for _ in range(2):
        asked = request(NIXL)
        prefill.on_blocks(asked, blocks(4), elsewhere=0)
        names.update(prefill.take().announced.values())
    assert len(names) == 2


def test_an_engine_of_both_roles_gives_and_takes() -> None:
    both = Scheduler(True, ONE_GROUP, decode=True, reached=REACHED)
    both.on_blocks(request(NIXL), blocks(4), elsewhere=0)
    assert len(both.take().announced) == 1
    assert both.tokens_elsewhere(request(AT_DECODE), 0) == 40


@pytest.mark.parametrize("params", [{**NIXL, "do_remote_prefill": True}, {**AT_DECODE, "remote_bootstrap_addr": ""}])
def test_decode_says_in_its_answer_in_the_statistics_and_in_the_log_that_it_computed_a_prompt_again(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    decode, wanted = Scheduler(False, ONE_GROUP), request(params)
    for _ in range(2):
        assert decode.tokens_elsewhere(wanted, 0) == 0
    held, answer = decode.on_finished(wanted, ([1, 2, 3],))
    assert not held and answer is not None and "remote_bootstrap_addr" in answer[UNUSED]
    stats = decode.take_stats()
    assert stats is not None and stats.reduce()["prefill unused parameters"] == 1
    assert [line for line in caplog.messages if "request r does not use what prefill computed" in line][1:] == []


@pytest.mark.parametrize("lost", [((2,), ()), ((), ("r",))], ids=["pages", "the request"])
def test_a_hand_off_that_failed_is_told_too(lost: tuple[Sequence[int], Sequence[str]]) -> None:
    decode, wanted, other = Scheduler(False, ONE_GROUP), request(AT_DECODE), request(AT_DECODE)
    other.request_id = "other"
    decode.on_blocks(wanted, blocks(1, 2, 3), 40)
    decode.on_blocks(other, blocks(4, 5, 6), 40)
    decode.on_output(*lost, ())
    decode.on_output((), (), {"r", "other"})
    decode.on_output((2, 4), (), ())  # others have these pages by now
    assert decode.on_finished(other, ([4, 5, 6],)) == (False, None)
    _, answer = decode.on_finished(wanted, ([1, 2, 3],))
    assert answer is not None and "failed" in answer[UNUSED]
    stats = decode.take_stats()
    assert stats is not None and stats.data["unused"] == {"hand_off_failed": 1}


def test_prefills_that_were_not_used_are_exported_by_reason() -> None:
    kinds: Any = {kind: kind for kind in (Gauge, Counter, Histogram)}
    metrics = TransferMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    metrics.observe({**TransferStats().data, "unused": {"parameters": 2}})
    labels = {"engine": "0", "reason": "parameters"}
    assert REGISTRY.get_sample_value("vllm:kvgrpc_prefills_unused_total", labels) == 2


@pytest.mark.parametrize("value", [7, ["x"], {"a": 1}, True, 1.5])
def test_parameters_of_any_type_raise_nothing(value: object) -> None:
    for role, base in ((True, AT_PREFILL), (False, AT_DECODE)):
        scheduler, odd = Scheduler(role, ONE_GROUP), request({name: value for name in base})
        scheduler.tokens_elsewhere(odd, 0)
        scheduler.on_blocks(odd, blocks(1, 2, 3), 40)
        pickle.loads(pickle.dumps(scheduler.take()))


def test_handoffs_travel_to_workers() -> None:
    handoffs = Handoffs(
        {"a": "x"}, {"b": Send("w", {"kv": (1, 2)})}, {"c": "y"}, {"d": Receive("z", "h:1", "", {"kv": (3,)}, 1, True)}
    )
    assert pickle.loads(pickle.dumps(handoffs)) == handoffs


def test_stats_add_up_and_travel_as_plain_values() -> None:
    one, other = TransferStats(), TransferStats()
    one.succeeded(0.25, 1 << 20)
    other.succeeded(0.5, 1 << 20)
    other.failed("PEER_LOST")
    total = TransferStats(json.loads(json.dumps(one.aggregate(other).to_dict())))
    assert total.reduce() == {"hand-offs": 2, "MB": 2.0, "median ms": 500.0, "longest ms": 500.0, "failed PEER_LOST": 1}
    taken = one.take()
    assert taken is not None and not taken.is_empty() and one.take() is None


def test_a_vllm_that_lacks_what_the_connector_needs_refuses_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {**VLLM.needs, HAND_OFFS: {"vllm.distributed.kv_transfer.kv_connector.v1.base.Gone": ""}}
    monkeypatch.setattr("kvgrpc.engines.vllm.VLLM", replace(VLLM, needs=needs))
    with pytest.raises(FeatureDisabled, match=r"it has no vllm\.distributed\..*\.Gone; install vllm==0\.33\.0"):
        _ = kvgrpc.engines.vllm.KvGrpcConnector


@pytest.mark.timeout(300)
def test_importing_the_connector_starts_nothing_that_a_fork_would_break() -> None:
    script = (
        "import sys, threading, vllm.config, vllm.v1.core.kv_cache_manager\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics\n"
        "before = set(sys.modules), threading.active_count()\n"
        "import kvgrpc.engines.vllm\n"
        "new = set(sys.modules) - before[0]\n"
        "print(threading.active_count() - before[1], sorted(new & {'grpc', 'mooncake', 'mooncake.engine', 'zmq'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280, cwd=Path.cwd())
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stderr
