"""Workers of context parallel ranks of prefill, and of decode (DCP), byte by byte over made-up latents.

Over the modules of the real vLLM, whose attention for this is for GPUs; no engine is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from kvgrpc.engines.vllm import worker as module
from kvgrpc.engines.vllm.handoffs import Handoffs, Receive, Send
from kvgrpc.engines.vllm.limits import CONTEXT, DCP, UNTRIED, check_supported
from kvgrpc.engines.vllm.worker import Worker
from tests.support.ports import free_port
from tests.support.waiting import wait_until

BLOCKS, BLOCK, LAYERS = 16, 16, ("model.layers.0.attn", "model.layers.1.attn")
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
TRANSFER, REQUEST = "a-transfer", "r"


class Process:
    """One of vLLM's workers, with its own memory."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        role: str,
        port: int,
        context: int = 0,
        contexts: int = 1,
        *,
        tp: int = 0,
        tps: int = 1,
        dcps: int = 1,
    ) -> None:
        self.memory = torch.zeros(len(LAYERS), BLOCKS, LATENT.page_size_bytes, dtype=torch.uint8)
        caches = {name: self.memory[layer].view(torch.float32) for layer, name in enumerate(LAYERS)}
        kept = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), LATENT)], kv_cache_layout="LBHNC")
        config = engine(role, port, contexts, tps, dcps)
        check_supported(config, kept)
        with monkeypatch.context() as patch:
            for name, rank in (("get_pp_group", 0), ("get_pcp_group", context)):
                patch.setattr(module, name, lambda rank=rank: SimpleNamespace(rank_in_group=rank))
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: tp)
            self.worker = Worker(config, kept, caches)


def engine(role: str, port: int, contexts: int, tps: int, dcps: int) -> Any:
    sizes = {"tensor_parallel_size": tps, "pipeline_parallel_size": 1, "decode_context_parallel_size": dcps}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            kv_connector_extra_config={"bootstrap_port": port, UNTRIED: f"{CONTEXT},{DCP}"},
            engine_id=role,
        ),
        parallel_config=SimpleNamespace(**sizes, nnodes=1, prefill_context_parallel_size=contexts),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            use_mla=True, get_total_num_kv_heads=lambda: 4, model="a/model", revision="1", dtype=torch.float32
        ),
    )


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, port: int) -> Iterator[list[Process]]:
    """Context parallel ranks 0 and 1 of prefill, and decode."""
    opened: list[Process] = []
    try:
        for role, context, contexts in (("kv_producer", 0, 2), ("kv_producer", 1, 2), ("kv_consumer", 0, 1)):
            opened.append(Process(monkeypatch, role, port, context, contexts))
        yield opened
    finally:
        for process in reversed(opened):
            process.worker.close()


def finished(workers: list[Worker]) -> list[tuple[set[str], set[str]]]:
    """What each says in one step of vLLM's, which ends a request where all have said it once."""
    return [worker.finished(()) for worker in workers]


def test_one_rank_sends_what_both_have_and_both_give_their_blocks_back(processes: list[Process], port: int) -> None:
    ours, copy, theirs = processes
    ours.memory.random_(1, 128)
    copy.memory[:] = ours.memory + 128  # to be told apart; vLLM's are the same
    senders, decode = [ours.worker, copy.worker], theirs.worker
    for worker in senders:
        worker.take_on(Handoffs(announced={REQUEST: TRANSFER}))
    wanted = Receive(TRANSFER, f"http://127.0.0.1:{port}", "kv_producer", {"kv": (9, 4)}, 1)
    decode.take_on(Handoffs(receives={REQUEST: wanted}))
    assert finished(senders) == [(set(), set())] * 2
    for worker in reversed(senders):
        worker.take_on(Handoffs(computed={REQUEST: Send(TRANSFER, {"kv": (3, 1, 2)})}))
    over: list[set[str]] = [set(), set(), set()]

    def all_over() -> bool:
        for each, (sent, received) in zip(over, finished([*senders, decode]), strict=True):
            each |= sent | received
        return all(over)

    wait_until(all_over)
    assert over == [{REQUEST}] * 3 and not decode.take_failed_pages()
    expected = torch.zeros_like(theirs.memory)
    expected[:, 9], expected[:, 4] = ours.memory[:, 1], ours.memory[:, 2]
    assert torch.equal(theirs.memory, expected)


