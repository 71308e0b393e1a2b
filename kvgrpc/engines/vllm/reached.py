"""Finds a prefill engine for decode, in the words of the requests that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reached(config: Any, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what a prefill answers to proxies that give it to decode as it is. Raises InvalidRequest for bad
    settings."""
    from kvgrpc.engines.vllm.rank import WorkerProcess  # not before vLLM has forked its workers
    from kvgrpc.model import Role

    return {
        "remote_bootstrap_addr": f"http://{WorkerProcess(config, 0, environment, Role.PREFILL).bootstrap}",
        "remote_engine_id": str(config.kv_transfer_config.engine_id),
    }
