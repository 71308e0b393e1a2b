"""What this adapter does not do yet. SGLang must not start with it, because KV caches would be wrong or never come."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel

from kvgrpc.errors import FeatureDisabled


def check_supported(kv_args: Any) -> None:
    """Raises FeatureDisabled that names the first setting of SGLang which cannot be served, and what to do."""
    parallel, disagg = get_parallel(), get_disagg()
    states = ", ".join(state.value for state in getattr(kv_args, "state_types", ()))
    refused = (
        (bool(states), f"the model has state besides its KV cache ({states})", "use another transfer backend"),
        (parallel.pp_size > 1, f"--pp-size {parallel.pp_size}", "use --pp-size 1"),
        (parallel.attn_cp_size > 1, f"--attn-cp-size {parallel.attn_cp_size}", "use --attn-cp-size 1"),
        (parallel.attn_dcp_size > 1, f"decode context parallelism {parallel.attn_dcp_size}", "use 1"),
        (parallel.enable_kv_cache_sharding, "KV cache sharding", "switch it off"),
        (disagg.enable_pd_role_switch, "--enable-pd-role-switch", "start prefill and decode for good"),
        (
            disagg.disaggregation_decode_allocation_policy != "early",
            f"--disaggregation-decode-allocation-policy {disagg.disaggregation_decode_allocation_policy}",
            "use early",
        ),
        (get_exec().features.enable_memory_saver, "--enable-memory-saver", "leave it out: KV memory must stay"),
        (envs.SGLANG_DISAGG_STAGING_BUFFER.get(), "SGLANG_DISAGG_STAGING_BUFFER", "unset it"),
        (
            not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0",
            "unset it: pages would be used again while prefill may still write to them",
        ),
    )
    for holds, what, remedy in refused:
        if holds:
            raise FeatureDisabled(
                f"kvgrpc does not serve {what}: {remedy}", metadata={"feature": what, "howToEnable": remedy}
            )
