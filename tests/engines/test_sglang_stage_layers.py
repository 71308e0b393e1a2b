"""What a pipeline stage says of pools that SGLang's own classes made: each region is where SGLang looks for that layer.

No engine is started.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.disaggregation import utils
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvgrpc.engines.sglang.rank import SchedulerProcess, pools
from kvgrpc.engines.sglang.stages.layers import telling
from kvgrpc.model import Layout, Role

PAGE, HEADS, WIDTH = 16, 2, 8
FULL, OTHERS = [3, 5, 6], [4, 7]  # the layers of a second stage
PLACE = SchedulerProcess(
    Role.PREFILL, Layout(pp=2), 0, 0, "127.0.0.1", "127.0.0.1", 1, "", "cpu", kv_heads=HEADS, pp=1, first_layer=3
)


def kv_args(pool: Any) -> Any:
    """As SGLang fills it."""
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    about: Any = SimpleNamespace(page_size=PAGE, kv_cache_dtype_str="float32", gpu_id=0)
    about.kv_data_ptrs, about.kv_data_lens, about.kv_item_lens = addresses, lengths, items
    about.kv_layer_ids = utils.build_kv_layer_ids(
        token_to_kv_pool=pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=8
    )
    utils.setup_state_kv_args(about, pool)
    return about


def addresses_of(about: Any) -> list[dict[tuple[int, str], int]]:
    """Of each pool."""
    return [
        {(region.layer, region.component): region.address for region in pool.regions} for pool in pools(about, PLACE)
    ]


@pytest.fixture
def windows() -> SWAKVPool:
    return SWAKVPool(
        size=8 * PAGE,
        size_swa=4 * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=WIDTH,
        swa_attention_layer_ids=OTHERS,
        full_attention_layer_ids=FULL,
        device="cpu",
    )


def keys_and_values(pool: Any, layers: list[int]) -> dict[tuple[int, str], int]:
    keys = {(layer, "k"): pool.get_key_buffer(layer).data_ptr() for layer in layers}
    return keys | {(layer, "v"): pool.get_value_buffer(layer).data_ptr() for layer in layers}


def test_windows_and_the_rest_are_where_sglang_has_them(windows: SWAKVPool) -> None:
    about = kv_args(windows)
    telling(lambda: True)(None, about, windows, None, 8, req_to_token_pool=None)
    assert addresses_of(about) == [keys_and_values(windows, FULL), keys_and_values(windows, OTHERS)]


def test_where_another_backend_serves_nothing_is_told(windows: SWAKVPool) -> None:
    about = kv_args(windows)
    telling(lambda: False)(None, about, windows)
    assert (about.kv_layer_ids, about.state_layer_ids) == ([], [[]])


def test_of_pools_with_a_draft_model_nothing_is_told(windows: SWAKVPool) -> None:
    """As many latents as the model's own look like keys and values; its layers would have the numbers of others."""
    about, latents = kv_args(windows), len(FULL)
    for field in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
        setattr(about, field, 2 * getattr(about, field)[:latents])
    about.num_draft_entries = latents
    telling(lambda: True)(None, about, windows)
    assert about.kv_layer_ids == []


def test_states_and_the_rest_are_where_sglang_has_them() -> None:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=16, conv_kernel=4
    )
    requests = HybridReqToTokenPool(
        size=4,
        mamba_size=4,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[1, *OTHERS]),
        mamba_layer_ids=OTHERS,
        enable_mamba_extra_buffer=False,
    )
    pool = HybridLinearKVPool(
        size=8 * PAGE,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        full_attention_layer_ids=FULL,
        device="cpu",
        mamba_pool=requests.mamba_pool,
        start_layer=3,
    )
    kept = {layer: requests.mamba2_layer_cache(layer) for layer in OTHERS}
    states = {(layer, "state"): own.conv[0].data_ptr() for layer, own in kept.items()}
    states |= {(layer, "state-1"): own.temporal.data_ptr() for layer, own in kept.items()}
    assert addresses_of(kv_args(pool)) == [keys_and_values(pool, FULL), states]
