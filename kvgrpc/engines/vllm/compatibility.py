"""Whether this vLLM is one that the adapter was made for: its version, and the signatures that we stand on."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from importlib import metadata

from kvgrpc.errors import FeatureDisabled

VERSIONS = ("0.33.0",)
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTOR = f"{_BASE}.KVConnectorBase_V1"
SIGNATURES: Mapping[str, str] = {
    f"{_CONNECTOR}.__init__": "self vllm_config role kv_cache_config",
    f"{_CONNECTOR}.get_required_kvcache_layout": "vllm_config",
    f"{_CONNECTOR}.on_new_request": "self request",
    f"{_CONNECTOR}.get_num_new_matched_tokens": "self request num_computed_tokens",
    f"{_CONNECTOR}.update_state_after_alloc": "self request blocks num_external_tokens",
    f"{_CONNECTOR}.build_connector_meta": "self scheduler_output",
    f"{_CONNECTOR}.request_finished": "self request block_ids",
    f"{_BASE}.SupportsHMA.request_finished_all_groups": "self request block_ids",
    f"{_CONNECTOR}.register_kv_caches": "self kv_caches",
    f"{_CONNECTOR}.start_load_kv": "self forward_context kwargs",
    f"{_CONNECTOR}.get_finished": "self finished_req_ids",
    f"{_CONNECTOR}.get_transfer_results": "self finished_req_ids",
    f"{_CONNECTOR}.get_block_ids_with_load_errors": "self",
    f"{_CONNECTOR}.get_kv_connector_stats": "self",
    f"{_CONNECTOR}.build_kv_connector_stats": "data",
    f"{_CONNECTOR}.build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    f"{_CONNECTOR}.shutdown": "self",
}


def check_vllm() -> None:
    """Raises FeatureDisabled, whose text says what to do, for a vLLM that this adapter does not know."""
    check_version()
    for name, expected in SIGNATURES.items():
        try:
            found = " ".join(inspect.signature(pkgutil.resolve_name(name)).parameters)
        except (ImportError, AttributeError, ValueError, TypeError):
            raise _unknown(f"it has no {name}") from None
        if found != expected:
            raise _unknown(f"{name} takes ({found}), not ({expected})")


def check_version() -> None:
    """Raises FeatureDisabled for a version that this adapter does not know."""
    version = metadata.version("vllm")
    # Builds of the same release for other hardware: "0.33.0+cu130".
    if version.partition("+")[0] not in VERSIONS:
        raise _unknown(f"it is version {version}")


def _unknown(what: str) -> FeatureDisabled:
    remedy = f"install vllm=={VERSIONS[-1]} or a kvgrpc made for yours, or use another kv_connector"
    return FeatureDisabled(
        f"kvgrpc cannot serve this vLLM: {what}; {remedy}", metadata={"feature": "vllm", "howToEnable": remedy}
    )
