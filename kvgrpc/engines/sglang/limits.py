"""The limits of this adapter, and why. SGLang must not start with it: KV caches would be wrong or never come."""

from __future__ import annotations

import inspect
import os
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_parallel, get_serving, get_spec
from sglang.srt.server_args import ServerArgs

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
    missing,
)
from kvgrpc.engines.sglang import moves
from kvgrpc.engines.sglang.plugin import BACKEND
from kvgrpc.engines.sglang.rank import STATE_A_REQUEST, is_plain_window, kind_of, layers_told
from kvgrpc.errors import FeatureDisabled

# Kinds of state to hand over although nobody has seen it work, "dsa,dsa_tail", and what else was never run.
UNTRIED = "KVGRPC_UNTRIED"
SPECULATIVE, CHECKSUM, OPTIMISTIC = "speculative", "checksum", "optimistic"
CONTEXT, DCP, UNIFIED = "context", "dcp", "unified"
_HOST_THRESHOLD = "disaggregation_decode_host_receive_threshold"
_FOUR_BITS = ("nvfp4", "fp4_mx_block16")


def check_supported(kv_args: Any, latents: bool = False) -> None:
    """Raises FeatureDisabled that names the first setting of SGLang which cannot be served, and what to do.
    ``latents``: the KV cache is of an MLA model."""
    parallel, disagg = get_parallel(), get_disagg()
    serving = get_serving()
    states = list(getattr(kv_args, "state_types", ()))
    asked = _asked_for()
    untried = sorted(_untried(kv_args) - asked)
    algorithm = has(get_spec(), "speculative_algorithm", "")
    beside = "states besides the KV cache" if states else "latents" if latents else ""
    drafts_as_run = algorithm in ("EAGLE", "EAGLE3") and not beside and not has(get_spec(), "enable_multi_layer_eagle")
    dcp = has(parallel, "attn_dcp_size", 1)
    is_unified = has(get_memory(), "enable_unified_memory")
    has_other_states = any(kind_of(state) != STATE_A_REQUEST for state in states)
    are_numbered, absent = _layers_of_a_stage(kv_args) if parallel.pp_size > 1 else (True, [])
    refused = (
        (
            bool(untried),
            f"state besides the KV cache ({', '.join(state.value for state in states)})",
            "of such pools those of sliding windows, in pages of tokens and heads, and of one state a request (mamba) "
            "alone were ever run",
            f"set {UNTRIED}={','.join(untried)} on both sides, or use another transfer backend",
        ),
        (
            getattr(kv_args, "kv_cache_dtype_str", "") in _FOUR_BITS,
            f"--kv-cache-dtype {getattr(kv_args, 'kv_cache_dtype_str', '')}",
            "SGLang tells a transfer backend of the values of such a cache, and not of the scales of their blocks",
            "use --kv-cache-dtype fp8_e4m3 or bfloat16",
        ),
        (
            is_unified and (parallel.pp_size > 1 or bool(getattr(kv_args, "num_draft_entries", 0))),
            "--enable-unified-memory with --pp-size above 1 or drafts",
            "a page there has all layers of a model",
            "leave it out",
        ),
        (
            is_unified and bool(states) and any(missing(moves.NEEDED)),
            "--enable-unified-memory",
            "SGLang compacts it by moving pages, in this version also those to which prefill may still write",
            "leave it out",
        ),
        (
            is_unified and bool(states) and UNIFIED not in asked,
            "--enable-unified-memory with sliding windows or states",
            "it needs attention for GPUs, so that it was never run with kvgrpc",
            f"leave it out, or set {UNTRIED}={UNIFIED} on both sides",
        ),
        (
            not are_numbered,
            f"--pp-size {parallel.pp_size} with {', '.join(kind_of(state) for state in states)}",
            "SGLang does not say which of these layers a stage holds",
            "use --pp-size 1",
        ),
        (
            bool(absent),
            f"--pp-size {parallel.pp_size} with a stage that has no layers of {', '.join(absent)}",
            "each stage hands over, or takes, some of each kind of layer",
            "divide them otherwise (SGLANG_PP_LAYER_PARTITION), or use --pp-size 1",
        ),
        (
            parallel.pp_size > 1 and bool(getattr(kv_args, "num_draft_entries", 0)),
            f"--pp-size {parallel.pp_size} with a draft model",
            "its layers would have the numbers of other stages, and SGLang's decode speculates in one stage alone",
            "use --pp-size 1",
        ),
        (
            parallel.pp_size > 1
            and disagg.disaggregation_mode == "decode"
            and has(disagg, "disaggregation_decode_enable_radix_cache")
            and has(get_memory(), "enable_hierarchical_cache"),
            f"--pp-size {parallel.pp_size} at decode with --enable-hierarchical-cache",
            "SGLang's stages load pages from the host each in its own step, and go on with other requests",
            "leave --disaggregation-decode-enable-radix-cache or --enable-hierarchical-cache out",
        ),
        (
            algorithm == "STANDALONE",
            f"--speculative-algorithm {algorithm}",
            "SGLang's decode has nothing to draft from for what prefill computed, and ends at the first request",
            "use EAGLE or EAGLE3, or leave it out",
        ),
        (
            bool(getattr(kv_args, "num_draft_entries", 0) or algorithm)
            and not drafts_as_run
            and SPECULATIVE not in asked,
            f"--speculative-algorithm {algorithm}" + f" with {beside}" * bool(beside),
            "drafts of EAGLE (NEXTN is the same) and EAGLE3 beside a plain KV cache of keys and values are served; "
            "others were never run",
            f"leave it out, or set {UNTRIED}={SPECULATIVE} on both sides",
        ),
        (
            has(disagg, "disaggregation_enable_kv_checksum") and CHECKSUM not in asked,
            "--disaggregation-enable-kv-checksum",
            "it is computed on GPUs alone, and was never run with kvgrpc",
            f"leave it out, or set {UNTRIED}={CHECKSUM} on both sides",
        ),
        (
            dcp > 1 and (not latents or has_other_states or bool(getattr(kv_args, "num_draft_entries", 0))),
            f"--dcp-size {dcp} without latents (MLA), with drafts, or with other states than one a request",
            "a rank then holds some of a request's tokens, and all of its drafts and of what other states keep of them",
            "use --dcp-size 1",
        ),
        (
            dcp > 1 and DCP not in asked,
            f"--dcp-size {dcp}",
            "no attention of SGLang's for CPUs divides a cache, so that it was never run with kvgrpc",
            f"use --dcp-size 1, or set {UNTRIED}={DCP}: prefill has the same size and --tp-size then, or --dcp-size 1",
        ),
        (
            has(parallel, "enable_kv_cache_sharding"),
            "--enable-kv-cache-sharding",
            "a rank then holds some of a request's pages",
            "leave it out",
        ),
        (
            parallel.attn_cp_size > 1 and disagg.disaggregation_mode == "decode",
            f"--attn-cp-size {parallel.attn_cp_size} at decode",
            "SGLang hands over to one such rank alone",
            "use --attn-cp-size 1 there",
        ),
        (
            divides_layers() and (bool(algorithm) or not _has_layers_of_a_split(kv_args)),
            "--enable-dsa-cache-layer-split with drafts, other states than dsa, or a rank that has no layers of dsa",
            "each rank hands over its layers of latents and of dsa, and has all layers of what else there is",
            "leave it out",
        ),
        (
            parallel.attn_cp_size > 1
            and not divides_heads_of_states()
            and any(kind_of(state) == STATE_A_REQUEST for state in states),
            f"--attn-cp-size {parallel.attn_cp_size} with a state a request",
            "layers that keep one see the tokens, or have the heads, of their rank alone: no rank has a request's",
            "use --attn-cp-size 1",
        ),
        (
            parallel.attn_cp_size > 1 and CONTEXT not in asked,
            f"--attn-cp-size {parallel.attn_cp_size}",
            "no attention of SGLang's for CPUs divides a prompt, so that it was never run with kvgrpc",
            f"use --attn-cp-size 1, or set {UNTRIED}={CONTEXT}",
        ),
        (
            has(get_memory(), "enable_hisparse"),
            "--enable-hisparse",
            "a prompt then comes to pages of the host, and its index to others of the device",
            "leave it out",
        ),
        (
            # The number that means "never" was 0 until 0.5.21, and is 1 since.
            has(disagg, _HOST_THRESHOLD, default_of(_HOST_THRESHOLD)) != default_of(_HOST_THRESHOLD),
            f"--disaggregation-decode-host-receive-threshold {has(disagg, _HOST_THRESHOLD)}",
            "a prompt comes to the pages of the device alone",
            "leave it out",
        ),
        (
            has(disagg, "enable_pd_role_switch"),
            "--enable-pd-role-switch",
            "a rank keeps the role that it was opened with",
            "start prefill and decode engines",
        ),
        (
            has(disagg, "disaggregation_decode_allocation_policy", "early") != "early",
            "--disaggregation-decode-allocation-policy " + has(disagg, "disaggregation_decode_allocation_policy", ""),
            "decode names its pages before prefill has computed them",
            "use early",
        ),
        (  # behind the policy, for which SGLang itself sets attempts
            disagg.disaggregation_mode == "prefill"
            and has(disagg, "optimistic_prefill_attempts", 0) > 0
            and OPTIMISTIC not in asked,
            f"--optimistic-prefill-attempts {has(disagg, 'optimistic_prefill_attempts', 0)}",
            "it was never run with kvgrpc",
            f"leave it out, or set {UNTRIED}={OPTIMISTIC}",
        ),
        (
            get_exec().features.enable_memory_saver,
            "--enable-memory-saver",
            "it takes away memory that is registered",
            "leave it out",
        ),
        (
            serving.tokenizer_worker_num > 1 and disagg.disaggregation_transfer_backend == BACKEND,
            f"--tokenizer-worker-num {serving.tokenizer_worker_num} with --disaggregation-transfer-backend {BACKEND}",
            "SGLang's tokenizer workers load no plug-ins and do not know that name",
            "use --disaggregation-transfer-backend mooncake and KVGRPC_SGLANG=mooncake",
        ),
        (
            is_set("SGLANG_DISAGG_STAGING_BUFFER"),
            "SGLANG_DISAGG_STAGING_BUFFER",
            "heads are cut without a copy in between",
            "unset it",
        ),
        (
            disagg.disaggregation_mode == "decode" and is_set("SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"),
            "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK at decode",
            "SGLang would ask prefill's registry by HTTP; kvgrpc finds the dp rank by itself where prefill has it set",
            "unset it at decode",
        ),
        (
            not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0",
            "pages would be used again while prefill may still write to them",
            "unset it",
        ),
    )
    for holds, what, why, remedy in refused:
        if holds:
            raise FeatureDisabled(
                f"kvgrpc does not serve {what}: {why}; {remedy}", metadata={"feature": what, "howToEnable": remedy}
            )


