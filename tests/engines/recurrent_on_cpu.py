"""Lets vLLM run models with states on a CPU in a way that a test can rely on.

Its gated delta net asks for bfloat16, as its kernels in C++ do. With those the tokens of two engines would differ by
rounding, and of what a hand-off lost nothing could be said: here it has 32 bits. And its prefix cache copies states
with a kernel for GPUs.
"""

from __future__ import annotations

import ctypes
import inspect
from typing import Any


def register() -> None:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import _resolve_layer_name
    from vllm.v1.worker import mamba_utils

    def attend(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None:
            return
        about = context.attn_metadata[layer.prefix]
        if about.num_actual_tokens:
            gdn_attention._cpu_gdn_attention_nonspec(layer, about, mixed_qkv, b, a, core_attn_out)

    # torch reads the types of an operator's arguments there.
    attend.__annotations__ = inspect.get_annotations(gdn_attention.cpu_gdn_attention_core, eval_str=True)
    gdn_attention.cpu_gdn_attention_core = attend
    mamba_utils.batch_memcpy = _copy


def _copy(sources: Any, destinations: Any, sizes: Any) -> None:
    for source, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(destination, source, size)
