"""In torch, the kernels of vLLM's CPU worker that only a CPU build of vLLM has. Slow, and meant to be read.

A KV cache is (blocks, heads, tokens of a block, head size); a slot is block * tokens of a block + position in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def kernel(arguments: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function vLLM's C++ operator of that name, with these arguments and results."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(function.__name__ + arguments)
        _LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
        return function

    return define


@kernel("(int[] nodes) -> ()")
def init_cpu_memory_env(nodes: list[int]) -> None:
    """Binds memory to NUMA nodes; here there is nothing to bind."""


@kernel("(Tensor starts, Tensor positions, Tensor blocks, Tensor(a!) slots, int size) -> ()")
def compute_slot_mapping_kernel_impl(
    starts: Tensor, positions: Tensor, blocks: Tensor, slots: Tensor, size: int
) -> None:
    """The slot of every token of a batch. Request i has tokens starts[i] to starts[i + 1]; blocks[i] are its own."""
    lengths = (starts[1:] - starts[:-1]).long()
    owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    where = positions[: len(owners)].long()
    slots[: len(owners)] = (blocks[owners, where // size].long() * size + where % size).to(slots.dtype)


@kernel(
    "(int requests, int heads, int kv_heads, int head_size, Tensor lengths, ScalarType dtype, Tensor starts,"
    " bool causal, int window, str isa, bool split, Tensor? causal_of_request, str cache_dtype) -> Tensor"
)
def get_scheduler_metadata(*about: Any) -> Tensor:
    """How a parallel kernel would divide the work; ours does not."""
    return torch.zeros(1)


@kernel(
    "(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, str isa, float key_scale,"
    " float value_scale, str cache_dtype) -> ()"
)
def cpu_attn_reshape_and_cache(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *about: Any
) -> None:
    """Writes new tokens (tokens, heads, head size) to their slots; a negative slot is padding."""
    tokens = torch.nonzero(slots >= 0).flatten()
    blocks, offsets = slots[tokens].long() // keys.shape[2], slots[tokens].long() % keys.shape[2]
    for new, cache in ((key, keys), (value, values)):
        cache[blocks, :, offsets] = new[tokens].to(cache.dtype)


@kernel(
    "(Tensor query, Tensor keys, Tensor values, Tensor(a!) out, Tensor starts, Tensor lengths, float scale,"
    " bool causal, Tensor? slopes, int window, Tensor blocks, float softcap, Tensor metadata, Tensor? sinks,"
    " Tensor? causal_of_request, float key_scale, float value_scale, str cache_dtype) -> ()"
)
def cpu_attention_with_kv_cache(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    slopes: Tensor | None,
    window: int,
    blocks: Tensor,
    *about: Any,
) -> None:
    """Attention of each request's new tokens (tokens, heads, head size) over all that its blocks hold."""
    result = out.view(len(out), query.shape[1], -1)
    for number, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        length = int(lengths[number])
        new = query[begin:end].transpose(0, 1).float()
        if not end - begin:
            continue
        held_keys, held_values = (_gather(each, blocks[number], length, query.shape[1]) for each in (keys, values))
        seen = _seen(end - begin, length, causal, window)
        attended = scaled_dot_product_attention(new, held_keys, held_values, seen, scale=scale)
        result[begin:end] = attended.transpose(0, 1).to(out.dtype)


def _seen(new: int, length: int, causal: bool, window: int) -> Tensor | None:
    """Which tokens each of the last ``new`` ones sees: those up to itself, of a window as many as it is wide."""
    if not causal:
        return None
    tokens, seeing = torch.arange(length), torch.arange(length - new, length)[:, None]
    seen = tokens <= seeing
    return seen & (tokens > seeing - window) if window > 0 else seen


def _gather(cache: Tensor, blocks: Tensor, length: int, heads: int) -> Tensor:
    """(heads, length, head size) of one request, its heads repeated for the query's."""
    size = cache.shape[2]
    own = cache[blocks[: -(-length // size)].long()].transpose(0, 1).flatten(1, 2)[:, :length]
    return own.repeat_interleave(heads // cache.shape[1], 0).float()


@kernel(
    "(Tensor(a!) out, Tensor query, Tensor latents, float scale, Tensor blocks, Tensor lengths) -> ()",
)
def mla_decode_kvcache(
    out: Tensor, query: Tensor, latents: Tensor, scale: float, blocks: Tensor, lengths: Tensor
) -> None:
    """MLA: attention of one new token a request (requests, heads, latent and rope size) over the latents of its blocks,
    (blocks, tokens of a block, latent and rope size), which are keys whole and values without their rope part.
    """
    size, rank = latents.shape[1], out.shape[2]
    for number, length in enumerate(lengths.tolist()):
        held = latents[blocks[number, : -(-length // size)].long()].flatten(0, 1)[:length].float()
        weights = torch.softmax(query[number].float() @ held.T * scale, dim=-1)
        out[number] = (weights @ held[:, :rank]).to(out.dtype)


@kernel("(Tensor logits) -> Tensor")
def greedy_argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


@kernel("(Tensor logits, Tensor seeds) -> Tensor")
def fused_gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """Samples a token of each row, whose noise comes from its own seed."""
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits - noise.log()).argmax(-1)
