"""States of layers that keep no tokens, and windows of latents, and caches beside them, byte by byte: two ranks over
made-up memory as vLLM lays it out, and no engine.

For kinds of layers that no engine was run with; test_vllm_recurrent.py has real engines.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvgrpc.engines.vllm.rank import pools_of
from kvgrpc.engines.vllm.rooms import Receiving, Sending
from kvgrpc.errors import Reason
from kvgrpc.model import Pool, Role
from kvgrpc.server import RankConfig, open_decode, open_prefill
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender

BLOCKS, BLOCK, LAYERS = 16, 16, 2
SECONDS = 20.0
# What vLLM's models of that kind keep a layer, smaller.
STATES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]] = {
    "GDN_ATTN": (((3, 24), (2, 4, 6)), (torch.bfloat16, torch.float32)),
    "MAMBA1": (((10, 3), (10, 4)), (torch.bfloat16, torch.float32)),
    "MAMBA2": (((3, 22), (2, 5, 7)), (torch.bfloat16, torch.float32)),
    "SHORT_CONV": (((2, 20),), (torch.bfloat16,)),
    "LINEAR": (((2, 8, 8),), (torch.float32,)),
}
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
INDEXER = SparseCacheRole.INDEXER
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)


class Side:
    """The memory of one worker. Layers of all groups lie one over the other: a block is one group's at a time."""

    def __init__(self, attention: KVCacheSpec, kind: str, scale: int = 1) -> None:
        shapes, dtypes = STATES[kind]
        shapes = tuple((shape[0] * scale, *shape[1:]) for shape in shapes)
        page = attention.page_size_bytes
        states = MambaSpec(
            block_size=BLOCK,
            shapes=shapes,
            dtypes=dtypes,
            page_size_padded=page,
            mamba_type=MambaAttentionBackendEnum[kind],
        )
        self.memory = torch.zeros(LAYERS, BLOCKS, page, dtype=torch.uint8)
        self.state_bytes = states.state_content_size_bytes
        names = [[f"{group}{layer}" for layer in range(LAYERS)] for group in ("attention", "state")]
        caches = {
            **{name: self.memory[layer].view(torch.float32) for layer, name in enumerate(names[0])},
            **{name: self.memory[layer][:, : self.state_bytes] for layer, name in enumerate(names[1])},
        }
        groups = [KVCacheGroupSpec(each, spec) for each, spec in zip(names, (attention, states), strict=True)]
        config = worker(mla=attention is LATENT)
        self.pools = pools_of(caches, config, KVCacheConfig(BLOCKS, [], groups, kv_cache_layout="LBHNC"), 0)


def worker(mla: bool) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: 2, dtype=torch.float32),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def config(role: Role, pools: tuple[Pool, ...]) -> RankConfig:
    return RankConfig(engine=role.name, role=role, pools=pools, registry="embedded" if role is Role.PREFILL else "")


SENT: dict[str, tuple[int, ...]] = {"kv": (1, 2), "state-1": (5,)}
WANTED: dict[str, tuple[int, ...]] = {"kv": (9, 4), "state-1": (11,)}


def handed_over(
    ours: Any, theirs: Any, wanted: dict[str, tuple[int, ...]] = WANTED, sent: dict[str, tuple[int, ...]] = SENT
) -> Any:
    """Two blocks of tokens and a state; returns why it failed, None where it did not."""
    with (
        open_prefill(config(Role.PREFILL, ours.pools)) as prefill,
        open_decode(config(Role.DECODE, theirs.pools)) as decode,
    ):
        sending = Sending(KVSender(prefill.transfer, "", 7))
        sending.send(sent)
        receiver = KVReceiver(decode.transfer, prefill.address, 7)
        receiving = Receiving(receiver, wanted, 0, abort=False)
        if receiver.wait(SECONDS) is KVPoll.Success:
            assert sending.room.wait(SECONDS) is KVPoll.Success
        assert receiving.room.ended
        return receiver.failure


@pytest.mark.parametrize("attention", [FULL, LATENT], ids=["heads", "latents"])
@pytest.mark.parametrize("kind", STATES)
def test_the_state_and_the_tokens_arrive_and_no_byte_beside_them(kind: str, attention: KVCacheSpec) -> None:
    ours, theirs = Side(attention, kind), Side(attention, kind)
    ours.memory.random_(1, 256)
    assert handed_over(ours, theirs) is None
    expected = torch.zeros_like(theirs.memory)
    expected[:, 9], expected[:, 4] = ours.memory[:, 1], ours.memory[:, 2]
    expected[:, 11, : ours.state_bytes] = ours.memory[:, 5, : ours.state_bytes]
    assert torch.equal(theirs.memory, expected)


