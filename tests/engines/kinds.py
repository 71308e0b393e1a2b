"""One SGLang and one vLLM that exchange pages, each in its own environment: a test of vLLM's starts both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgrpc.client import SyncClient
from kvgrpc.client.engines import cache_address
from kvgrpc.v1 import pull_service_pb2
from tests.engines.engine import LOCAL, Engine, Sglang
from tests.engines.hierarchical import known, started
from tests.engines.model import Case, Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.support.waiting import wait_until

# Two of vLLM's blocks: one of its engines has blocks as large, another one has two in each chunk.
PAGE = 2 * BLOCK
PAGES = 6
PROMPT = PAGES * PAGE + 3


def open_sglang(
    folder: Path,
    reference: Reference,
    registry: str,
    *,
    environment: Mapping[str, str] | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Engine:
    """Its pages are as large as vLLM's chunks, which is all that is needed."""
    place = {"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0", "KVGRPC_ENGINE": "sglang", "KVGRPC_REGISTRY": registry}
    return started(
        folder,
        reference,
        engine=Sglang,
        environment={**place, "KVGRPC_DATA_PLANE": "shm", **(environment or {})},
        sizes={"page_size": PAGE, **(sizes or {})},
        timeout=8.0,  # a busy machine's engines may send nothing for seconds
        pull={"exported_pages": 64, "answer_timeout": 8.0, "stall_timeout": 8.0},
    )


def wait_ready(sglang: Engine, vllm: VllmEngine, registry: str) -> None:
    sglang.wait_ready()
    sglang.stop()  # its scheduler polls without a pause
    try:
        vllm.wait_ready()
    finally:
        sglang.go_on()
    wait_until(lambda: len(known(registry) & {"sglang", vllm.role}) == 2, 60)


def cache_of(registry: str, name: str) -> SyncClient:
    with SyncClient(registry) as client:
        return SyncClient(cache_address(client.get_engine(name)))


def ask(engine: Engine, case: Case, **extra: Any) -> int:
    """How many tokens of the prompt were not computed, as the engine counts; the tokens are right."""
    request = engine.generate(case.prompt, len(case.tokens), **extra)
    assert request.result(180) == case.tokens
    return request.cached


def taken_by(client: SyncClient) -> list[tuple[str, int]]:
    """From whom how many pages, the newest first."""
    pulls = client.list_pulls().pulls
    taken = [each for each in pulls if each.direction == pull_service_pb2.PULL_DIRECTION_TAKEN]
    assert not any(each.HasField("failure") for each in taken)
    return [(each.peer.rank.engine, each.done_pages) for each in taken if each.ended]