def features_of(kv_args: Any, latents: bool) -> list[str]:
    """Returns which features of ``compatibility`` hand-offs of this engine use. ``latents``: of an MLA model."""
    parallel, states = get_parallel(), getattr(kv_args, "state_types", ())
    stages = STAGES if get_disagg().disaggregation_mode == "prefill" else DECODE_STAGES
    used = {
        HAND_OFFS: True,
        TENSOR_PARALLEL: parallel.attn_tp_size > 1,
        REPLICAS: parallel.attn_dp_size > 1 or (parallel.dp_size or 1) > 1,
        stages: parallel.pp_size > 1,
        STATES: any(kind_of(state) == STATE_A_REQUEST for state in states),
        WINDOWS: any(is_plain_window(kv_args, place) for place in range(len(states))),
        LATENTS: latents,
        DRAFTS: bool(has(get_spec(), "speculative_algorithm")),
    }
    return [feature for feature, holds in used.items() if holds]


def has(settings: Any, name: str, otherwise: Any = False) -> Any:
    """Returns what SGLang has there; ``otherwise`` in a version that does not have the feature yet."""
    return getattr(settings, name, otherwise)


def default_of(setting: str) -> Any:
    """Returns what this SGLang does unless somebody says otherwise; None where it has no such setting."""
    known = inspect.signature(ServerArgs).parameters.get(setting)
    return known and known.default


