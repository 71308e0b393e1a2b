"""The two halves of the connector, with vLLM's own requests and blocks, and no engine."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

import kvgrpc.engines.vllm
from kvgrpc.engines.compatibility import HAND_OFFS, VLLM
from kvgrpc.engines.vllm.bootstrap import Bootstrap
from kvgrpc.engines.vllm.groups import Group, groups_of
from kvgrpc.engines.vllm.handoffs import Handoffs, Receive, Send
from kvgrpc.engines.vllm.limits import check_supported
from kvgrpc.engines.vllm.rank import (
    WorkerProcess,
    bootstrap_address,
    layer_numbers,
    model_of,
    pools_of,
    rank_config,
)
from kvgrpc.engines.vllm.reached import reached
from kvgrpc.engines.vllm.scheduler import DECODE, UNUSED, Scheduler
from kvgrpc.engines.vllm.stats import TransferStats
from kvgrpc.errors import AddressNotAllowed, FeatureDisabled, InvalidRequest
from kvgrpc.model import Attention, ModelIdentity, PoolKind, Role

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


def test_a_state_that_has_gone_past_the_last_token_but_one_is_given_to_nobody() -> None:
    """The tokens of a prompt of embeddings are not known, so prefill cannot leave the last one away."""
    scheduler, asked = Scheduler(True, WITH_STATES), request(AT_PREFILL, 40)
    asked.prompt_embeds = torch.zeros(1)
    scheduler.on_new(asked)
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


@pytest.mark.parametrize(
    ("text", "address"),
    [("http://10.0.0.1:8998", "10.0.0.1:8998"), ("http://[::1]:8998/", "[::1]:8998"), ("host:1", "host:1")],
)
def test_a_routers_url_is_the_address_of_a_registry(text: str, address: str) -> None:
    assert bootstrap_address(text) == address


def engine(role: str = "kv_producer", extra: dict[str, Any] | None = None, **parallel: Any) -> SimpleNamespace:
    sizes: dict[str, Any] = {
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"), 1),
        **dict.fromkeys(("prefill_context_parallel_size", "tensor_parallel_size", "nnodes"), 1),
        **parallel,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(**sizes, master_addr="10.0.0.9"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            use_mla=False, get_total_num_kv_heads=lambda: 4, model="org/tiny", revision="abc", dtype=torch.float32
        ),
    )


def cache_config(*specs: Any, blocks: int = 8) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([chr(ord("l") + number)], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(blocks, [], groups, kv_cache_layout="LBHNC")


def attention(kind: Any = FullAttentionSpec, heads: int = 4, **more: Any) -> Any:
    return kind(block_size=BLOCK, num_kv_heads=heads, head_size=8, dtype=torch.float32, **more)


WINDOW = attention(SlidingWindowSpec, sliding_window=64)


def state(kind: str = "GDN_ATTN", **more: Any) -> MambaSpec:
    """Of 96 and 128 bytes."""
    shapes, dtypes = ((3, 16), (2, 4, 4)), (torch.bfloat16, torch.float32)
    return MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_type=MambaAttentionBackendEnum[kind], **more)


@pytest.mark.parametrize(
    ("config", "caches", "what"),
    [
        (engine(pipeline_parallel_size=2), cache_config(attention()), 'ask .* "untried": "pipeline"'),
        (
            engine(extra={"untried": "pipeline"}, pipeline_parallel_size=2),
            cache_config(WINDOW, attention()),
            "pipeline .* several groups of layers",
        ),
        (engine(data_parallel_size=2), cache_config(attention()), "data parallelism"),
        (
            engine(),
            cache_config(attention(), attention(ChunkedLocalAttentionSpec, attention_chunk_size=64)),
            "layers of the kind ChunkedLocalAttentionSpec.*were never run",
        ),
        (engine(), cache_config(attention(RSWASpec, rswa_window=64)), r"nor a state \(RSWASpec\)"),
        (engine(), cache_config(state()), "all of whose layers keep a state"),
        (engine(), cache_config(attention(), state("MAMBA1"), state()), r"kind MAMBA1.*ask .*\"untried\": \"MAMBA1\""),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: Any, caches: Any, what: str) -> None:
    with pytest.raises(FeatureDisabled, match=what):
        check_supported(config, caches)


def test_a_pipeline_stage_says_which_layers_of_the_model_it_has() -> None:
    config, caches = engine(extra={"untried": "pipeline"}, pipeline_parallel_size=2), cache_config(attention())
    check_supported(config, caches)
    names = [f"model.layers.{number}.self_attn.attn" for number in (3, 2)]
    caches.kv_cache_groups[0].layer_names[:] = names
    memory = {name: torch.zeros(8, 4, BLOCK, 16) for name in names}
    (pool,) = pools_of(memory, config, caches, 0)
    assert [(region.layer, region.address) for region in pool.regions] == [
        (2, memory[names[1]].data_ptr()),
        (3, memory[names[0]].data_ptr()),
    ]
    place = WorkerProcess(config, 0, {}, stage=1)
    assert (rank_config(place, (pool,), model_of(config, pool, place)).layout.pp, place.pp) == (2, 1)


@pytest.mark.parametrize(
    ("names", "only", "numbers"),
    [
        (["model.layers.1.attn", "model.layers.0.attn"], True, [1, 0]),
        (["model.layers.1.attn", "model.layers.3.attn"], False, [0, 1]),
        (["model.layers.1.a", "draft.layers.1.a"], True, [0, 1]),
        (["layer1.a", "layers.2.experts.3.a"], True, [0, 1]),
    ],
    ids=["numbered", "of several groups", "twice", "not numbered"],
)
def test_layers_are_numbered_by_their_names_or_in_their_order(names: list[str], only: bool, numbers: list[int]) -> None:
    assert list(layer_numbers(names, only, 1)) == numbers
    if numbers == [0, 1]:
        with pytest.raises(FeatureDisabled, match=r"do not number them: .*use --pipeline-parallel-size 1"):
            layer_numbers(names, only, 2)


@pytest.mark.parametrize("specs", [(WINDOW, attention()), (WINDOW,), (WINDOW, attention(), WINDOW, attention())])
def test_each_group_of_layers_is_a_pool_and_those_that_see_all_tokens_come_first(specs: tuple[Any, ...]) -> None:
    caches = cache_config(*specs)
    check_supported(engine(), caches)
    found = groups_of(caches)
    assert [group.has_window for group in found] == sorted(spec is WINDOW for spec in specs)
    assert [specs[group.index] is WINDOW for group in found] == [group.has_window for group in found]
    assert [group.pool for group in found] == {
        1: ["kv"],
        2: ["kv", "swa-1"],
        4: ["kv", "kv-1", "swa-2", "swa-3"],
    }[len(specs)]
    layers = {name: torch.zeros(8, 4, BLOCK, 16) for name in "lmno"[: len(specs)]}
    for group, pool in zip(found, pools_of(layers, engine(), caches, 0), strict=True):
        assert (pool.name, len(pool.regions), pool.head_count) == (group.pool, 1, 4)
        assert pool.regions[0].address == layers["lmno"[group.index]].data_ptr()


@pytest.mark.parametrize(
    ("kinds", "extra"),
    [
        (("GDN_ATTN",), {}),
        (("MAMBA1",), {"untried": " mamba1"}),
        (("MAMBA1", "LINEAR"), {"untried": ["LINEAR", "MAMBA1"]}),
    ],
)
def test_kinds_of_layers_that_were_never_run_are_served_to_who_asks_for_them(kinds: Any, extra: Any) -> None:
    config = engine(extra=extra)
    check_supported(config, cache_config(*map(state, kinds), attention()))
    WorkerProcess(config, 0, {})  # which refuses keys that it does not know


def test_layers_that_see_the_chunk_of_the_next_token_are_a_pool_as_those_of_a_window_are() -> None:
    caches = cache_config(attention(ChunkedLocalAttentionSpec, attention_chunk_size=2 * BLOCK), attention())
    check_supported(engine(extra={"untried": "ChunkedLocalAttentionSpec"}), caches)
    _, chunks = groups_of(caches)
    assert (chunks.pool, chunks.moves_on) == ("swa-1", True)
    assert chunks.blocks_of(([0, 0, 23], []), 0, 2 * BLOCK + 3) == (23,)
    assert chunks.blocks_of(([0, 0], []), 0, 2 * BLOCK) == ()  # the next token begins a chunk


def test_states_are_a_pool_of_their_own_behind_the_others_without_what_fills_their_blocks() -> None:
    caches = cache_config(state(page_size_padded=4096), WINDOW, attention())
    layers = {name: torch.zeros(8, 4, BLOCK, 16) for name in "mn"}
    raw = torch.zeros(8 * 4096, dtype=torch.int8)
    layers["l"] = raw.as_strided((8, 1, 1, 224), (4096, 224, 224, 1))
    kv, window, states = pools_of(layers, engine(), caches, 0)
    assert [pool.name for pool in (kv, window, states)] == ["kv", "swa-1", "state-2"]
    assert (states.kind, states.page_tokens, states.pages, states.heads_total) == (PoolKind.STATE, 0, 8, 0)
    assert states.dtype == "bfloat16,float32" and states.axes in ("convolution:SD", "convolution:DS")
    assert [region[2:] for region in states.regions] == [(raw.data_ptr(), 4096, 224)]


def test_layers_with_heads_of_another_number_are_for_equal_parallel_sizes_only() -> None:
    layers = {"l": torch.zeros(8, 4, BLOCK, 16), "m": torch.zeros(8, 8, BLOCK, 8)}
    caches = cache_config(attention(), attention(SlidingWindowSpec, heads=8, sliding_window=64))
    assert [pool.heads_total for pool in pools_of(layers, engine(), caches, 0)] == [4, 0]


def test_a_page_is_a_block_of_the_scheduler_also_where_kernels_use_smaller_ones() -> None:
    caches = cache_config(attention(heads=2))
    check_supported(engine(), caches)
    layers = {name: torch.zeros(16, 2, BLOCK // 2, 16) for name in ("a", "b")}
    caches.kv_cache_groups[0].layer_names[:] = ["a", "b", "shares b"]
    (pool,) = pools_of({**layers, "shares b": layers["b"]}, engine(tensor_parallel_size=2), caches, 1)
    assert (pool.pages, pool.page_tokens, len(pool.regions)) == (8, BLOCK, 2)
    assert pool.regions[1].page_bytes == pool.regions[1].page_stride_bytes == 2 * 2 * (BLOCK // 2) * 16 * 4
    assert (pool.heads_total, pool.head_start, pool.head_count) == (4, 2, 2)
    assert pool.axes == "LBHNC"  # a page is two of the kernel's: heads lie in two places


@pytest.mark.parametrize(("tp", "heads"), [(0, (0, 1)), (3, (1, 1)), (7, (3, 1))])
def test_with_fewer_heads_than_ranks_several_hold_the_same(tp: int, heads: tuple[int, int]) -> None:
    layers = {"l": torch.zeros(8, 1, BLOCK, 16)}
    (pool,) = pools_of(layers, engine(tensor_parallel_size=8), cache_config(attention(heads=1)), tp)
    assert (pool.head_start, pool.head_count) == heads


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(8, 2, 2, BLOCK, 16)[:, 0],
        torch.zeros(2, 8, 2, BLOCK, 16).transpose(0, 1),
        torch.zeros(9, 2, BLOCK, 16),
    ],
    ids=["layers packed in a row", "keys and values apart", "no whole number of blocks"],
)
def test_memory_that_is_not_block_behind_block_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(FeatureDisabled, match="KV cache of l"):
        pools_of({"l": cache}, engine(), cache_config(attention()), 0)


def rank(place: WorkerProcess) -> Any:
    (pool,) = pools_of({"l": torch.zeros(8, 4, BLOCK, 16)}, engine(), cache_config(attention()), 0)
    assert pool.axes == "head,token,dim"
    return rank_config(place, [pool], model_of(engine(), pool, place))


def test_prefill_serves_its_registry_where_proxies_of_vllms_mooncake_connector_look() -> None:
    place = WorkerProcess(engine(), 0, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9000"})
    assert place.serves_registry and not WorkerProcess(engine(), 1, {}).serves_registry
    assert not WorkerProcess(engine(pipeline_parallel_size=2), 0, {}, stage=1).serves_registry
    config = rank(place)
    assert (config.role, config.registry, config.engine) == (Role.PREFILL, "127.0.0.1:9000", "127.0.0.1-9000")
    assert config.listen == "127.0.0.1:0"


def test_replicas_of_a_dense_model_have_the_next_bootstrap_ports() -> None:
    """vLLM tells each that there is one replica, and its index."""
    (first, second) = (WorkerProcess(engine(data_parallel_index=index), 0, {}) for index in range(2))
    assert (first.bootstrap, second.bootstrap) == ("127.0.0.1:8998", "127.0.0.1:8999")
    assert rank(first).engine != rank(second).engine
    check_supported(engine(data_parallel_index=1), cache_config(attention()))


def test_a_worker_of_both_roles_has_two_ranks_and_the_ports_of_the_settings_once() -> None:
    environment = {"KVGRPC_LISTEN": "127.0.0.1:9100", "KVGRPC_METRICS_LISTEN": "127.0.0.1:9101"}
    config = engine("kv_both")
    prefill, decode = (
        rank(WorkerProcess(config, 0, environment, role)) for role in WorkerProcess(config, 0, environment).roles
    )
    assert (prefill.role, prefill.listen, prefill.registry) == (Role.PREFILL, "127.0.0.1:9100", "127.0.0.1:8998")
    assert (decode.role, decode.listen, decode.registry) == (Role.DECODE, "127.0.0.1:0", "")
    assert (prefill.metrics_listen, decode.metrics_listen) == ("127.0.0.1:9101", "")


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "127.0.0.1:8998"),
        ({"VLLM_HOST_IP": "10.0.0.1"}, "10.0.0.1:8998"),
    ],
)
def test_prefill_answers_the_address_that_others_dial(environment: dict[str, str], address: str) -> None:
    config = engine()
    config.kv_transfer_config.engine_id = "e"
    assert reached(config, environment) == {"remote_bootstrap_addr": f"http://{address}", "remote_engine_id": "e"}


def test_settings_come_from_extra_config_over_the_environment() -> None:
    extra = {"bootstrap_port": 9001, "device": "mlx5_0", "resolve_timeout": "5"}
    place = WorkerProcess(engine(extra=extra), 0, {"VLLM_HOST_IP": "10.0.0.1", "KVGRPC_DEVICE": "tcp"})
    config = rank(place)
    assert (config.device, config.resolve_timeout, config.registry) == ("mlx5_0", 5.0, "10.0.0.1:9001")


def test_both_sides_say_which_model_they_run() -> None:
    assert rank(WorkerProcess(engine(), 0, {})).model == ModelIdentity("tiny", "abc", "float32", Attention.MHA)
    assert rank(WorkerProcess(engine(extra={"model_name": "ours"}), 0, {})).model.name == "ours"
    assert rank(WorkerProcess(engine(), 0, {"KVGRPC_MODEL_NAME": "ours"})).model.name == "ours"


def test_an_external_registry_is_asked_for_prefill_by_its_name() -> None:
    environment = {"KVGRPC_REGISTRY": "10.0.0.5:9000"}
    prefill, decode = WorkerProcess(engine(), 0, environment), WorkerProcess(engine("kv_consumer"), 0, environment)
    assert not prefill.serves_registry and rank(prefill).registry == "10.0.0.5:9000"
    assert decode.external == "10.0.0.5:9000" and rank(decode).registry == ""
    assert rank(decode).bootstrap_allow == ("10.0.0.5",)


@pytest.mark.parametrize("extra", [{"bootstrap_port": "x"}, {"bootstrap_port": 0}, {"no_such_key": 1}])
def test_a_setting_that_cannot_be_is_named(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(extra))):
        WorkerProcess(engine(extra=extra), 0, {})


def test_a_bootstrap_port_that_others_reach_in_plaintext_is_not_opened() -> None:
    bootstrap = Bootstrap("0.0.0.0:8998", "e", None, 10.0)
    with pytest.raises(AddressNotAllowed, match="KVGRPC_INSECURE"):
        bootstrap.open()
    bootstrap.close()


def test_a_bootstrap_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        bootstrap = Bootstrap(address, "e", None, 10.0)
        with pytest.raises(AddressNotAllowed, match=f"{address} cannot be bound.*bootstrap_port"):
            bootstrap.open()
        bootstrap.close()


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
