"""vLLM's prefill/decode disaggregation over kvgrpc: a KV connector, loaded by module path. docs/engines/vllm.md.

vLLM imports this module in every process it starts, and forks some of them afterwards: nothing heavy is imported, and
nothing starts, before a worker registers its KV caches.
"""

from __future__ import annotations

from typing import Any

from kvgrpc.engines.compatibility import HAND_OFFS, VLLM, check


def __getattr__(name: str) -> Any:
    """The connector, once somebody asks for it. Raises FeatureDisabled for a vLLM that lacks what it needs."""
    if name != "KvGrpcConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check(VLLM, HAND_OFFS)  # before an import says less
    from kvgrpc.engines.vllm.connector import KvGrpcConnector

    return KvGrpcConnector
