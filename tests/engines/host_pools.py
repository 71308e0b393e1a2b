"""SGLang's own host pools, small ones, and pages of them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

PAGE = 16
PAGES = 12
HASHES = [f"{number:064x}" for number in range(PAGES)]
# Of a page, as SGLang's pools have it: K and V, layers, tokens, heads, elements.
PAGES_OF = {
    "layer_first": lambda pool, page: pool.kv_buffer[:, :, page * PAGE : (page + 1) * PAGE],
    "page_first": lambda pool, page: pool.kv_buffer[:, page * PAGE : (page + 1) * PAGE].transpose(1, 2),
    "page_first_direct": lambda pool, page: pool.kv_buffer[:, page],
    "page_head": lambda pool, page: pool.kv_buffer[:, page].transpose(1, 3),
}


def host_pool(layout: str = "page_first", heads: int = 2) -> Any:
    device = MHATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    size = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False}
    if hasattr(device, "_mha_buffer_info"):
        layers = {"device_capacity_tokens": PAGES * PAGE, "start_layer": 0, "end_layer": 3}
        pool = MHATokenToKVPoolHost(device._mha_buffer_info(), **size, **layers)
    else:  # before 0.5.23
        pool = MHATokenToKVPoolHost(device, **size)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def flat(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE, flat=True).clone()


def config(rank: int = 0, **extra: object) -> HiCacheStorageConfig:
    loader = {
        "backend_name": "kvgrpc",
        "module_path": "kvgrpc.engines.sglang.hicache",
        "class_name": "KvGrpcStorage",
        "interface_v1": 1,
    }
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="tiny/Llama",
        extra_config={**loader, **extra},
    )
