"""A scheduler process of SGLang and its memory, as SGLang describes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvgrpc.engines.sglang.rank import SchedulerProcess
from kvgrpc.model import Attention, Layout, ModelIdentity, Role

LAYERS, PAGES, PAGE_BYTES = 2, 10, 4096


def kv_args(**more: Any) -> SimpleNamespace:
    """As SGLang fills it for MHA: all K layers, then all V layers; items are pages."""
    entries = 2 * LAYERS
    given = {
        "page_size": 16,
        "kv_cache_dtype_str": "bfloat16",
        "kv_data_ptrs": [0x10000 * (entry + 1) for entry in range(entries)],
        "kv_data_lens": [PAGES * PAGE_BYTES] * entries,
        "kv_item_lens": [PAGE_BYTES] * entries,
        "aux_data_ptrs": [0x900000, 0xA00000],
        "aux_data_lens": [640, 6400],
        "aux_item_lens": [64, 640],
        "gpu_id": 3,
        **more,
    }
    return SimpleNamespace(**given)


MODEL = ModelIdentity("tiny", "abc", "float16", Attention.MHA)


def place(
    role: Role = Role.PREFILL, host: str = "127.0.0.1", device: str = "cpu", kv_heads: int = 0
) -> SchedulerProcess:
    return SchedulerProcess(
        role=role,
        layout=Layout(dp=2, tp=4),
        dp=1,
        tp=3,
        host=host,
        local_ip="10.1.2.3",
        port=8998,
        bootstrap="127.0.0.1:8998",
        device=device,
        model=MODEL,
        kv_heads=kv_heads,
    )
