"""What this adapter does not do. vLLM must not start with it, because KV caches would be wrong or never come."""

from __future__ import annotations

from typing import Any

from kvgrpc.errors import FeatureDisabled


def check_supported(config: Any, kv_cache_config: Any) -> None:
    """Raises FeatureDisabled that names the first setting of vLLM which cannot be served, and what to do."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    groups = kv_cache_config.kv_cache_groups
    refused = (
        (
            transfer.kv_role == "kv_both",
            "kv_role kv_both",
            "a rank has one role",
            "start kv_producer and kv_consumer engines",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism",
            "the adapter does not yet say which layers a stage holds",
            "use --pipeline-parallel-size 1",
        ),
        (
            parallel.data_parallel_size > 1,
            "data parallelism in one engine",
            "a request does not say which replica computed it",
            "start an engine for each dp rank",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism",
            "a rank holds some of a request's tokens",
            "use 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism",
            "a rank holds some of a request's tokens",
            "use 1",
        ),
        (
            len(groups) != 1 or not _is_full_attention(groups[0].kv_cache_spec),
            "models whose KV cache is not one group of full attention (hybrid memory allocator, Mamba)",
            "the adapter does not yet hand over the block numbers that each group has of its own",
            "use another kv_connector",
        ),
    )
    for holds, what, why, remedy in refused:
        if holds:
            raise FeatureDisabled(
                f"kvgrpc does not serve {what}: {why}; {remedy}", metadata={"feature": what, "howToEnable": remedy}
            )


def _is_full_attention(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return all(isinstance(each, FullAttentionSpec) for each in specs)
