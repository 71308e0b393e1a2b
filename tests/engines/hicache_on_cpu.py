"""For SGLANG_ON_CPU_PLUGIN: HiCache's copies between device and host, which are CUDA kernels, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def register() -> None:
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    base.HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)
    common._cuda_host_register = lambda *arguments, **named: None
    for pool in (mha, mla):
        pool.transfer_kv_all_layer_direct_lf_pf = to_host
        pool.transfer_kv_per_layer_direct_pf_lf = to_device


def to_host(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """From K of all layers, then V, [token, head, dim], to K and V, [page, layer, token, head, dim]."""
    pages, count = dst_indices[::page_size] // page_size, len(src_ptrs) // len(dst_ptrs)
    for kind, host in enumerate(dst_ptrs):
        own = torch.stack([layer[src_indices] for layer in src_ptrs[kind * count : (kind + 1) * count]], dim=1)
        host[pages] = own.unflatten(0, (-1, page_size)).transpose(1, 2)


def to_device(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """From K and V of host pages to those of one layer."""
    pages = src_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id].flatten(0, 1)
