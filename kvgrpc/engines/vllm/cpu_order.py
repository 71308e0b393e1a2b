"""Asks vLLM's attention for CPUs where a token is in its block: its kernels pack keys as their processor likes them."""

from __future__ import annotations

import logging
import uuid
import zlib

import torch

BY_TOKENS = "head,kv,token,dim"
logger = logging.getLogger("vllm." + __name__)


def cpu_content(cache: torch.Tensor) -> str:
    """Our words for the order of a block (heads, tokens, content) of a layer's ``cache``: keys of all tokens, then
    values, where each token has its own bytes; else the kernel's name and a checksum of a block as it packs it, which
    others have to have too. An order that is not known is nobody else's.

    A block is written where nobody looks, because vLLM's build of C++ decides it. Raises nothing.
    """
    try:
        from vllm import _custom_ops as kernels
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        tokens, size = cache.shape[2], cache.shape[3] // 2
        isa = str(_get_attn_isa(cache.dtype, tokens, size))
        block = torch.zeros((1, 1, 2 * tokens, size), dtype=cache.dtype)
        keys, values = block.chunk(2, dim=2)
        # A prime, which no power of two repeats, and small enough for each dtype.
        new = (torch.arange(tokens * size) % 251 + 1).to(cache.dtype).reshape(tokens, 1, size)
        kernels.cpu_attn_reshape_and_cache(new, -new, keys, values, torch.arange(tokens), isa)
    except Exception as error:
        logger.info("kvgrpc: where vLLM's CPU attention keeps a token is not known: %s", error)
        return f"head,kv,unknown-{uuid.uuid4().hex}"
    if torch.equal(keys[0, 0], new[:, 0]) and torch.equal(values[0, 0], -new[:, 0]):
        return BY_TOKENS
    return f"head,kv,{isa}-{zlib.crc32(block.view(torch.uint8).numpy().tobytes()):08x}"
