"""First tokens of a real engine that a router has warmed: ``python -m benchmarks.warm [--store file|mooncake]``.

In the environment of ``make bench-engines`` whose engine it is to be, SGLang's or vLLM's. Each prompt is computed once,
written to storage and dropped from device and host; then it is asked for again: with the engine's own look at storage
when the request comes, and after a router's StartPrefetch has ended. The engine's own counter says how many tokens were
cached; its tokens are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, PAGE, Engine, Request
from tests.engines.model import WIDE, Reference
from tests.support.cache_serving import ended
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.engines.vllm_engine import VllmEngine

ENGINE = "sglang" if find_spec("sglang") else "vllm"
LENGTHS = (256, 512, 1024, 2048, 4096)
ROUNDS = 5
NEW_TOKENS = 4
LARGEST_SECONDS = 300.0
LONGEST = 8192
SGLANG_SIZES = {
    "context_length": LONGEST,
    "max_total_tokens": LONGEST + 2048,
    "chunked_prefill_size": LONGEST,
    "max_prefill_tokens": LONGEST,
}
TOKEN_BYTES = 32 << 10


@dataclass(frozen=True)
class Warmed:
    """An engine, where its cache is served, and its tokens of a page."""

    engine: Engine
    address: str
    page: int
    is_empty: Callable[[float], bool]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("file", "mooncake"), default="file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, storage(given.store, Path(name)) as where:
        reference = Reference(Path(name), WIDE)
        opened = {"sglang": sglang, "vllm": vllm}[ENGINE]
        with opened(Path(name), reference, where) as warmed, SyncClient(warmed.address, timeout=60) as router:
            print(f"{ENGINE}, {given.store}, load {os.getloadavg()[0]:.0f}")
            measure(warmed, router, reference, given.lengths, given.rounds)
            print(f"load {os.getloadavg()[0]:.0f} at the end")


@contextlib.contextmanager
def storage(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    if kind == "file":
        yield {"storage": "file", "storage_config": {"path": str(folder / "kv")}}
        return
    from kvgrpc.prefetch.storage.mooncake.local import LocalStore

    with LocalStore(owner_bytes=2 << 30) as store:
        yield {"storage": "mooncake", "storage_config": {"master": store.address}}


@contextlib.contextmanager
def sglang(folder: Path, reference: Reference, where: Mapping[str, Any]) -> Iterator[Warmed]:
    from tests.engines.hierarchical import cache_address, started

    listens = {"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0"}
    engine = started(folder, reference, environment=listens, sizes=SGLANG_SIZES, **where)
    try:
        engine.wait_ready()
        yield Warmed(engine, cache_address(engine), PAGE, engine.is_empty)
    finally:
        engine.close()


@contextlib.contextmanager
def vllm(folder: Path, reference: Reference, where: Mapping[str, Any]) -> Iterator[Warmed]:
    from tests.engines.vllm_engine import BLOCK
    from tests.engines.vllm_pulling import address

    registry = RegistryServer([f"{LOCAL}:0"]).open()
    tier = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", **where}
    engine = vllm_engine("P0", folder, reference.path, registry.address, tier, {})
    try:
        engine.wait_ready()
        yield Warmed(engine, address(registry.address, "P0"), BLOCK, partial(engine.is_empty, host=True))
    finally:
        engine.close()
        registry.close()


def vllm_engine(
    name: str,
    folder: Path,
    model: Path,
    registry: str,
    tier: Mapping[str, Any],
    orders: Mapping[str, Any],
    *others: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    kind: type[VllmEngine] | None = None,
    spec: tuple[str, str] = ("TieringOnCpu", "tests.engines.vllm_offloading_on_cpu"),
) -> VllmEngine:
    """One with a host cache for the longest prompts, these tiers, and orders that are found at the registry. ``spec``:
    what vLLM calls the class of its offloading, and where that is."""
    from tests.engines.vllm_engine import BLOCK, VllmEngine, vllm_arguments

    served = {
        "type": "KvGrpcOrders",
        "module_path": "kvgrpc.engines.vllm.orders",
        "engine": name,
        "registry": registry,
        "limits": {"threshold_tokens": BLOCK},
        **orders,
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec[0],
            "spec_module_path": spec[1],
            "cpu_bytes_to_use": 2 * LONGEST * TOKEN_BYTES,
            "secondary_tiers": [tier, *others, served],
        },
    }
    sizes = {
        "max_model_len": LONGEST,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 2 * LONGEST // BLOCK + 1,
        "kv_transfer_config": offloading,
    }
    return (kind or VllmEngine)(name, folder, {**vllm_arguments(model, 1), **sizes}, environment)


def measure(warmed: Warmed, router: SyncClient, reference: Reference, lengths: Sequence[int], rounds: int) -> None:
    engine = warmed.engine
    print("| prompt | computed | its own look at storage | warmed by a router | order took | cached then |")
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    for length in lengths:
        first_token(engine, prompt_of(reference, length))  # kernels of that size are compiled
        computed, comes, after, took, cached = [], [], [], [], set[int]()
        for _ in range(rounds):
            prompt = prompt_of(reference, length)
            before = first_token(engine, prompt)
            computed.append(before[0])
            in_storage_alone(warmed, router, prompt)
            seconds, again = first_token(engine, prompt)
            comes.append(seconds)
            assert again.tokens == before[1].tokens and again.cached, (again.tokens, again.cached)
            in_storage_alone(warmed, router, prompt)
            operation = ended(router, router.start_prefetch(proto.PromptPages(tokens=prompt)))
            assert operation.state == proto.OPERATION_STATE_DONE, operation
            took.append(operation.took.ToMicroseconds() / 1e6)
            seconds, again = first_token(engine, prompt)
            after.append(seconds)
            cached.add(again.cached)
            assert again.tokens == before[1].tokens, (again.tokens, before[1].tokens)
            assert warmed.is_empty(20)
        cells = [f"{statistics.median(each) * 1e3:.0f} ms" for each in (computed, comes, after, took)]
        print(f"| {length} | {' | '.join(cells)} | {' '.join(map(str, sorted(cached)))} |", flush=True)


def prompt_of(reference: Reference, length: int) -> list[int]:
    """One token more: the last one of a prompt is always computed."""
    return [reference.random_token() for _ in range(length + 1)]


def first_token(engine: Engine, prompt: list[int], **extra: Any) -> tuple[float, Request]:
    request = engine.generate(prompt, NEW_TOKENS, **extra)
    request.result(LARGEST_SECONDS)
    assert request.first is not None
    return request.first - request.sent, request


def in_storage_alone(warmed: Warmed, router: SyncClient, prompt: list[int]) -> None:
    pages, whole = proto.PromptPages(tokens=prompt), len(prompt) // warmed.page

    def there() -> bool:
        assert warmed.is_empty(60)
        found = router.lookup(pages)
        return (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, whole)

    wait_until(lambda: router.lookup(pages).storage_pages == whole, 60)
    wait_until(there, 60)


if __name__ == "__main__":
    main()
