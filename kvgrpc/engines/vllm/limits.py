"""What this adapter does not do. vLLM must not start with it, because KV caches would be wrong or never come."""

from __future__ import annotations

from typing import Any

from kvgrpc.engines.vllm.groups import is_served
from kvgrpc.errors import FeatureDisabled


def check_supported(config: Any, kv_cache_config: Any) -> None:
    """Raises FeatureDisabled that names the first setting of vLLM which cannot be served, and what to do."""
    parallel = config.parallel_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = [type(spec).__name__ for spec in specs if not is_served(spec)]
    refused = (
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism",
            "the adapter does not yet say which layers a stage holds",
            "use --pipeline-parallel-size 1",
        ),
        (
            parallel.data_parallel_size > 1,
            "data parallelism of models with experts",
            "its replicas step together, and a request does not say which of them computed it",
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
            bool(kinds),
            f"models with layers that are neither of full attention nor of a sliding window ({', '.join(kinds)})",
            "the adapter does not yet hand over what vLLM keeps of them",
            "use another kv_connector",
        ),
    )
    for holds, what, why, remedy in refused:
        if holds:
            raise FeatureDisabled(
                f"kvgrpc does not serve {what}: {why}; {remedy}", metadata={"feature": what, "howToEnable": remedy}
            )