def is_set(variable: str) -> bool:
    known = getattr(envs, variable, None)
    return known is not None and bool(known.get())


def has_unified_pools(kv_args: Any) -> bool:
    """True if a page of each pool is one stretch of all its layers; a model of one pool has pages as ever."""
    return bool(has(get_memory(), "enable_unified_memory") and getattr(kv_args, "state_types", ()))


def _untried(kv_args: Any) -> set[str]:
    """Kinds of state that nobody has seen handed over, by SGLang's words; a state a request was alone when it was."""
    states = list(getattr(kv_args, "state_types", ()))
    kinds = {kind_of(state) for place, state in enumerate(states) if not is_plain_window(kv_args, place)}
    return set() if {kind_of(state) for state in states} == {STATE_A_REQUEST} else kinds


def _layers_of_a_stage(kv_args: Any) -> tuple[bool, list[str]]:
    """Returns True if SGLang numbers the layers that this stage has, and the kinds of layers of which it has none."""
    kinds = [kind_of(state) for state in getattr(kv_args, "state_types", ())]
    if not kinds:
        return True, []
    places = (None, *range(len(kinds)))
    held = [any(items) for items in (kv_args.kv_item_lens, *kv_args.state_item_lens)]
    are_numbered = all(layers_told(kv_args, place) for place, holds in zip(places, held, strict=True) if holds)
    return are_numbered, [kind for kind, holds in zip(("kv", *kinds), held, strict=True) if not holds]


def divides_layers() -> bool:
    """True if each context parallel rank of this prefill has some layers of the model."""
    parallel = get_parallel()
    return bool(parallel.attn_cp_size > 1 and has(parallel, "enable_dsa_cache_layer_split"))


def divides_heads_of_states() -> bool:
    """True if each context parallel rank of this prefill has some heads of a state a request, and all of the rest."""
    return bool(has(get_parallel(), "enable_cp_tp_group_sharing"))


def _has_layers_of_a_split(kv_args: Any) -> bool:
    """True if a rank has latents and index keys of the same layers, of some of which only latents, and nothing else."""
    if [kind_of(state) for state in getattr(kv_args, "state_types", ())] != ["dsa"]:
        return False
    (keys,) = kv_args.state_item_lens
    return any(keys) and len(keys) == len(kv_args.kv_item_lens)


def _asked_for() -> set[str]:
    return {name.strip().lower() for name in os.environ.get(UNTRIED, "").split(",")}


def page_layout() -> str:
    known = getattr(envs, "SGLANG_AITER_KV_CACHE_LAYOUT", None)
    return "nhd" if known is None else str(known.get()).lower()
