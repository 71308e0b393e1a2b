"""The limits of this adapter. vLLM must not start with it, because KV caches would be wrong or never come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

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
from kvgrpc.engines.vllm.groups import has_latents_alone, has_state, has_window, is_served, untried_kinds
from kvgrpc.errors import FeatureDisabled

# Kinds of layers to hand over although nobody has seen it work, "MAMBA1,LINEAR", pipeline stages of kv_both,
# speculative decoding, context parallelism of prefill and of decode: the key of kv_connector_extra_config, and the
# variable.
UNTRIED, _VARIABLE = "untried", "KVGRPC_UNTRIED"
PIPELINE, SPECULATIVE, CONTEXT, DCP = "pipeline", "speculative", "context", "dcp"

# Layers of a draft model or head were seen to be handed over; the others have none.
_DRAFTS_BY_LAYERS = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
_SERVED_SPECULATION = _DRAFTS_BY_LAYERS | {"ngram", "ngram_gpu", "suffix"}


def check_supported(config: Any, kv_cache_config: Any) -> None:
    """Raises FeatureDisabled that names the first setting of vLLM which cannot be served, and what to do."""
    parallel = config.parallel_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = [type(spec).__name__ for spec in specs if not is_served(spec)]
    untried = sorted(kind for kind in untried_kinds(kv_cache_config) if kind.lower() not in _asked_for(config))
    is_both = config.kv_transfer_config.kv_role == "kv_both"
    dcp = parallel.decode_context_parallel_size
    # vLLM says the platform's own device where nobody chose one.
    buffered = getattr(config.kv_transfer_config, "kv_buffer_device", current_platform.device_type)
    speculation = getattr(getattr(config, "speculative_config", None), "method", None)
    beside = _never_run_beside(speculation, specs, latents=config.model_config.use_mla)
    refused = (
        (
            speculation is not None
            and (bool(beside) or speculation not in _SERVED_SPECULATION)
            and SPECULATIVE not in _asked_for(config),
            f"speculative decoding by {speculation}" + f" with {beside}" * bool(beside),
            "with kvgrpc it was never run",
            f'ask for it by name: "{UNTRIED}": "{SPECULATIVE}" in kv_connector_extra_config, on both sides',
        ),
        (
            parallel.pipeline_parallel_size > 1 and is_both and PIPELINE not in _asked_for(config),
            "pipeline parallelism with kv_role kv_both",
            "it was run with kv_producer and kv_consumer alone",
            f'ask for it by name: "{UNTRIED}": "{PIPELINE}" in kv_connector_extra_config',
        ),
        (
            dcp > 1 and not (config.model_config.use_mla and has_latents_alone(specs) and speculation is None),
            f"--decode-context-parallel-size {dcp} without latents (MLA), with several groups of layers or with drafts",
            "a rank then holds some of a request's tokens, and all of what other layers and drafts keep",
            "use --decode-context-parallel-size 1",
        ),
        (
            dcp > 1 and parallel.prefill_context_parallel_size > 1,
            f"--decode-context-parallel-size {dcp} with --prefill-context-parallel-size "
            f"{parallel.prefill_context_parallel_size}",
            "vLLM then deals tokens to the context parallel ranks, of which kvgrpc takes each to have all",
            "use one of the two",
        ),
        (
            dcp > 1 and getattr(parallel, "cp_kv_cache_interleave_size", 1) > 1,
            "--cp-kv-cache-interleave-size above 1",
            "tokens are handed over one by one",
            "use --cp-kv-cache-interleave-size 1",
        ),
        (
            dcp > 1 and DCP not in _asked_for(config),
            f"--decode-context-parallel-size {dcp}",
            "no attention of vLLM's for CPUs shares out a cache, so that it was never run with kvgrpc",
            f'ask for it by name: "{UNTRIED}": "{DCP}" in kv_connector_extra_config',
        ),
        (
            parallel.prefill_context_parallel_size > 1 and config.kv_transfer_config.kv_role != "kv_producer",
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size} with kv_role "
            + config.kv_transfer_config.kv_role,
            "a prompt then comes to one rank, and is wanted in all",
            "use --prefill-context-parallel-size 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1 and CONTEXT not in _asked_for(config),
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}",
            "no attention of vLLM's for CPUs divides a prompt, so that it was never run with kvgrpc",
            f'ask for it by name: "{UNTRIED}": "{CONTEXT}" in kv_connector_extra_config',
        ),
        (
            bool(getattr(config.model_config, "enable_sleep_mode", False)),
            "--enable-sleep-mode",
            "it takes away memory that is registered",
            "leave it out",
        ),
        (
            getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None,
            "HiSparse",
            "a prompt then comes to blocks of the host, and its index to others of the device",
            "leave HiSparseConnector out",
        ),
        (
            buffered != current_platform.device_type,
            f"kv_buffer_device {buffered}",
            "blocks go from device to device, without a buffer in between",
            "leave it out of the --kv-transfer-config",
        ),
        (
            bool(kinds),
            f"models with layers of neither full attention nor a sliding window nor a state ({', '.join(kinds)})",
            "the adapter does not yet hand over what vLLM keeps of them",
            "use another kv_connector",
        ),
        (
            bool(untried),
            f"layers of the kind {', '.join(untried)}",
            "they would be handed over as others are, but were never run",
            f'ask for them by name: "{UNTRIED}": "{",".join(untried)}" in kv_connector_extra_config, on both sides',
        ),
    )
    for holds, what, why, remedy in refused:
        if holds:
            raise FeatureDisabled(
                f"kvgrpc does not serve {what}: {why}; {remedy}", metadata={"feature": what, "howToEnable": remedy}
            )


def features_of(config: Any, kv_cache_config: Any) -> list[str]:
    """Returns which features of ``compatibility`` hand-offs of this engine use."""
    parallel, specs = config.parallel_config, [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    used = {
        HAND_OFFS: True,
        TENSOR_PARALLEL: parallel.tensor_parallel_size > 1,
        # Of replicas of a dense model vLLM tells each that it is the only one, and which one it is.
        REPLICAS: parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0,
        ALL_STAGES: parallel.pipeline_parallel_size > 1,
        STATES: any(has_state(spec) for spec in specs),
        WINDOWS: any(has_window(spec) for spec in specs),
        LATENTS: config.model_config.use_mla,
        DRAFTS: config.speculative_config is not None,
    }
    return [feature for feature, holds in used.items() if holds]


def _never_run_beside(speculation: str | None, specs: Sequence[Any], latents: bool) -> str:
    """Returns the kind of the model's layers that this speculation was never run with; "" where it was with all."""
    if any(has_state(spec) for spec in specs):
        return "layers that keep a state"
    if speculation in _DRAFTS_BY_LAYERS and any(has_window(spec) for spec in specs):
        return "sliding windows"
    if speculation in _DRAFTS_BY_LAYERS - {"mtp"} and latents:
        return "latents"
    return ""


def _asked_for(config: Any) -> set[str]:
    asked = config.kv_transfer_config.kv_connector_extra_config.get(UNTRIED, os.environ.get(_VARIABLE, ""))
    return {str(name).strip().lower() for name in (asked.split(",") if isinstance(asked, str) else asked)}
