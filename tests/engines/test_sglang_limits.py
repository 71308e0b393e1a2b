"""What ends the start of an engine, each with its reason and its remedy; and what SGLang's queue does with our hook.

Over the modules of the real SGLang; no engine is started.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import Derived, namespace_of
from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import resolve_kv_cache_quant
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPoolFP4
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvgrpc.engines.compatibility import (
    DECODE_STAGES,
    DRAFTS,
    HAND_OFFS,
    LATENTS,
    REPLICAS,
    STAGES,
    STATES,
    TENSOR_PARALLEL,
    WINDOWS,
)
from kvgrpc.engines.sglang import limits, manager
from kvgrpc.engines.sglang.cache import opening
from kvgrpc.engines.sglang.manager import EveryPrefill, KvGrpcManager
from kvgrpc.engines.sglang.plugin import RELEASE_TIMEOUT, install
from kvgrpc.errors import FeatureDisabled

SERVED: dict[str, dict[str, Any]] = {
    "parallel": {
        "pp_size": 1,
        "attn_cp_size": 1,
        "attn_dcp_size": 1,
        "enable_kv_cache_sharding": False,
        "enable_dsa_cache_layer_split": False,
        "enable_cp_tp_group_sharing": False,
    },
    "disagg": {
        "enable_pd_role_switch": False,
        "disaggregation_decode_allocation_policy": "early",
        "disaggregation_transfer_backend": "kvgrpc",
        "disaggregation_mode": "decode",
        "disaggregation_decode_host_receive_threshold": 1.0,
        "disaggregation_enable_kv_checksum": False,
        "optimistic_prefill_attempts": 0,
        "disaggregation_decode_enable_radix_cache": False,
    },
    "serving": {"tokenizer_worker_num": 1},
    "spec": {"speculative_algorithm": None, "enable_multi_layer_eagle": False},
    "memory": {"enable_unified_memory": False, "enable_hisparse": False, "enable_hierarchical_cache": False},
}
# What is set; what the refusal names, why, and what to do.
REFUSED = {
    "attention cp at decode": (
        "parallel",
        {"attn_cp_size": 2},
        "--attn-cp-size 2 at decode: .*to one such rank alone; use --attn-cp-size 1 there",
    ),
    "decode cp": (
        "parallel",
        {"attn_dcp_size": 4},
        "--dcp-size 4 without latents .*some of a request's tokens, .*; use --dcp-size 1",
    ),
    "sharding": ("parallel", {"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding: .*pages; leave it out"),
    "hisparse": ("memory", {"enable_hisparse": True}, "--enable-hisparse: .*pages of the host.*; leave it out"),
    "host memory": (
        "disagg",
        {"disaggregation_decode_host_receive_threshold": 0.5},
        "--disaggregation-decode-host-receive-threshold 0.5: .*the device alone; leave it out",
    ),
    "role switch": ("disagg", {"enable_pd_role_switch": True}, "--enable-pd-role-switch: .*keeps the role.*; start"),
    "allocation": (
        "disagg",
        {
            "disaggregation_decode_allocation_policy": "prefill_complete",
            "optimistic_prefill_attempts": 1,
            "disaggregation_mode": "prefill",
        },
        "--disaggregation-decode-allocation-policy prefill_complete: .*before prefill has computed them; use early",
    ),
    "checksum": (
        "disagg",
        {"disaggregation_enable_kv_checksum": True},
        "--disaggregation-enable-kv-checksum: .*never run.*; leave it out, or set KVGRPC_UNTRIED=checksum",
    ),
    "optimistic prefill": (
        "disagg",
        {"optimistic_prefill_attempts": 3, "disaggregation_mode": "prefill"},
        "--optimistic-prefill-attempts 3: .*never run.*; leave it out, or set KVGRPC_UNTRIED=optimistic",
    ),
    "tokenizers": (
        "serving",
        {"tokenizer_worker_num": 2},
        "--tokenizer-worker-num 2 .*load no plug-ins.*; use --disaggregation-transfer-backend mooncake and KVGRPC_",
    ),
}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """SGLang's settings as this process has them; a test changes some."""
    given = {name: dict(values) for name, values in SERVED.items()}
    for name, values in given.items():
        monkeypatch.setattr(limits, f"get_{name}", lambda values=values: SimpleNamespace(**values))
    features = SimpleNamespace(enable_memory_saver=False)
    given["features"] = vars(features)
    monkeypatch.setattr(limits, "get_exec", lambda: SimpleNamespace(features=features))
    return given


