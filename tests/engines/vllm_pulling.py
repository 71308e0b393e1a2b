"""vLLM engines whose host tier asks others for chunks, and how many chunks came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kvgrpc.client import SyncClient
from kvgrpc.client.engines import cache_address
from kvgrpc.errors import EngineNotFound
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.engines.model import Case
from tests.engines.vllm_engine import BLOCK, VllmEngine, vllm_arguments

CHUNK_BYTES = 64 << 10  # of the tiny model


def opened(
    name: str,
    folder: Path,
    model: Path,
    registry: str,
    tp: int = 1,
    block: int = BLOCK,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    **more: object,
) -> VllmEngine:
    """``more``: of the connector's extra config; but for ``data_plane``, and ``patience``: seconds for which another
    engine may say or send nothing."""
    # A busy machine's engines may send nothing for seconds.
    data_plane, patience = more.pop("data_plane", "shm"), more.pop("patience", 30.0)
    pull = {"staging_pages": 64, "answer_timeout": patience, "stall_timeout": patience}
    takes_orders = orders(name, registry, data_plane=data_plane, pull=pull)
    config = offloading(64, tier(peers=True, timeout=60.0), takes_orders, **more)
    sizes = {**vllm_arguments(model, tp), "block_size": block, **(arguments or {})}
    return VllmEngine(name, folder, {**sizes, "kv_transfer_config": config}, environment)


def offloading(chunks: int, *tiers: object, **more: object) -> dict[str, object]:
    """vLLM's own connector with so many chunks of host memory, and tiers below it. ``more``: of its extra config."""
    extra = {
        "spec_name": "TieringOnCpu",
        "spec_module_path": "tests.engines.vllm_offloading_on_cpu",
        "cpu_bytes_to_use": chunks * CHUNK_BYTES,
        "secondary_tiers": list(tiers),
        **more,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def tier(**more: object) -> dict[str, object]:
    return {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", **more}


def file_tier(path: Path) -> dict[str, object]:
    return tier(storage="file", storage_config={"path": str(path), "max_bytes": "64MB"})


def orders(engine: str, registry: str, **more: object) -> dict[str, object]:
    """The tier that takes orders by the engine's name."""
    named = {"engine": engine, "registry": registry, "limits": {"threshold_tokens": BLOCK}}
    return {"type": "KvGrpcOrders", "module_path": "kvgrpc.engines.vllm.orders", **named, **more}


def address(registry: str, name: str) -> str:
    end = time.monotonic() + 30
    while True:
        with SyncClient(registry) as client:
            try:
                return cache_address(client.get_engine(name))
            except EngineNotFound:
                assert time.monotonic() < end, f"{name} is not in the registry"
                time.sleep(0.1)


def compute(engine: VllmEngine, case: Case) -> int:
    """How many tokens of the prompt were not computed, as the engine counts."""
    request = engine.generate(case.prompt, len(case.tokens))
    assert request.result() == case.tokens
    return request.cached


def chunks_at(client: SyncClient, case: Case) -> int:
    """Leading chunks that this engine or another one has."""
    return client.lookup(pb.PromptPages(tokens=case.prompt)).storage_pages


def has(client: SyncClient, case: Case, chunks: int) -> bool:
    return chunks_at(client, case) == chunks


def pulled(client: SyncClient) -> int:
    return sum(each.done_pages for each in client.list_pulls().pulls)
