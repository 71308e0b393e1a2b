"""Lets SGLang's attention for CPUs compute MLA, always in the absorbed form: keys and values are what the pool holds.

Of a prompt without a cached prefix SGLang would give it keys and values of all heads, which torch_native, unlike the
backends for GPUs, does not look at: it reads the pool. And on a CPU SGLang has positions for the scaled ones of
DeepSeek alone.
"""

from __future__ import annotations


def register() -> None:
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    factory.get_rope_cpu = lambda *arguments: factory.get_rope(*arguments[:-1])  # the last one is the device
