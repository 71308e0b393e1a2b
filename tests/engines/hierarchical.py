"""SGLang engines with a host tier and a kvgrpc storage backend, and what their caches are asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgrpc.client import SyncClient
from tests.engines.engine import PAGE, Engine, Request, engine_arguments
from tests.engines.model import Case, Reference

PROMPT, LONG_PROMPT = 8 * PAGE + 5, 30 * PAGE


HOST_RATIO = 2


DEVICE_AND_HOST_TOKENS = (1 + HOST_RATIO) * 4096  # engine_arguments
PLUGIN = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.hicache_on_cpu:register"}


class Hierarchical(Engine):
    start_seconds = 300.0


def started(
    folder: Path,
    reference: Reference,
    *,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    sizes: Mapping[str, Any] | None = None,
    engine: type[Engine] = Hierarchical,
    **storage: Any,
) -> Engine:
    """``sizes``: arguments of the engine in the place of the small ones. ``storage``: of the extra config."""
    arguments = {**engine_arguments(reference.path, ranks), **(sizes or {}), **cache_arguments(**storage)}
    return engine("hicache", folder, arguments, {**PLUGIN, **(environment or {})})


def cache_arguments(**storage: Any) -> dict[str, Any]:
    """Of an engine with a host tier. ``storage``: of the extra config."""
    config = {
        "backend_name": "kvgrpc",
        "module_path": "kvgrpc.engines.sglang.hicache",
        "class_name": "KvGrpcStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
        **storage,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": float(HOST_RATIO),
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(config),
    }


def ask(engine: Engine, case: Case) -> Request:
    request = engine.generate(case.prompt, len(case.tokens))
    assert request.result(180) == case.tokens  # the first one ever compiles kernels
    return request


def cache_address(engine: Engine) -> str:
    (address,) = re.findall(r"the cache of \S+ is served at ([^\s,]+)", engine.log())
    return str(address)


def known(registry: str) -> set[str]:
    with SyncClient(registry) as client:
        engines = client.list_engines(include_rows=True)
        return {engine.name for engine in engines if any(row.endpoints.cache for row in engine.rows)}
