"""Lets SGLang's torch_native attention fill up the batch of a data-parallel rank that has fewer tokens than another: it
lacks the length of a request that fills up, which SGLang's other attention for CPUs says, and which is 1.
"""

from __future__ import annotations

from tests.engines import hicache_on_cpu, latent_on_cpu


def register() -> None:
    latent_on_cpu.register()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def register_with_host_tier() -> None:
    register()
    hicache_on_cpu.register()