def test_what_decode_gives_up_ends_in_both_ranks(processes: list[Process], port: int) -> None:
    senders, decode = [each.worker for each in processes[:2]], processes[2].worker
    for worker in senders:
        worker.take_on(Handoffs(announced={REQUEST: TRANSFER}))
    given_up = Receive(TRANSFER, f"http://127.0.0.1:{port}", "kv_producer", abort=True)
    decode.take_on(Handoffs(receives={REQUEST: given_up}))
    for worker in senders:
        worker.take_on(Handoffs(computed={REQUEST: Send(TRANSFER, {"kv": (3,)})}))
    over: list[set[str]] = [set(), set()]

    def both_over() -> bool:
        for each, (sent, _) in zip(over, finished(senders), strict=True):
            each |= sent
        return all(over)

    wait_until(both_over)
    assert not processes[2].memory.any()


class Divided(NamedTuple):
    """The tensor-parallel workers of either side."""

    prefill: list[Process]
    decode: list[Process]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch, port: int, request: pytest.FixtureRequest) -> Iterator[Divided]:
    """Of a number of tensor-parallel workers and the size of decode context parallelism: prefill's, decode's."""
    sides = Divided([], [])
    try:
        for opened, role, (tps, dcps) in zip(sides, ("kv_producer", "kv_consumer"), request.param, strict=True):
            for tp in range(tps):
                opened.append(Process(monkeypatch, role, port, tp=tp, tps=tps, dcps=dcps))
        yield sides
    finally:
        for process in (*sides.decode, *sides.prefill):
            process.worker.close()


def tokens_of(process: Process, blocks: Sequence[int]) -> torch.Tensor:
    """(layer, token, bytes) of these blocks, in the order of the memory."""
    return process.memory[:, list(blocks)].reshape(len(LAYERS), len(blocks) * BLOCK, -1)


@pytest.mark.parametrize(
    ("divided", "alone"),
    [(((1, 1), (2, 2)), True), (((2, 1), (2, 2)), True), (((2, 1), (4, 2)), True), (((2, 2), (2, 2)), False)],
    ids=["1 to 2", "2 to 2", "2 to 4", "both sides"],
    indirect=["divided"],
)
def test_each_decode_context_parallel_rank_gets_its_tokens(divided: Divided, alone: bool, port: int) -> None:
    """Behind one block of decode that it holds. On both sides a block's number stands for the tokens of all ranks."""
    held, theirs, ours = (2, (9,), (3, 1, 2)) if alone else (1, (9, 4), (3, 1, 2))
    for number, rank in enumerate(divided.prefill):
        rank.memory.random_(1, 128)
        if alone and number:
            rank.memory[:] = divided.prefill[0].memory
    senders, receivers = ([each.worker for each in side] for side in divided)
    for worker in senders:
        worker.take_on(Handoffs(announced={REQUEST: TRANSFER}))
    wanted = Receive(TRANSFER, f"http://127.0.0.1:{port}", "kv_producer", {"kv": theirs}, 1)
    for worker in receivers:
        worker.take_on(Handoffs(receives={REQUEST: wanted}))
    for worker in senders:
        worker.take_on(Handoffs(computed={REQUEST: Send(TRANSFER, {"kv": ours})}))
    over: list[set[str]] = [set() for _ in (*senders, *receivers)]

    def all_over() -> bool:
        for each, (sent, received) in zip(over, finished([*senders, *receivers]), strict=True):
            each |= sent | received
        return all(over)

    wait_until(all_over)
    assert not any(worker.take_failed_pages() for worker in receivers)
    for number, rank in enumerate(divided.decode):
        sent = tokens_of(divided.prefill[0 if alone else number], ours[held:])
        mine = sent[:, number % 2 :: 2] if alone else sent
        expected = torch.zeros_like(rank.memory)
        whole = expected[:, list(theirs)].reshape(len(LAYERS), len(theirs) * BLOCK, -1)
        whole[:, : mine.shape[1]] = mine
        expected[:, list(theirs)] = whole.reshape(len(LAYERS), len(theirs), -1)
        assert torch.equal(rank.memory, expected)