def kv_args(*states: StateType, layout: str | None = None) -> Any:
    return SimpleNamespace(state_types=list(states), swa_kv_cache_layout=layout)


def test_what_an_older_sglang_has_by_default_is_served(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "default_of", lambda setting: 0.0)
    settings["disagg"]["disaggregation_decode_host_receive_threshold"] = 0.0
    limits.check_supported(kv_args())


def test_the_settings_have_the_names_of_sglangs_arguments() -> None:
    """Where SGLang calls one otherwise it would be served in silence."""
    computed = [name for name, value in vars(Parallel).items() if isinstance(value, Derived)]
    places = {**namespace_of(ServerArgs), **dict.fromkeys(computed, "parallel")}
    for where, settings in SERVED.items():
        assert {name: places.get(name) for name in settings} == dict.fromkeys(settings, where)
    assert places["enable_memory_saver"] == "exec.features"


def test_each_name_that_may_be_missing_in_sglang_is_one_of_its_own() -> None:
    """All that the limits look at by name: settings, variables, and what a rank says of its memory."""
    source = inspect.getsource(limits)
    names = set(re.findall(r'\b(?:has|getattr|is_set)\((?:[\w()]+, )?"(\w+)"', source))
    names |= set(re.findall(r'^[A-Z_]+ = "(\w+)"$', source, re.MULTILINE)) - {limits.UNTRIED}
    known = {*SERVED["parallel"], *namespace_of(ServerArgs), *KVArgs.__annotations__, *dir(envs)}
    assert len(names) > 15 and names - known == set()


# Of a stage with two layers of either kind, as SGLang describes it: keys and values.
WINDOWS_OF_A_STAGE: dict[str, Any] = {
    "state_types": [StateType.SWA],
    "swa_kv_cache_layout": "nhd",
    "kv_item_lens": [64] * 4,
    "kv_layer_ids": [1, 3, 1, 3],
    "state_item_lens": [[64] * 4],
    "state_layer_ids": [[0, 2, 0, 2]],
}


