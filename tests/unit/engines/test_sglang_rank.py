"""What SGLang says of a scheduler process, as a rank; without SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.engines.addresses import engine_name, registry_of
from kvgrpc.engines.sglang.rank import layers_told, pages_of_pools, rank_config, regions_of, state_names
from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Layout, PoolKind, Role
from kvgrpc.server import AuxBuffer
from tests.support.sglang_process import MODEL, PAGE_BYTES, PAGES, kv_args, place

SIZES = {"data": 5, "item": 1}  # slots


def test_every_entry_of_the_kv_cache_is_a_region_in_sglangs_order() -> None:
    pool = rank_config(kv_args(), place()).pools[0]
    assert [region.address for region in pool.regions] == kv_args().kv_data_ptrs
    assert [region.layer for region in pool.regions] == [0, 1, 2, 3]
    assert (pool.pages, pool.page_tokens, pool.dtype, pool.location) == (PAGES, 16, "float16", "cpu:0")


def test_keys_and_values_of_a_layer_are_told_apart_where_there_are_heads() -> None:
    pool = rank_config(kv_args(), place(kv_heads=8)).pools[0]
    assert [(region.layer, region.component) for region in pool.regions] == [(0, "k"), (1, "k"), (0, "v"), (1, "v")]


def test_layers_of_a_draft_model_come_behind_those_of_the_model() -> None:
    assert regions_of(6, 2, heads=8) == [(0, "k"), (1, "k"), (0, "v"), (1, "v"), (2, "k"), (2, "v")]
    assert regions_of(3, 1, heads=0) == [(0, "latent"), (1, "latent"), (2, "latent")]


def test_a_rank_says_which_heads_it_holds_and_where_they_lie_in_a_page() -> None:
    pool = rank_config(kv_args(), place(kv_heads=8)).pools[0]
    assert (pool.heads_total, pool.head_start, pool.head_count) == (8, 6, 2)
    assert pool.axes == "token,head,dim"


def test_each_rank_may_hold_all_heads() -> None:
    pool = rank_config(kv_args(), replace(place(kv_heads=8), has_all_heads=True)).pools[0]
    assert (pool.heads_total, pool.head_start, pool.head_count) == (8, 0, 8)


def test_with_fewer_heads_than_ranks_several_hold_the_same() -> None:
    pool = rank_config(kv_args(), place(kv_heads=2)).pools[0]
    assert (pool.heads_total, pool.head_start, pool.head_count) == (2, 1, 1)


def test_with_mla_every_rank_holds_all() -> None:
    pool = rank_config(kv_args(), place()).pools[0]
    assert (pool.heads_total, pool.head_start, pool.head_count, pool.axes) == (0, 0, 0, "")


@pytest.mark.parametrize(
    ("item_bytes", "heads"), [(PAGE_BYTES, (8, 6, 2)), (2 * PAGE_BYTES, (0, 0, 0))], ids=["as others", "other heads"]
)
def test_layers_with_a_sliding_window_are_a_pool_of_their_own(item_bytes: int, heads: tuple[int, int, int]) -> None:
    state = {
        "state_types": ["swa"],
        "state_data_ptrs": [[0x500000, 0x600000]],
        "state_data_lens": [[6 * item_bytes] * 2],
        "state_item_lens": [[item_bytes] * 2],
        "swa_kv_cache_layout": "nhd",
    }
    kv, windows = rank_config(kv_args(**state), place(kv_heads=8)).pools
    assert (kv.name, kv.pages, windows.name, windows.pages, windows.page_tokens) == ("kv", PAGES, "swa", 6, 16)
    assert [(each.layer, each.component, each.address, each.page_bytes) for each in windows.regions] == [
        (0, "k", 0x500000, item_bytes),
        (0, "v", 0x600000, item_bytes),
    ]
    assert (windows.heads_total, windows.head_start, windows.head_count) == heads


def test_states_are_pools_by_sglangs_names_of_the_entries_that_have_memory() -> None:
    state = {
        "state_types": ["mamba", "swa", "mamba"],
        "state_data_ptrs": [[0x500000, 0x600000], [0x700000], [0, 0x800000]],
        "state_data_lens": [[5 * 64, 7 * 128], [640], [0, 96]],
        "state_item_lens": [[64, 128], [64], [32, 32]],
    }
    kv, first, windows, second = rank_config(kv_args(**state), place(kv_heads=8)).pools
    assert [pool.name for pool in (kv, first, windows, second)] == ["kv", "mamba", "swa", "mamba-2"]
    assert [pool.kind for pool in (kv, first, windows, second)] == [PoolKind.KV] + [PoolKind.STATE] * 3
    assert (first.pages, first.page_tokens, first.heads_total, second.pages) == (5, 0, 0, 3)
    assert [region[:3] for region in first.regions] == [(0, "state", 0x500000), (1, "state", 0x600000)]
    assert [region.page_bytes for region in first.regions] == [64, 128]
    assert [region.layer for region in second.regions] == [1], "an entry without memory keeps its place"


def test_layers_of_windows_and_of_the_rest_have_the_numbers_that_sglang_tells() -> None:
    state = {
        "state_types": ["swa"],
        "state_data_ptrs": [[0x500000, 0x600000]],
        "state_data_lens": [[6 * PAGE_BYTES] * 2],
        "state_item_lens": [[PAGE_BYTES] * 2],
        "swa_kv_cache_layout": "nhd",
        "kv_layer_ids": [3, 5, 3, 5],
        "state_layer_ids": [[4, 4]],
    }
    kv, windows = rank_config(kv_args(**state), replace(place(kv_heads=8), pp=1, first_layer=0)).pools
    assert [region[:2] for region in kv.regions] == [(3, "k"), (5, "k"), (3, "v"), (5, "v")]
    assert [region[:2] for region in windows.regions] == [(4, "k"), (4, "v")]


def test_what_a_layer_keeps_of_a_request_is_told_apart_and_has_the_layers_number() -> None:
    state: dict[str, Any] = {"state_types": ["mamba"], "state_layer_ids": [[0, 2, 0, 2]]}
    state["state_data_ptrs"] = [[0x500000, 0x510000, 0x600000, 0x610000]]
    state.update({f"state_{what}_lens": [[count * 64] * 2 + [count * 32] * 2] for what, count in SIZES.items()})
    _, states = rank_config(kv_args(**state, kv_layer_ids=[1, 3, 1, 3]), place(kv_heads=8)).pools
    assert [region[:3] for region in states.regions] == [
        (0, "state", 0x500000),
        (2, "state", 0x510000),
        (0, "state-1", 0x600000),
        (2, "state-1", 0x610000),
    ]


def test_keys_and_values_of_a_draft_beside_latents_are_told_apart_where_both_have_the_layers_number() -> None:
    drafts: dict[str, Any] = {"num_draft_entries": 2, "kv_layer_ids": [3, 7, 8, 8]}
    (kv,) = rank_config(kv_args(**drafts), place(kv_heads=0)).pools
    expected = [(3, "latent"), (7, "latent"), (8, "latent"), (8, "latent-1")]
    assert [(region.layer, region.component) for region in kv.regions] == expected


def test_states_without_numbers_of_a_stage_are_counted_from_its_first_layer() -> None:
    state = {"state_types": ["dsa"], "state_data_ptrs": [[0x500000, 0]]}
    state |= {"state_data_lens": [[640, 0]], "state_item_lens": [[64, 0]]}
    kv, states = rank_config(kv_args(**state), replace(place(), first_layer=3)).pools
    assert [region.layer for region in kv.regions] == [3, 4, 5, 6]
    assert [region.layer for region in states.regions] == [3]


def test_numbers_that_are_not_of_all_entries_number_none() -> None:
    args = kv_args(kv_layer_ids=[3, 5, 3], state_layer_ids=[[7]], state_item_lens=[[64, 64]])
    assert (list(layers_told(args)), list(layers_told(args, 0))) == ([], [])
    assert [region.layer for region in rank_config(args, place(kv_heads=8)).pools[0].regions] == [0, 1, 0, 1]


def test_a_state_says_what_it_is_made_of_since_sizes_do_not_tell() -> None:
    state: dict[str, Any] = {"state_data_ptrs": [[1], [2]], "state_data_lens": [[64], [64]]}
    state |= {"state_types": ["mamba", "dsa"], "state_item_lens": [[64], [64]]}
    process = replace(place(), state_dtype="bfloat16,float32", state_axes="convolution:amx")
    _, mamba, others = rank_config(kv_args(**state), process).pools
    assert (mamba.dtype, mamba.axes) == ("bfloat16,float32", "convolution:amx")
    assert (others.dtype, others.axes) == (MODEL.cache_dtype, "")


def test_pages_of_each_pool_are_given_by_its_name_with_the_last_chunk() -> None:
    names = state_names(kv_args(state_types=["mamba", "dsa", "request_row"]))
    assert pages_of_pools((), [1, 2], None) == [1, 2]
    assert pages_of_pools(names, [1, 2], None) == {"kv": [1, 2]}
    pages = pages_of_pools(names, [1, 2], [[np.array(7)], np.array([3, 4]), None])
    assert {name: list(own) for name, own in pages.items()} == {
        "kv": [1, 2],
        "mamba": [7],
        "dsa": [3, 4],
        "request_row": [],
    }
    assert list(pages_of_pools(names, [], [[np.array([7])], (), ()])["mamba"]) == [7]


def test_the_model_is_told_to_the_other_side() -> None:
    assert rank_config(kv_args(), place()).model == MODEL


def test_memory_of_a_gpu_is_named_by_its_number() -> None:
    assert rank_config(kv_args(), place(device="cuda")).pools[0].location == "cuda:3"


def test_aux_buffers_keep_sglangs_order_with_the_room_last() -> None:
    assert rank_config(kv_args(), place()).aux == (AuxBuffer(0x900000, 64, 10), AuxBuffer(0xA00000, 640, 10))


def test_coordinates_and_the_registry_are_sglangs() -> None:
    config = rank_config(kv_args(), place())
    assert (config.layout, config.dp, config.tp) == (Layout(dp=2, tp=4), 1, 3)
    assert (config.engine, config.registry, config.listen) == ("127.0.0.1-8998", "127.0.0.1:8998", "127.0.0.1:0")


def test_decode_registers_nowhere() -> None:
    assert rank_config(kv_args(), place(Role.DECODE)).registry == ""


def test_a_wildcard_is_bound_and_an_address_given_to_peers() -> None:
    config = rank_config(kv_args(), place(host="0.0.0.0"))
    assert (config.listen, config.advertise, config.engine) == ("0.0.0.0:0", "10.1.2.3", "10.1.2.3-8998")


def test_the_environment_is_stronger_than_sglang_but_for_what_sglang_alone_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVGRPC_ENGINE", "prefill-a")
    monkeypatch.setenv("KVGRPC_LISTEN", "127.0.0.1:7777")
    monkeypatch.setenv("KVGRPC_DEVICE", "mlx5_0")
    config = rank_config(kv_args(ib_device="mlx5_7"), place())
    assert (config.engine, config.listen, config.device) == ("prefill-a", "127.0.0.1:7777", "mlx5_0")
    assert (config.role, config.tp) == (Role.PREFILL, 3)


def test_a_setting_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRPC_START_TIMEOUT", "soon")
    with pytest.raises(InvalidRequest, match="start_timeout"):
        rank_config(kv_args(), place())


def test_an_external_registry_may_be_dialled_and_knows_the_engine_by_its_bootstrap_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVGRPC_REGISTRY", "10.9.9.9:8000")
    assert rank_config(kv_args(), place()).registry == "10.9.9.9:8000"
    assert rank_config(kv_args(), place(Role.DECODE)).bootstrap_allow == ("10.9.9.9",)
    assert registry_of("127.0.0.1:8998", "10.9.9.9:8000") == "10.9.9.9:8000/127.0.0.1-8998"
    assert registry_of("127.0.0.1:8998", "") == "127.0.0.1:8998"


def test_ipv6_with_and_without_brackets_is_one_name() -> None:
    assert engine_name("[fe80::1]:8998") == engine_name("fe80::1:8998") == "fe80--1-8998"