def test_what_layers_keep_beside_their_latents_arrives_with_them() -> None:
    """The index of a sparse attention, and one state of four tokens, in one group: a block has pages of three sizes."""
    index = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=12, dtype=torch.float32, cache_role=INDEXER)
    packed = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=20, dtype=torch.float32, tokens_per_state=4)
    specs = {"layers.0.attn": LATENT, "layers.0.indexer": index, "layers.1.attn": packed}
    groups = [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))]
    sides = []
    for _ in range(2):
        memory = {name: torch.zeros(BLOCKS, spec.page_size_bytes, dtype=torch.uint8) for name, spec in specs.items()}
        caches = {name: each.view(torch.float32) for name, each in memory.items()}
        pools = pools_of(caches, worker(mla=True), KVCacheConfig(BLOCKS, [], groups, kv_cache_layout="LBHNC"), 0)
        sides.append(SimpleNamespace(memory=memory, pools=pools))
    ours, theirs = sides
    for each in ours.memory.values():
        each.random_(1, 256)
    assert handed_over(ours, theirs, {"kv": (9, 4)}, {"kv": (1, 2)}) is None
    for name, sent in ours.memory.items():
        expected = torch.zeros_like(sent)
        expected[9], expected[4] = sent[1], sent[2]
        assert torch.equal(theirs.memory[name], expected)


def test_windows_of_latents_arrive_and_no_byte_beside_them() -> None:
    """In blocks of their own numbers, in the same memory: of the window there are fewer."""
    window = SlidingWindowMLASpec(
        block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=BLOCK
    )
    sides = []
    for _ in range(2):
        memory = torch.zeros(LAYERS, BLOCKS, LATENT.page_size_bytes, dtype=torch.uint8)
        caches = {f"{group}.{layer}": memory[layer].view(torch.float32) for group in "aw" for layer in range(LAYERS)}
        groups = [
            KVCacheGroupSpec([f"{group}.{layer}" for layer in range(LAYERS)], spec)
            for group, spec in (("w", window), ("a", LATENT))
        ]
        pools = pools_of(caches, worker(mla=True), KVCacheConfig(BLOCKS, [], groups, kv_cache_layout="LBHNC"), 0)
        sides.append(SimpleNamespace(memory=memory, pools=pools))
    ours, theirs = sides
    ours.memory.random_(1, 256)
    assert handed_over(ours, theirs, {"kv": (9, 4), "swa-1": (11,)}, {"kv": (1, 2), "swa-1": (5,)}) is None
    expected = torch.zeros_like(theirs.memory)
    expected[:, [9, 4, 11]] = ours.memory[:, [1, 2, 5]]
    assert torch.equal(theirs.memory, expected)


def test_decode_may_want_nothing_of_one_pool() -> None:
    """As of layers that see the chunk of the next token, where that begins one."""
    ours, theirs = Side(FULL, "MAMBA2"), Side(FULL, "MAMBA2")
    ours.memory.random_(1, 256)
    assert handed_over(ours, theirs, {**WANTED, "state-1": ()}) is None
    expected = torch.zeros_like(theirs.memory)
    expected[:, 9], expected[:, 4] = ours.memory[:, 1], ours.memory[:, 2]
    assert torch.equal(theirs.memory, expected)


@pytest.mark.parametrize("attention", [FULL, LATENT], ids=["heads", "latents"])
def test_states_of_another_size_are_not_handed_over(attention: KVCacheSpec) -> None:
    """As those of other tensor-parallel sizes are; a latent, of which each rank holds all, would fit."""
    failure = handed_over(Side(attention, "MAMBA2", 2), Side(attention, "MAMBA2"))
    assert failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
    assert "pools[1].regions[0].page_bytes" in failure.message


def test_a_convolution_that_is_laid_out_the_other_way_is_not_handed_over() -> None:
    """VLLM_SSM_CONV_STATE_LAYOUT is an operator's, on each side."""
    ours, theirs = Side(FULL, "MAMBA2"), Side(FULL, "MAMBA2")
    ours.pools = (ours.pools[0], replace(ours.pools[1], axes="convolution:DS"))
    failure = handed_over(ours, theirs)
    assert failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH and "pools[1].axes" in failure.message