@pytest.mark.parametrize("state", [StateType.SWA, StateType.MAMBA])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_pipeline_stages_are_served_where_each_layer_has_a_number(
    settings: dict[str, dict[str, Any]], state: StateType, role: str
) -> None:
    settings["parallel"]["pp_size"] = 2
    settings["disagg"]["disaggregation_mode"] = role
    limits.check_supported(kv_args())
    limits.check_supported(SimpleNamespace(**{**WINDOWS_OF_A_STAGE, "state_types": [state]}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"state_layer_ids": [[]]}, "--pp-size 2 with swa: SGLang does not say.*; use --pp-size 1"),
        ({"kv_layer_ids": []}, "--pp-size 2 with swa: SGLang does not say.*; use --pp-size 1"),
        ({"kv_layer_ids": [1, 3]}, "--pp-size 2 with swa: SGLang does not say.*; use --pp-size 1"),
        (
            {"state_item_lens": [[]], "state_layer_ids": [[]]},
            "--pp-size 2 with a stage that has no layers of swa: .*SGLANG_PP_LAYER_PARTITION.*, or use --pp-size 1",
        ),
        ({"kv_item_lens": [], "kv_layer_ids": []}, "--pp-size 2 with a stage that has no layers of kv: "),
        ({"num_draft_entries": 2, "state_types": []}, "--pp-size 2 with a draft model: .*other stages.*; use --pp-siz"),
    ],
    ids=["windows", "the rest", "not all of them", "a stage without windows", "a stage of windows", "draft model"],
)
def test_a_stage_whose_layers_have_no_number_or_that_has_none_of_a_kind_is_refused(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    about = SimpleNamespace(**{**WINDOWS_OF_A_STAGE, **given})
    monkeypatch.setenv(limits.UNTRIED, limits.SPECULATIVE)
    limits.check_supported(about)
    settings["parallel"]["pp_size"] = 2
    with pytest.raises(FeatureDisabled, match=f"kvgrpc does not serve {says}"):
        limits.check_supported(about)


def test_stages_of_decode_are_not_served_with_a_hierarchical_cache(settings: dict[str, dict[str, Any]]) -> None:
    settings["disagg"]["disaggregation_decode_enable_radix_cache"] = True
    settings["memory"]["enable_hierarchical_cache"] = True
    limits.check_supported(kv_args())
    settings["parallel"]["pp_size"] = 2
    with pytest.raises(FeatureDisabled, match=r"2 at decode with --enable-hierarchical-cache: .*; leave"):
        limits.check_supported(kv_args())
    settings["disagg"]["disaggregation_mode"] = "prefill"
    limits.check_supported(kv_args())


def test_an_ordinary_engine_is_served(settings: dict[str, dict[str, Any]]) -> None:
    limits.check_supported(kv_args())


@pytest.mark.parametrize(("where", "changed", "says"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_is_not_served_is_refused_with_the_reason_and_what_to_do(
    settings: dict[str, dict[str, Any]], where: str, changed: dict[str, Any], says: str
) -> None:
    settings[where].update(changed)
    with pytest.raises(FeatureDisabled, match=f"kvgrpc does not serve {says}") as refusal:
        limits.check_supported(kv_args())
    assert str(next(iter(changed.values()))).lower() in f"{refusal.value.metadata['feature']} true"
    assert refusal.value.metadata["howToEnable"]


@pytest.mark.parametrize(
    ("word", "changed", "drafts"),
    [
        ("speculative", {}, 2),
        ("checksum", {"disaggregation_enable_kv_checksum": True}, 0),
        ("optimistic", {"optimistic_prefill_attempts": 1, "disaggregation_mode": "prefill"}, 0),
        ("context", {"disaggregation_mode": "prefill"}, 0),
        ("dcp", {}, 0),
    ],
)
def test_what_was_never_run_is_served_to_who_asks_for_it_by_name(
    settings: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    changed: dict[str, Any],
    drafts: int,
) -> None:
    settings["disagg"].update(changed)
    settings["parallel"]["attn_cp_size"] = 1 + (word == limits.CONTEXT)
    settings["parallel"]["attn_dcp_size"] = 1 + (word == limits.DCP)
    latents = word == limits.DCP
    given = SimpleNamespace(**{**vars(kv_args()), "num_draft_entries": drafts})
    with pytest.raises(FeatureDisabled, match=f"never run.*KVGRPC_UNTRIED={word}"):
        limits.check_supported(given, latents)
    monkeypatch.setenv(limits.UNTRIED, f"dsa,{word}")
    limits.check_supported(given, latents)


@pytest.mark.parametrize(
    "beside", [{"state_types": [StateType.SWA], "swa_kv_cache_layout": "nhd"}, {"num_draft_entries": 2}]
)
def test_decode_context_parallel_ranks_that_have_all_of_something_are_refused_by_name_too(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, beside: dict[str, Any]
) -> None:
    settings["parallel"]["attn_dcp_size"] = 2
    monkeypatch.setenv(limits.UNTRIED, f"{limits.DCP},{limits.SPECULATIVE}")
    limits.check_supported(kv_args(), latents=True)
    limits.check_supported(SimpleNamespace(**{**vars(kv_args()), "state_types": [StateType.MAMBA]}), latents=True)
    with pytest.raises(
        FeatureDisabled, match=r"--dcp-size 2 without latents \(MLA\), with drafts, .*: .*; use --dcp-size 1"
    ):
        limits.check_supported(SimpleNamespace(**{**vars(kv_args()), **beside}), latents=True)


# Of a context parallel rank that has two layers of latents, and the index keys of the first, as SGLang describes it.
LAYERS_OF_A_RANK: dict[str, Any] = {
    "state_types": [StateType.DSA],
    "kv_item_lens": [64] * 2,
    "state_item_lens": [[16, 0]],
}


def test_context_parallel_ranks_with_some_layers_each_are_served_to_who_asks_for_it_by_name(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["disagg"]["disaggregation_mode"] = "prefill"
    settings["parallel"] |= {"attn_cp_size": 2, "enable_dsa_cache_layer_split": True}
    monkeypatch.setenv(limits.UNTRIED, "dsa")
    with pytest.raises(FeatureDisabled, match=r"--attn-cp-size 2: .*never run.*KVGRPC_UNTRIED=context"):
        limits.check_supported(SimpleNamespace(**LAYERS_OF_A_RANK), latents=True)
    monkeypatch.setenv(limits.UNTRIED, f"dsa,{limits.CONTEXT}")
    limits.check_supported(SimpleNamespace(**LAYERS_OF_A_RANK), latents=True)


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("spec", {"speculative_algorithm": "EAGLE"}),
        ("args", {"state_types": []}),
        ("args", {"state_types": [StateType.DSA, StateType.DSA_TAIL], "state_item_lens": [[16, 0], [8, 8]]}),
        ("args", {"state_item_lens": [[0, 0]]}),
        ("args", {"state_item_lens": [[16]]}),
    ],
    ids=["drafts", "no states", "other states", "no layers", "other layers"],
)
def test_context_parallel_ranks_with_some_layers_of_what_sglang_does_not_say_are_refused(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, where: str, changed: dict[str, Any]
) -> None:
    settings["disagg"]["disaggregation_mode"] = "prefill"
    settings["parallel"] |= {"attn_cp_size": 2, "enable_dsa_cache_layer_split": True}
    monkeypatch.setenv(limits.UNTRIED, f"dsa,dsa_tail,{limits.CONTEXT},{limits.SPECULATIVE}")
    given = dict(LAYERS_OF_A_RANK)
    (given if where == "args" else settings[where]).update(changed)
    with pytest.raises(FeatureDisabled, match=r"--enable-dsa-cache-layer-split with .*; leave it out"):
        limits.check_supported(SimpleNamespace(**given), latents=True)


def test_context_parallel_ranks_that_divide_the_heads_of_states_are_served_to_who_asks_for_it_by_name(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["disagg"]["disaggregation_mode"] = "prefill"
    settings["parallel"] |= {"attn_cp_size": 2, "enable_cp_tp_group_sharing": True}
    with pytest.raises(FeatureDisabled, match=r"--attn-cp-size 2: .*never run.*KVGRPC_UNTRIED=context"):
        limits.check_supported(kv_args(StateType.MAMBA))
    monkeypatch.setenv(limits.UNTRIED, limits.CONTEXT)
    limits.check_supported(kv_args(StateType.MAMBA))


@pytest.mark.parametrize("latents", [False, True])
def test_context_parallel_ranks_of_which_none_has_a_requests_state_are_refused_by_name_too(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, latents: bool
) -> None:
    settings["disagg"]["disaggregation_mode"] = "prefill"
    monkeypatch.setenv(limits.UNTRIED, f"{limits.CONTEXT},mamba")
    limits.check_supported(kv_args(StateType.MAMBA), latents)
    settings["parallel"]["attn_cp_size"] = 2
    limits.check_supported(kv_args(), latents)
    with pytest.raises(FeatureDisabled, match=r"--attn-cp-size 2 with a state a request: .*; use --attn-cp-size 1"):
        limits.check_supported(kv_args(StateType.MAMBA), latents)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_drafts_of_eagle_are_served_where_one_layer_computes_them(
    settings: dict[str, dict[str, Any]], algorithm: str
) -> None:
    settings["spec"]["speculative_algorithm"] = algorithm
    limits.check_supported(SimpleNamespace(**vars(kv_args()), num_draft_entries=2))
    with pytest.raises(
        FeatureDisabled,
        match=f"--speculative-algorithm {algorithm} with states besides the KV cache: .*keys and values are served",
    ):
        limits.check_supported(SimpleNamespace(**vars(kv_args(StateType.SWA, layout="nhd")), num_draft_entries=2))
    with pytest.raises(FeatureDisabled, match=f"--speculative-algorithm {algorithm} with latents: .*never run"):
        limits.check_supported(SimpleNamespace(**vars(kv_args()), num_draft_entries=1), latents=True)
    settings["spec"]["enable_multi_layer_eagle"] = True
    with pytest.raises(FeatureDisabled, match=f"--speculative-algorithm {algorithm}: .*drafts of EAGLE"):
        limits.check_supported(SimpleNamespace(**vars(kv_args()), num_draft_entries=4))


def test_a_draft_model_of_its_own_is_refused_also_where_speculation_is_asked_for_by_name(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(limits.UNTRIED, limits.SPECULATIVE)
    settings["spec"]["speculative_algorithm"] = "STANDALONE"
    with pytest.raises(FeatureDisabled, match=r"--speculative-algorithm STANDALONE: .*at the first request; use"):
        limits.check_supported(SimpleNamespace(**vars(kv_args()), num_draft_entries=2))


@pytest.mark.parametrize(("algorithm", "layers"), [("DFLASH", 2), ("DSPARK", 2), ("FROZEN_KV_MTP", 0), ("NGRAM", 0)])
def test_drafts_that_nobody_has_run_are_served_to_who_asks_for_them_by_name(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, algorithm: str, layers: int
) -> None:
    """Those without layers of their own too: what they start from at decode is SGLang's own, and was not seen."""
    assert algorithm in SpeculativeAlgorithm.__members__
    settings["spec"]["speculative_algorithm"] = algorithm
    given = [SimpleNamespace(**vars(kv_args(*states)), num_draft_entries=layers) for states in ((), (StateType.MAMBA,))]
    for what in given:
        with pytest.raises(FeatureDisabled, match=rf"--speculative-algorithm {algorithm}.*: .*others were never run"):
            limits.check_supported(what)
    monkeypatch.setenv(limits.UNTRIED, limits.SPECULATIVE)
    for what in given:
        limits.check_supported(what)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp4_mx_block16"])
def test_a_cache_of_four_bits_whose_scales_sglang_does_not_tell_of_is_refused(
    settings: dict[str, dict[str, Any]], dtype: str
) -> None:
    assert resolve_kv_cache_quant(dtype) == dtype, "SGLang has no such cache"
    limits.check_supported(SimpleNamespace(**vars(kv_args()), kv_cache_dtype_str="fp8_e4m3"))
    with pytest.raises(FeatureDisabled, match=f"--kv-cache-dtype {dtype}: .*scales.*; use --kv-cache-dtype fp8_e4m3"):
        limits.check_supported(SimpleNamespace(**vars(kv_args()), kv_cache_dtype_str=dtype))


def test_sglang_tells_a_transfer_backend_nothing_of_the_scales_of_such_a_cache() -> None:
    """The reason why it is refused."""
    pool = MLATokenToKVPoolFP4(
        64, 16, torch.float4_e2m1fn_x2, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    told, _, _ = pool.get_contiguous_buf_infos()
    assert told == [values.data_ptr() for values in pool.kv_buffer]
    assert len(pool.kv_scale_buffer) == 2


def test_memory_that_comes_and_goes_is_refused(settings: dict[str, dict[str, Any]]) -> None:
    settings["features"]["enable_memory_saver"] = True
    with pytest.raises(FeatureDisabled, match=r"--enable-memory-saver: .*registered; leave it out"):
        limits.check_supported(kv_args())


def test_several_tokenizers_are_served_by_the_route_over_sglangs_own_name(settings: dict[str, dict[str, Any]]) -> None:
    settings["serving"]["tokenizer_worker_num"] = 2
    settings["disagg"]["disaggregation_transfer_backend"] = "mooncake"
    limits.check_supported(kv_args())


def test_sliding_windows_in_a_pool_of_their_own_are_served(settings: dict[str, dict[str, Any]]) -> None:
    limits.check_supported(kv_args(StateType.SWA, layout="nhd"))


def test_a_state_a_request_is_served_alone(settings: dict[str, dict[str, Any]]) -> None:
    limits.check_supported(kv_args(StateType.MAMBA))
    with pytest.raises(FeatureDisabled, match=f"set {limits.UNTRIED}=mamba on both sides"):
        limits.check_supported(kv_args(StateType.MAMBA, StateType.SWA, layout="nhd"))


@pytest.mark.parametrize("kind", [StateType.SWA, StateType.MAMBA])
def test_unified_memory_of_two_pools_is_served_to_who_asks_for_it_by_name(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, kind: StateType
) -> None:
    given = kv_args(kind, layout="nhd")
    settings["memory"]["enable_unified_memory"] = True
    limits.check_supported(kv_args())  # a model of one pool has pages as ever
    with pytest.raises(
        FeatureDisabled, match=r"--enable-unified-memory with .* states: .*GPUs.*; leave it out, or set"
    ):
        limits.check_supported(given)
    monkeypatch.setenv(limits.UNTRIED, limits.UNIFIED)
    limits.check_supported(given)
    monkeypatch.setattr(limits, "missing", lambda needs: iter([f"it has no {next(iter(needs))}"]))
    with pytest.raises(FeatureDisabled, match=r"--enable-unified-memory: .*may still write; leave it out"):
        limits.check_supported(given)


def test_stages_and_drafts_in_unified_memory_are_refused(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["memory"]["enable_unified_memory"] = True
    monkeypatch.setenv(limits.UNTRIED, f"{limits.UNIFIED},{limits.SPECULATIVE}")
    refused = r"--enable-unified-memory with --pp-size above 1 or drafts: .*all layers.*; leave it out"
    with pytest.raises(FeatureDisabled, match=refused):
        limits.check_supported(SimpleNamespace(**{**vars(kv_args(StateType.MAMBA)), "num_draft_entries": 2}))
    settings["parallel"]["pp_size"] = 2
    with pytest.raises(FeatureDisabled, match=refused):
        limits.check_supported(kv_args())


@pytest.mark.parametrize(
    ("states", "names"),
    [
        ((StateType.MAMBA, StateType.DSA), "mamba,dsa"),
        ((StateType.DSA, StateType.DSA, StateType.DSA_TAIL), "DSA_TAIL, dsa"),
        ((StateType.MAMBA, StateType.SWA), "mamba,swa"),
    ],
)
def test_states_that_were_never_handed_over_are_served_to_who_asks_for_them(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, states: tuple[StateType, ...], names: str
) -> None:
    monkeypatch.setenv(limits.UNTRIED, names)
    limits.check_supported(kv_args(*states))
    with pytest.raises(FeatureDisabled, match=f"set {limits.UNTRIED}=qsa_pending on both sides"):
        limits.check_supported(kv_args(*states, StateType.QSA_PENDING))


@pytest.mark.parametrize(
    ("states", "layout"),
    [
        *(((state,), None) for state in StateType if state is not StateType.MAMBA),
        ((StateType.SWA,), "hnd"),
        ((StateType.SWA, StateType.BLOCK_SCALE_SWA), "nhd"),
        ((StateType.MAMBA, StateType.DSA), "nhd"),
    ],
    ids=lambda given: "+".join(state.value for state in given) if isinstance(given, tuple) else str(given),
)
def test_every_other_state_beside_the_kv_cache_is_refused_by_its_name(
    settings: dict[str, dict[str, Any]], states: tuple[StateType, ...], layout: str | None
) -> None:
    names = ", ".join(state.value for state in states)
    with pytest.raises(FeatureDisabled, match=rf"state besides the KV cache \({names}\): .*alone were ever run"):
        limits.check_supported(kv_args(*states, layout=layout))


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (envs.SGLANG_DISAGG_STAGING_BUFFER, True, "SGLANG_DISAGG_STAGING_BUFFER: .*; unset it"),
        (envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK, True, "DP_RANK at decode: .*; unset it at decode"),
        (envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE, False, "KV_RELEASE=0: .*used again.*; unset it"),
    ],
    ids=["staging buffer", "query of the dp rank", "no deferred release"],
)
def test_a_variable_of_sglang_that_is_not_served_is_refused(
    settings: dict[str, dict[str, Any]], variable: Any, value: bool, says: str
) -> None:
    with variable.override(value), pytest.raises(FeatureDisabled, match=says):
        limits.check_supported(kv_args())


def test_prefill_may_say_that_all_context_parallel_ranks_hand_over(
    settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has all pages, so that the first hands them over all the same."""
    settings["disagg"]["disaggregation_mode"] = "prefill"
    settings["parallel"]["attn_cp_size"] = 2
    monkeypatch.setenv(limits.UNTRIED, limits.CONTEXT)
    with envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.override(True):
        limits.check_supported(kv_args())


def test_prefill_may_say_that_requests_go_to_dp_ranks_of_the_routers_choice(
    settings: dict[str, dict[str, Any]],
) -> None:
    settings["disagg"]["disaggregation_mode"] = "prefill"
    with envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.override(True):
        limits.check_supported(kv_args())


@pytest.mark.parametrize(
    ("given", "states", "mla", "uses"),
    [
        ({}, (), False, []),
        ({"attn_tp_size": 2}, (), False, [TENSOR_PARALLEL]),
        ({"attn_dp_size": 2}, (), True, [REPLICAS, LATENTS]),
        ({"dp_size": 2}, (), False, [REPLICAS]),
        ({"pp_size": 2}, (), False, [DECODE_STAGES]),
        ({"pp_size": 2, "disaggregation_mode": "prefill"}, (), False, [STAGES]),
        ({}, (StateType.MAMBA,), False, [STATES]),
        ({}, (StateType.SWA,), False, [WINDOWS]),
        ({"speculative_algorithm": "EAGLE"}, (), False, [DRAFTS]),
    ],
)
def test_features_of_which_an_sglang_is_looked_at_are_those_that_the_engine_uses(
    settings: dict[str, dict[str, Any]], given: dict[str, Any], states: Any, mla: bool, uses: list[str]
) -> None:
    settings["parallel"].update(attn_tp_size=1, attn_dp_size=1, dp_size=None)
    for name, value in given.items():
        next(where for where in settings.values() if name in where)[name] = value
    assert limits.features_of(kv_args(*states, layout="nhd"), mla) == [HAND_OFFS, *uses]


@pytest.mark.parametrize(
    ("tier", "mode", "stages", "says"),
    [
        (None, "cache", 1, "a cache without a host tier.*start with --enable-hierarchical-cache"),
        (object(), "buffer_only", 1, "--hicache-host-memory-mode buffer_only.*use --hicache-host-memory-mode cache"),
        (object(), "cache", 2, "--pp-size 2.*use --pp-size 1"),
    ],
)
def test_a_cache_that_takes_no_orders_of_routers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tier: object, mode: str, stages: int, says: str
) -> None:
    monkeypatch.setattr(opening, "get_parallel", lambda: SimpleNamespace(pp_size=stages))
    tree = object.__new__(UnifiedRadixCache)
    tree.cache_controller, tree.host_memory_mode = tier, mode
    with pytest.raises(FeatureDisabled, match=says):
        opening.check_serves(tree)


def test_a_recompute_at_prefill_fails_the_request_with_the_reason() -> None:
    causes: list[str] = []
    receiver = SimpleNamespace(abort=causes.append)
    KvGrpcManager.submit_prefill_recompute(object.__new__(KvGrpcManager), receiver, {})
    assert causes == ["kvgrpc does not serve retraction with recompute at prefill"]


@pytest.mark.parametrize(("serves", "seconds"), [("kvgrpc", 3600.0), ("nixl", 30.0)])
def test_sglangs_decode_holds_pages_of_a_failed_request_until_nobody_writes_where_we_serve_it(
    monkeypatch: pytest.MonkeyPatch, serves: str, seconds: float
) -> None:
    """The hook as SGLang applies it, on the queue that SGLang makes."""
    target = "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__"
    queue = decode.DecodeTransferQueue
    monkeypatch.setattr(queue, "__init__", queue.__init__)  # put back afterwards
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.delenv(RELEASE_TIMEOUT, raising=False)
    environment = os.environ.copy()
    monkeypatch.setattr(os, "environ", environment)
    disagg = SimpleNamespace(disaggregation_transfer_backend=serves, disaggregation_decode_host_receive_threshold=1)
    parallel = SimpleNamespace(attn_tp_group=SimpleNamespace(cpu_group=None), tp_rank=0)
    for module in (runtime_context, decode):
        monkeypatch.setattr(module, "get_disagg", lambda: disagg)
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    install(environment, ["--disaggregation-transfer-backend", "kvgrpc"])
    monkeypatch.setattr(HookRegistry, "_hooks", {target: HookRegistry._hooks[target]})
    HookRegistry.apply_hooks()
    made = queue(None, None, SimpleNamespace(spec_algorithm=None), None)
    assert made.deferred_kv_release_timeout == seconds


@pytest.mark.parametrize(("chosen", "answer"), [(None, 2**63 - 1), (3, 3)])
def test_sglangs_decode_asks_nobody_for_the_dp_rank_of_a_room(chosen: int | None, answer: int) -> None:
    """It would wait for the answer on its scheduler's thread. The router's choice comes through, else the room."""
    queue = SimpleNamespace(kv_manager=SimpleNamespace(prefill_info_table=EveryPrefill()))
    request = SimpleNamespace(
        disagg_prefill_dp_rank=chosen, bootstrap_room=2**63 - 1, bootstrap_host="127.0.0.1", bootstrap_port=8998
    )
    assert decode.DecodePreallocQueue._resolve_prefill_dp_rank(queue, request) == answer


@pytest.mark.parametrize(("method", "selects"), [("follow_bootstrap_room", False), ("round_robin", True)])
def test_an_engine_whose_dp_controller_does_not_go_by_the_room_is_searched(
    method: str, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "get_parallel", lambda: SimpleNamespace(load_balance_method=method))
    assert manager._engine_selects_dp() is selects
