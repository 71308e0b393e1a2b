"""The worker's half of the connector, and no engine: what of vLLM's memory it serves, where, and what it refuses."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.config import (
    AttentionConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvgrpc.engines import compatibility
from kvgrpc.engines.compatibility import (
    ALL_STAGES,
    DRAFTS,
    HAND_OFFS,
    LATENTS,
    REPLICAS,
    STATES,
    TENSOR_PARALLEL,
    WINDOWS,
)
from kvgrpc.engines.vllm.bootstrap import Bootstrap
from kvgrpc.engines.vllm.connector import KvGrpcConnector
from kvgrpc.engines.vllm.groups import groups_of
from kvgrpc.engines.vllm.limits import check_supported, features_of
from kvgrpc.engines.vllm.rank import (
    WorkerProcess,
    bootstrap_address,
    cpu_content,
    layer_numbers,
    model_of,
    pools_of,
    rank_config,
)
from kvgrpc.engines.vllm.reached import reached
from kvgrpc.errors import AddressNotAllowed, FeatureDisabled, InvalidRequest
from kvgrpc.model import Attention, ModelIdentity, Pool, PoolKind, Role

BLOCK = 16


@pytest.mark.parametrize(
    ("text", "address"),
    [("http://10.0.0.1:8998", "10.0.0.1:8998"), ("http://[::1]:8998/", "[::1]:8998"), ("host:1", "host:1")],
)
def test_a_routers_url_is_the_address_of_a_registry(text: str, address: str) -> None:
    assert bootstrap_address(text) == address


def engine(role: str = "kv_producer", extra: dict[str, Any] | None = None, **parallel: Any) -> SimpleNamespace:
    sizes: dict[str, Any] = {
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"), 1),
        **dict.fromkeys(("prefill_context_parallel_size", "tensor_parallel_size", "nnodes"), 1),
        **parallel,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(**sizes, master_addr="10.0.0.9"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            use_mla=False, get_total_num_kv_heads=lambda: 4, model="org/tiny", revision="abc", dtype=torch.float32
        ),
    )


def of_latents(extra: dict[str, Any], method: str | None = None, **parallel: Any) -> SimpleNamespace:
    """Of two decode context parallel ranks."""
    config = engine(extra=extra, decode_context_parallel_size=2, tensor_parallel_size=2, **parallel)
    config.model_config.use_mla = True
    config.speculative_config = method and SimpleNamespace(method=method)
    return config


def cache_config(*specs: Any, blocks: int = 8) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([chr(ord("l") + number)], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(blocks, [], groups, kv_cache_layout="LBHNC")


def attention(kind: Any = FullAttentionSpec, heads: int = 4, **more: Any) -> Any:
    return kind(block_size=BLOCK, num_kv_heads=heads, head_size=8, dtype=torch.float32, **more)


def latents(**more: Any) -> Any:
    return attention(MLAAttentionSpec, heads=1, **more)


def with_setting(where: str, name: str, value: object) -> SimpleNamespace:
    config = engine()
    setattr(config, where, SimpleNamespace(**vars(getattr(config, where, SimpleNamespace())), **{name: value}))
    return config


def with_speculation(method: str, **extra: Any) -> SimpleNamespace:
    config = engine(extra=extra)
    config.speculative_config = SimpleNamespace(method=method)
    return config


WINDOW = attention(SlidingWindowSpec, sliding_window=64)


def state(kind: str = "GDN_ATTN", **more: Any) -> MambaSpec:
    """Of 96 and 128 bytes."""
    shapes, dtypes = ((3, 16), (2, 4, 4)), (torch.bfloat16, torch.float32)
    return MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_type=MambaAttentionBackendEnum[kind], **more)


@pytest.mark.parametrize(
    ("config", "caches", "what"),
    [
        (
            engine("kv_both", pipeline_parallel_size=2),
            cache_config(attention()),
            'kv_both.* ask .* "untried": "pipeline"',
        ),
        (
            engine("kv_both", pipeline_parallel_size=2),
            cache_config(attention(), state()),
            'kv_both.* ask .* "untried": "pipeline"',
        ),
        (
            with_speculation("dflash"),
            cache_config(attention()),
            'speculative decoding by dflash: .*never run; ask for it by name: "untried": "speculative"',
        ),
        (with_speculation("mtp"), cache_config(attention(), state()), "by mtp with layers that keep a state: .*never"),
        (engine(), cache_config(attention(RSWASpec, rswa_window=64)), r"nor a state \(RSWASpec\)"),
        (engine(), cache_config(attention(), state("MAMBA1"), state()), r"kind MAMBA1.*ask .*\"untried\": \"MAMBA1\""),
        (engine(), cache_config(latents(cache_role=SparseCacheRole.INDEXER)), "layers of the kind INDEXER: .*never"),
        (
            engine(),
            cache_config(attention(), attention(SlidingWindowMLASpec, heads=1, sliding_window=64)),
            "layers of the kind SlidingWindowMLASpec: .*never",
        ),
        (engine(), cache_config(latents(tokens_per_state=4)), "layers of the kind COMPRESSED: .*never"),
        (
            engine(),
            cache_config(attention(SinkFullAttentionSpec, sink_len=BLOCK)),
            r"layers of the kind SinkFullAttentionSpec: .*never.*\"untried\": \"SinkFullAttentionSpec\"",
        ),
        (
            engine(extra={"untried": "dcp"}, decode_context_parallel_size=2),
            cache_config(attention()),
            r"--decode-context-parallel-size 2 without latents \(MLA\), with .*: .*; use --decode-context",
        ),
        (
            of_latents({"untried": "dcp"}),
            cache_config(latents(), attention(SlidingWindowMLASpec, heads=1, sliding_window=64)),
            "--decode-context-parallel-size 2 without latents .*, with several groups of layers",
        ),
        (
            of_latents({"untried": "dcp,compressed"}),
            cache_config(latents(tokens_per_state=4)),
            "--decode-context-parallel-size 2 without latents .*, with several groups of layers",
        ),
        (
            of_latents({"untried": "dcp,speculative"}, method="mtp"),
            cache_config(latents()),
            "--decode-context-parallel-size 2 without .* or with drafts: .* drafts keep",
        ),
        (
            of_latents({"untried": "dcp"}, cp_kv_cache_interleave_size=4),
            cache_config(latents()),
            "--cp-kv-cache-interleave-size above 1: .*one by one; use --cp-kv-cache-interleave-size 1",
        ),
        (
            of_latents({"untried": "dcp,context"}, prefill_context_parallel_size=2),
            cache_config(latents()),
            "--decode-context-parallel-size 2 with --prefill-context-parallel-size 2: .*; use one of the two",
        ),
        (of_latents({}), cache_config(latents()), '--decode-context-parallel-size 2: .*never run.*"untried": "dcp"'),
        (
            engine(prefill_context_parallel_size=2),
            cache_config(latents()),
            '--prefill-context-parallel-size 2: .*never run.*"untried": "context"',
        ),
        (
            engine("kv_consumer", {"untried": "context"}, prefill_context_parallel_size=2),
            cache_config(latents()),
            "--prefill-context-parallel-size 2 with kv_role kv_consumer: .*use --prefill-context-parallel-size 1",
        ),
        (
            engine("kv_both", {"untried": "context"}, prefill_context_parallel_size=2),
            cache_config(latents()),
            "--prefill-context-parallel-size 2 with kv_role kv_both",
        ),
        (with_setting("model_config", "enable_sleep_mode", True), cache_config(attention()), "--enable-sleep-mode: "),
        (
            with_setting("attention_config", "hisparse_config", object()),
            cache_config(attention()),
            "HiSparse: .*blocks of the host.*; leave HiSparseConnector out",
        ),
        (
            with_setting("kv_transfer_config", "kv_buffer_device", "elsewhere"),
            cache_config(attention()),
            "kv_buffer_device elsewhere: .*; leave it out of the --kv-transfer-config",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: Any, caches: Any, what: str) -> None:
    with pytest.raises(FeatureDisabled, match=what):
        check_supported(config, caches)


def test_decode_context_parallel_latents_are_served_to_who_asks_for_them_by_name() -> None:
    check_supported(of_latents({"untried": "dcp"}), cache_config(latents()))
    (group,) = groups_of(cache_config(latents()), 2)
    assert (group.block_tokens, group.blocks_of([[5, 6, 7]], 2 * BLOCK, 5 * BLOCK)) == (2 * BLOCK, (6, 7))


def test_the_settings_that_are_looked_at_have_the_names_of_vllms() -> None:
    """Where vLLM calls one otherwise it would be served in silence."""
    for kind, name in (
        (ModelConfig, "enable_sleep_mode"),
        (AttentionConfig, "hisparse_config"),
        (KVTransferConfig, "kv_buffer_device"),
        (MLAAttentionSpec, "cache_role"),
        (MLAAttentionSpec, "tokens_per_state"),
        (VllmConfig, "speculative_config"),
        (VllmConfig, "attention_config"),
        (SpeculativeConfig, "method"),
        (MambaSpec, "mamba_type"),
        (ParallelConfig, "pipeline_parallel_size"),
        (ParallelConfig, "decode_context_parallel_size"),
        (ParallelConfig, "cp_kv_cache_interleave_size"),
        (ParallelConfig, "prefill_context_parallel_size"),
        (ParallelConfig, "data_parallel_index"),
        (ParallelConfig, "nnodes"),
        (ParallelConfig, "master_addr"),
    ):
        assert name in {field.name for field in fields(kind)}
    assert SlidingWindowMLASpec.prefix_replay_tokens
    assert KVTransferConfig().kv_buffer_device == current_platform.device_type


@pytest.mark.parametrize(
    ("sizes", "specs", "more", "uses"),
    [
        ({}, (), {}, []),
        ({"tensor_parallel_size": 2}, (), {}, [TENSOR_PARALLEL]),
        ({"data_parallel_size": 2}, (), {}, [REPLICAS]),
        ({"data_parallel_index": 1}, (), {}, [REPLICAS]),
        ({"pipeline_parallel_size": 2}, (), {}, [ALL_STAGES]),
        ({}, (state(),), {}, [STATES]),
        ({}, (WINDOW,), {}, [WINDOWS]),
        ({}, (), {"model_config": SimpleNamespace(use_mla=True)}, [LATENTS]),
        ({}, (), {"speculative_config": SimpleNamespace(method="mtp")}, [DRAFTS]),
    ],
)
def test_features_of_which_a_vllm_is_looked_at_are_those_that_the_engine_uses(
    sizes: dict[str, int], specs: tuple[Any, ...], more: dict[str, Any], uses: list[str]
) -> None:
    config = engine()
    vars(config.parallel_config).update({"data_parallel_index": 0, **sizes})
    vars(config).update({"speculative_config": None, **more})
    assert features_of(config, cache_config(attention(), *specs)) == [HAND_OFFS, *uses]


def test_what_was_never_run_with_this_vllm_is_told_in_one_line_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compatibility, "version_of", lambda engine: "0.31.0")
    monkeypatch.setattr(compatibility, "_warned", set())
    config = engine("kv_consumer", tensor_parallel_size=2, data_parallel_index=0)
    config.speculative_config = config.kv_events_config = None
    vars(config.kv_transfer_config).update(is_kv_producer=False, is_kv_consumer=True)
    for role in KVConnectorRole:
        KvGrpcConnector(config, role, cache_config(WINDOW, attention()))
    (said,) = [message for message in caplog.messages if "never" in message]
    assert said.startswith("kvgrpc: tensor parallelism, sliding windows: never run with vLLM 0.31.0, but with 0.33.0; ")


def test_a_pipeline_stage_says_which_layers_of_the_model_it_has() -> None:
    config, caches = engine(pipeline_parallel_size=2), cache_config(attention())
    check_supported(config, caches)
    names = [f"model.layers.{number}.self_attn.attn" for number in (3, 2)]
    caches.kv_cache_groups[0].layer_names[:] = names
    memory = {name: torch.zeros(8, 4, BLOCK, 16) for name in names}
    (pool,) = pools_of(memory, config, caches, 0)
    assert [(region.layer, region.address) for region in pool.regions] == [
        (2, memory[names[1]].data_ptr()),
        (3, memory[names[0]].data_ptr()),
    ]
    place = WorkerProcess(config, 0, {}, stage=1)
    assert (rank_config(place, (pool,), model_of(config, pool, place)).layout.pp, place.pp) == (2, 1)


def stage_of(specs: tuple[Any, ...], *layers: Sequence[int]) -> tuple[Pool, ...]:
    """What a stage of two says that has these layers of each group, and no others."""
    config, caches = engine(pipeline_parallel_size=2), cache_config(*specs)
    check_supported(config, caches)
    memory: dict[str, torch.Tensor] = {}
    for group, spec, numbers in zip(caches.kv_cache_groups, specs, layers, strict=True):
        group.layer_names[:] = [f"model.layers.{number}.mixer" for number in numbers]
        shape = (8, 1, 1, 224) if isinstance(spec, MambaSpec) else (8, 4, BLOCK, 16)
        memory.update({name: torch.zeros(shape) for name in group.layer_names})
    return pools_of(memory, config, caches, 0)


def test_a_pipeline_stage_says_which_layers_of_each_group_it_has_and_where_it_has_none() -> None:
    specs = state(), attention(), WINDOW
    assert [(pool.name, list(pool.layers)) for pool in stage_of(specs, [2], [], [0, 4])] == [
        ("kv", []),
        ("swa-1", [0, 4]),
        ("state-2", [2]),
    ]
    kv, window, states = stage_of(specs, [], [5, 3], [])
    assert (list(kv.layers), list(window.layers), list(states.layers)) == ([3, 5], [], [])
    # The type that the model is said to have, and heads, are of the first pool, whoever has its layers.
    (other, *_) = stage_of(specs, [2], [], [])
    assert (other.dtype, other.heads_total, other.head_count) == (kv.dtype, kv.heads_total, kv.head_count)
    assert (kv.dtype, kv.heads_total, kv.head_count) == ("float32", 4, 4)


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["model.layers.1.attn", "model.layers.0.attn"], [1, 0]),
        (["model.layers.1.attn", "model.layers.3.attn"], [1, 3]),
        (["model.layers.1.a", "draft.layers.1.a"], [0, 1]),
        (["layer1.a", "layers.2.experts.3.a"], [0, 1]),
    ],
    ids=["numbered", "with gaps", "twice", "not numbered"],
)
def test_layers_are_numbered_by_their_names_or_in_their_order(names: list[str], numbers: list[int]) -> None:
    assert list(layer_numbers(names, 1)) == numbers
    if numbers == [0, 1]:
        with pytest.raises(FeatureDisabled, match=r"do not number them: .*use --pipeline-parallel-size 1"):
            layer_numbers(names, 2)


@pytest.mark.parametrize("specs", [(WINDOW, attention()), (WINDOW,), (WINDOW, attention(), WINDOW, attention())])
def test_each_group_of_layers_is_a_pool_and_those_that_see_all_tokens_come_first(specs: tuple[Any, ...]) -> None:
    caches = cache_config(*specs)
    check_supported(engine(), caches)
    found = groups_of(caches)
    assert [group.has_window for group in found] == sorted(spec is WINDOW for spec in specs)
    assert [specs[group.index] is WINDOW for group in found] == [group.has_window for group in found]
    assert [group.pool for group in found] == {
        1: ["kv"],
        2: ["kv", "swa-1"],
        4: ["kv", "kv-1", "swa-2", "swa-3"],
    }[len(specs)]
    layers = {name: torch.zeros(8, 4, BLOCK, 16) for name in "lmno"[: len(specs)]}
    for group, pool in zip(found, pools_of(layers, engine(), caches, 0), strict=True):
        assert (pool.name, len(pool.regions), pool.head_count) == (group.pool, 1, 4)
        assert pool.regions[0].address == layers["lmno"[group.index]].data_ptr()


@pytest.mark.parametrize(
    ("kinds", "extra"),
    [
        (("GDN_ATTN",), {}),
        (("MAMBA1",), {"untried": " mamba1"}),
        (("MAMBA1", "LINEAR"), {"untried": ["LINEAR", "MAMBA1"]}),
        ((latents(cache_role=SparseCacheRole.INDEXER, tokens_per_state=4),), {"untried": "indexer,compressed"}),
        ((attention(SinkFullAttentionSpec, sink_len=BLOCK),), {"untried": "SinkFullAttentionSpec"}),
    ],
)
def test_kinds_of_layers_that_were_never_run_are_served_to_who_asks_for_them(kinds: Any, extra: Any) -> None:
    config = engine(extra=extra)
    specs = (state(kind) if isinstance(kind, str) else kind for kind in kinds)
    check_supported(config, cache_config(*specs, attention()))
    WorkerProcess(config, 0, {})  # which refuses keys that it does not know


def test_speculation_that_was_never_run_is_served_to_who_asks_for_it_alone() -> None:
    check_supported(with_speculation("dflash", untried="speculative"), cache_config(attention()))
    check_supported(with_speculation("mtp", untried="speculative"), cache_config(attention(), state()))
    for served in ("draft_model", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "suffix"):
        check_supported(with_speculation(served), cache_config(attention()))
    with pytest.raises(
        FeatureDisabled, match=r"speculative decoding by ngram with layers that keep a state: .*never run"
    ):
        check_supported(with_speculation("ngram"), cache_config(attention(), state()))


def test_drafts_by_layers_are_served_beside_the_layers_that_they_were_run_with() -> None:
    for method, needs_no_layers in (("eagle", False), ("mtp", False), ("ngram", True)):
        config = with_speculation(method)
        if needs_no_layers:
            check_supported(config, cache_config(WINDOW, attention()))
        else:
            with pytest.raises(FeatureDisabled, match=f"decoding by {method} with sliding windows: .*never run"):
                check_supported(config, cache_config(WINDOW, attention()))
        config.model_config.use_mla = True
        if method == "eagle":
            with pytest.raises(FeatureDisabled, match=r"decoding by eagle with latents: .*never run"):
                check_supported(config, cache_config(latents()))
        else:
            check_supported(config, cache_config(latents()))


def test_layers_that_see_the_chunk_of_the_next_token_are_a_pool_as_those_of_a_window_are() -> None:
    caches = cache_config(attention(ChunkedLocalAttentionSpec, attention_chunk_size=2 * BLOCK), attention())
    check_supported(engine(), caches)
    _, chunks = groups_of(caches)
    assert (chunks.pool, chunks.moves_on) == ("swa-1", True)
    assert chunks.blocks_of(([0, 0, 23], []), 0, 2 * BLOCK + 3) == (23,)
    assert chunks.blocks_of(([0, 0], []), 0, 2 * BLOCK) == ()  # the next token begins a chunk


def test_states_are_a_pool_of_their_own_behind_the_others_without_what_fills_their_blocks() -> None:
    caches = cache_config(state(page_size_padded=4096), WINDOW, attention())
    layers = {name: torch.zeros(8, 4, BLOCK, 16) for name in "mn"}
    raw = torch.zeros(8 * 4096, dtype=torch.int8)
    layers["l"] = raw.as_strided((8, 1, 1, 224), (4096, 224, 224, 1))
    kv, window, states = pools_of(layers, engine(), caches, 0)
    assert [pool.name for pool in (kv, window, states)] == ["kv", "swa-1", "state-2"]
    assert (states.kind, states.page_tokens, states.pages, states.heads_total) == (PoolKind.STATE, 0, 8, 0)
    assert states.dtype == "bfloat16,float32" and states.axes in ("convolution:SD", "convolution:DS")
    assert [region[2:] for region in states.regions] == [(raw.data_ptr(), 4096, 224)]


def test_where_all_layers_keep_a_state_it_is_the_first_pool() -> None:
    caches = cache_config(state("MAMBA2"))
    check_supported(engine(), caches)
    (group,) = groups_of(caches)
    (pool,) = pools_of({"l": torch.zeros(8, 1, 1, 224, dtype=torch.int8)}, engine(), caches, 0)
    assert (pool.name, pool.kind, pool.page_tokens) == ("kv", PoolKind.STATE, 0)
    # Wanted behind some tokens, behind all that there are, and of a prompt of one, which has none.
    assert [group.pages_held(*tokens) for tokens in ((0, 40), (2 * BLOCK, 40), (40, 40), (0, 0))] == [0, 0, 1, 0]
    assert group.blocks_of(([7, 8, 9],), 2 * BLOCK, 40) == (9,)


def test_layers_with_heads_of_another_number_are_for_equal_parallel_sizes_only() -> None:
    layers = {"l": torch.zeros(8, 4, BLOCK, 16), "m": torch.zeros(8, 8, BLOCK, 8)}
    caches = cache_config(attention(), attention(SlidingWindowSpec, heads=8, sliding_window=64))
    assert [pool.heads_total for pool in pools_of(layers, engine(), caches, 0)] == [4, 0]


def test_a_page_is_a_block_of_the_scheduler_also_where_kernels_use_smaller_ones() -> None:
    caches = cache_config(attention(heads=2))
    check_supported(engine(), caches)
    layers = {name: torch.zeros(16, 2, BLOCK // 2, 16) for name in ("a", "b")}
    caches.kv_cache_groups[0].layer_names[:] = ["a", "b", "shares b"]
    (pool,) = pools_of({**layers, "shares b": layers["b"]}, engine(tensor_parallel_size=2), caches, 1)
    assert (pool.pages, pool.page_tokens, len(pool.regions)) == (8, BLOCK, 2)
    assert pool.regions[1].page_bytes == pool.regions[1].page_stride_bytes == 2 * 2 * (BLOCK // 2) * 16 * 4
    assert (pool.heads_total, pool.head_start, pool.head_count) == (4, 2, 2)
    assert pool.axes == "LBHNC"  # a page is two of the kernel's: heads lie in two places


@pytest.mark.parametrize(("tp", "heads"), [(0, (0, 1)), (3, (1, 1)), (7, (3, 1))])
def test_with_fewer_heads_than_ranks_several_hold_the_same(tp: int, heads: tuple[int, int]) -> None:
    layers = {"l": torch.zeros(8, 1, BLOCK, 16)}
    (pool,) = pools_of(layers, engine(tensor_parallel_size=8), cache_config(attention(heads=1)), tp)
    assert (pool.head_start, pool.head_count) == heads


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(8, 2, 2, BLOCK, 16)[:, 0],
        torch.zeros(2, 8, 2, BLOCK, 16).transpose(0, 1),
        torch.zeros(9, 2, BLOCK, 16),
    ],
    ids=["layers packed in a row", "keys and values apart", "no whole number of blocks"],
)
def test_memory_that_is_not_block_behind_block_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(FeatureDisabled, match="KV cache of l"):
        pools_of({"l": cache}, engine(), cache_config(attention()), 0)


def rank(place: WorkerProcess) -> Any:
    (pool,) = pools_of({"l": torch.zeros(8, 4, BLOCK, 16)}, engine(), cache_config(attention()), 0)
    assert pool.axes == "head,token,dim"
    return rank_config(place, [pool], model_of(engine(), pool, place))


def test_prefill_serves_its_registry_where_proxies_of_vllms_mooncake_connector_look() -> None:
    place = WorkerProcess(engine(), 0, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9000"})
    assert place.serves_registry and not WorkerProcess(engine(), 1, {}).serves_registry
    assert not WorkerProcess(engine(pipeline_parallel_size=2), 0, {}, stage=1).serves_registry
    assert not WorkerProcess(engine(prefill_context_parallel_size=2), 0, {}, context=1).serves_registry
    config = rank(place)
    assert (config.role, config.registry, config.engine) == (Role.PREFILL, "127.0.0.1:9000", "127.0.0.1-9000")
    assert config.listen == "127.0.0.1:0"


def test_replicas_of_a_dense_model_have_the_next_bootstrap_ports() -> None:
    """vLLM tells each that there is one replica, and its index."""
    (first, second) = (WorkerProcess(engine(data_parallel_index=index), 0, {}) for index in range(2))
    assert (first.bootstrap, second.bootstrap) == ("127.0.0.1:8998", "127.0.0.1:8999")
    assert rank(first).engine != rank(second).engine
    check_supported(engine(data_parallel_index=1), cache_config(attention()))


def test_a_worker_of_both_roles_has_two_ranks_and_the_ports_of_the_settings_once() -> None:
    environment = {"KVGRPC_LISTEN": "127.0.0.1:9100", "KVGRPC_METRICS_LISTEN": "127.0.0.1:9101"}
    config = engine("kv_both")
    prefill, decode = (
        rank(WorkerProcess(config, 0, environment, role)) for role in WorkerProcess(config, 0, environment).roles
    )
    assert (prefill.role, prefill.listen, prefill.registry) == (Role.PREFILL, "127.0.0.1:9100", "127.0.0.1:8998")
    assert (decode.role, decode.listen, decode.registry) == (Role.DECODE, "127.0.0.1:0", "")
    assert (prefill.metrics_listen, decode.metrics_listen) == ("127.0.0.1:9101", "")


@pytest.mark.parametrize(
    ("environment", "nodes", "address"),
    [
        ({}, 1, "127.0.0.1:8998"),
        ({"VLLM_HOST_IP": "10.0.0.1"}, 1, "10.0.0.1:8998"),
        ({"VLLM_HOST_IP": "10.0.0.1"}, 2, "10.0.0.9:8998"),  # of the node with the first worker, which serves it
    ],
)
def test_prefill_answers_the_address_that_others_dial(environment: dict[str, str], nodes: int, address: str) -> None:
    config = engine(nnodes=nodes)
    config.kv_transfer_config.engine_id = "e"
    assert reached(config, environment) == {"remote_bootstrap_addr": f"http://{address}", "remote_engine_id": "e"}


def test_settings_come_from_extra_config_over_the_environment() -> None:
    extra = {"bootstrap_port": 9001, "device": "mlx5_0", "resolve_timeout": "5"}
    place = WorkerProcess(engine(extra=extra), 0, {"VLLM_HOST_IP": "10.0.0.1", "KVGRPC_DEVICE": "tcp"})
    config = rank(place)
    assert (config.device, config.resolve_timeout, config.registry) == ("mlx5_0", 5.0, "10.0.0.1:9001")


def test_both_sides_say_which_model_they_run() -> None:
    assert rank(WorkerProcess(engine(), 0, {})).model == ModelIdentity("tiny", "abc", "float32", Attention.MHA)
    assert rank(WorkerProcess(engine(extra={"model_name": "ours"}), 0, {})).model.name == "ours"
    assert rank(WorkerProcess(engine(), 0, {"KVGRPC_MODEL_NAME": "ours"})).model.name == "ours"


def test_an_external_registry_is_asked_for_prefill_by_its_name() -> None:
    environment = {"KVGRPC_REGISTRY": "10.0.0.5:9000"}
    prefill, decode = WorkerProcess(engine(), 0, environment), WorkerProcess(engine("kv_consumer"), 0, environment)
    assert not prefill.serves_registry and rank(prefill).registry == "10.0.0.5:9000"
    assert decode.external == "10.0.0.5:9000" and rank(decode).registry == ""
    assert rank(decode).bootstrap_allow == ("10.0.0.5",)


@pytest.mark.parametrize("extra", [{"bootstrap_port": "x"}, {"bootstrap_port": 0}, {"no_such_key": 1}])
def test_a_setting_that_cannot_be_is_named(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(extra))):
        WorkerProcess(engine(extra=extra), 0, {})


def test_a_bootstrap_port_that_others_reach_in_plaintext_is_not_opened() -> None:
    bootstrap = Bootstrap("0.0.0.0:8998", "e", None, 10.0)
    with pytest.raises(AddressNotAllowed, match="KVGRPC_INSECURE"):
        bootstrap.open()
    bootstrap.close()


def test_a_bootstrap_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        bootstrap = Bootstrap(address, "e", None, 10.0)
        with pytest.raises(AddressNotAllowed, match=f"{address} cannot be bound.*bootstrap_port"):
            bootstrap.open()
        bootstrap.close()


def by_rows(new: Any, cache: Any, slot: int) -> None:
    cache[slot // cache.shape[2], :, slot % cache.shape[2]] = new[0]


def by_columns(new: Any, cache: Any, slot: int) -> None:
    """As vLLM's csrc/cpu/cpu_attn_vec.hpp does with keys: (heads, head size, tokens of a block)."""
    block, place = divmod(slot, cache.shape[2])
    for head in range(cache.shape[1]):
        cache[block, head].view(-1)[place :: cache.shape[2]] = new[0, head]


@pytest.mark.parametrize(
    ("keys", "axes"),
    [(by_rows, "head,kv,token,dim"), (by_columns, "head,kv,vec-.{8}"), (None, "head,kv,unknown-.{32}")],
)
def test_the_kernel_for_cpus_is_asked_where_it_keeps_a_token(
    monkeypatch: pytest.MonkeyPatch, keys: Any, axes: str
) -> None:
    def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, isa: str) -> None:
        for number, slot in enumerate(slots.tolist()):
            keys(key[number:], key_cache, slot)
            by_rows(value[number:], value_cache, slot)

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", write)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    cache = torch.zeros(8, 4, BLOCK, 16)
    found, again = cpu_content(cache), cpu_content(cache)
    assert re.fullmatch(axes, found)
    assert (found == again) is (keys is not None)  # an order that is not known is nobody else's
