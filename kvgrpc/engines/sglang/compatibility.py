"""Whether this SGLang is one that the adapter was made for: its version, and the signatures that we stand on."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from importlib import metadata

from kvgrpc.errors import FeatureDisabled

VERSIONS = ("0.5.23",)
_UTILS = "sglang.srt.disaggregation.utils"
_BASE = "sglang.srt.disaggregation.base.conn"
SIGNATURES: Mapping[str, str] = {
    f"{_UTILS}.get_kv_class": "transfer_backend class_type",
    f"{_UTILS}.TransferBackend": "value names module qualname type start boundary",
    "sglang.srt.plugins.hook_registry.HookRegistry.register": "target hook hook_type source",
    f"{_BASE}.BaseKVManager.__init__": "self args disaggregation_mode server_args is_mla_backend",
    f"{_BASE}.BaseKVSender.__init__": "self mgr bootstrap_addr bootstrap_room req_has_disagg_prefill_dp_rank",
    f"{_BASE}.BaseKVSender.init": "self num_kv_indices aux_index",
    f"{_BASE}.BaseKVSender.send": "self kv_indices state_indices num_kv_tokens",
    f"{_BASE}.BaseKVSender.should_send_kv_chunk": "self num_pages last_chunk",
    f"{_BASE}.BaseKVReceiver.__init__": "self mgr bootstrap_addr bootstrap_room",
    f"{_BASE}.BaseKVReceiver.init": "self prefill_dp_rank",
    f"{_BASE}.BaseKVReceiver.send_metadata": ("self kv_indices aux_index state_indices decode_prefix_len destination"),
    f"{_BASE}.BaseKVBootstrapServer.__init__": "self host port",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._resolve_prefill_dp_rank": "self req",
    "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__": (
        "self req_to_metadata_buffer_idx_allocator metadata_buffers scheduler tree_cache"
    ),
}


def check_sglang() -> None:
    """Raises FeatureDisabled, whose text says what to do, for an SGLang that this adapter does not know."""
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
    version = metadata.version("sglang")
    if version not in VERSIONS:
        raise _unknown(f"it is version {version}")


def _unknown(what: str) -> FeatureDisabled:
    remedy = f"install sglang=={VERSIONS[-1]} or a kvgrpc made for yours, or set KVGRPC_SGLANG=off to go without it"
    return FeatureDisabled(f"{what}; {remedy}", metadata={"feature": "sglang", "howToEnable": remedy})
