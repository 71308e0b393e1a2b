"""Asks vLLM's attention for CPUs where a token is in its block: its kernels pack keys as their processor likes them."""

from __future__ import annotations

import logging

import torch

BY_TOKENS = "head,kv,token,dim"
logger = logging.getLogger("vllm." + __name__)


def cpu_content(cache: torch.Tensor) -> str:
    """Our words for the order of a block (heads, tokens, content) of a layer's ``cache``: keys of all tokens, then
    values, where each token has its own bytes; else the name of the kernel, which others then have to have too.

    A token is written where nobody looks, because vLLM's build of C++ decides it. Raises nothing.
    """
    try:
        from vllm import _custom_ops as kernels
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        heads, tokens, content = cache.shape[1:]
        isa = str(_get_attn_isa(cache.dtype, tokens, content // 2))
        block = torch.zeros((1, heads, 2 * tokens, content // 2), dtype=cache.dtype)
        keys, values = block.chunk(2, dim=2)
        new = torch.arange(1, 1 + heads * content // 2, dtype=cache.dtype).reshape(1, heads, content // 2)
        kernels.cpu_attn_reshape_and_cache(new, -new, keys, values, torch.tensor([1]), isa)
    except Exception as error:
        logger.info("kvgrpc: where vLLM's CPU attention keeps a token is not known: %s", error)
        return "head,kv,unknown"
    apart = torch.equal(keys[0, :, 1], new[0]) and torch.equal(values[0, :, 1], -new[0])
    return BY_TOKENS if apart else f"head,kv,{isa}"
