"""For SGLANG_ON_CPU_PLUGIN: HiCache's copies between device and host, which are CUDA kernels, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def register() -> None:
    from sglang.srt.mem_cache.pool_host import base, common, mha

    base.HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)
    common._cuda_host_register = lambda *arguments, **named: None
    mha.transfer_kv_all_layer_direct_lf_pf = to_host
    mha.transfer_kv_per_layer_direct_pf_lf = to_device


def to_host(
    layers: Sequence[torch.Tensor],
    hosts: Sequence[torch.Tensor],
    tokens: torch.Tensor,
    host_tokens: torch.Tensor,
    page_size: int,
) -> None:
    """``layers``: K of all layers, then V, [token, head, dim]; ``hosts``: K and V, [page, layer, token, head, dim]."""
    pages, count = host_tokens[::page_size] // page_size, len(layers) // len(hosts)
    for kind, host in enumerate(hosts):
        own = torch.stack([layer[tokens] for layer in layers[kind * count : (kind + 1) * count]], dim=1)
        host[pages] = own.unflatten(0, (-1, page_size)).transpose(1, 2)


def to_device(
    hosts: Sequence[torch.Tensor],
    layers: Sequence[torch.Tensor],
    host_tokens: torch.Tensor,
    tokens: torch.Tensor,
    layer: int,
    page_size: int,
) -> None:
    pages = host_tokens[::page_size] // page_size
    for host, device in zip(hosts, layers, strict=True):
        device[tokens] = host[pages, layer].flatten(0, 1)
