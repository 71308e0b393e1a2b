"""First tokens of a real SGLang engine that a router has warmed: ``python -m benchmarks.warm [--store file|mooncake]``.

Each prompt is computed once, written to storage and dropped from device and host; then it is asked for again, without
storage's help (another prompt of that length), with SGLang's own prefetch when the request comes, and after a router's
StartPrefetch has ended. The engine's own counter says how many tokens were cached; its tokens are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, PAGE, Engine, Request
from tests.engines.model import WIDE, Reference
from tests.engines.test_sglang_hierarchical import started
from tests.engines.test_sglang_prefetch import cache_address
from tests.support.waiting import wait_until

LENGTHS = (256, 512, 1024, 2048, 4096)
ROUNDS = 5
NEW_TOKENS = 4
LARGEST_SECONDS = 120.0
SIZES = {"context_length": 8192, "max_total_tokens": 10240, "chunked_prefill_size": 8192, "max_prefill_tokens": 8192}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("file", "mooncake"), default="file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, storage(given.store, Path(name)) as where:
        reference = Reference(Path(name), WIDE)
        engine = started(Path(name), reference, environment={"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0"}, sizes=SIZES, **where)
        try:
            engine.wait_ready()
            with SyncClient(cache_address(engine), timeout=60) as router:
                measure(engine, router, reference, given.lengths, given.rounds)
        finally:
            engine.close()


@contextlib.contextmanager
def storage(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    if kind == "file":
        yield {"storage": "file", "storage_config": {"path": str(folder / "kv")}}
        return
    from kvgrpc.prefetch.storage.mooncake.local import LocalStore

    with LocalStore(owner_bytes=2 << 30) as store:
        yield {"storage": "mooncake", "storage_config": {"master": store.address}}


def measure(engine: Engine, router: SyncClient, reference: Reference, lengths: Sequence[int], rounds: int) -> None:
    print("| prompt | computed | prefetched when it comes | warmed by a router | order took | cached then |")
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    for length in lengths:
        first_token(engine, prompt_of(reference, length))  # kernels of that size are compiled
        computed, comes, warmed, took, cached = [], [], [], [], set[int]()
        for _ in range(rounds):
            prompt = prompt_of(reference, length)
            before = first_token(engine, prompt)
            computed.append(before[0])
            in_storage_alone(engine, router, prompt)
            seconds, again = first_token(engine, prompt)
            comes.append(seconds)
            assert again.tokens == before[1].tokens and again.cached, (again.tokens, again.cached)
            in_storage_alone(engine, router, prompt)
            operation = ended(router, router.start_prefetch(proto.PromptPages(tokens=prompt)))
            assert operation.state == proto.OPERATION_STATE_DONE, operation
            took.append(operation.took.ToMicroseconds() / 1e6)
            seconds, again = first_token(engine, prompt)
            warmed.append(seconds)
            cached.add(again.cached)
            assert again.tokens == before[1].tokens, (again.tokens, before[1].tokens)
            assert engine.is_empty()
        cells = [f"{statistics.median(each) * 1e3:.0f} ms" for each in (computed, comes, warmed, took)]
        print(f"| {length} | {' | '.join(cells)} | {' '.join(map(str, sorted(cached)))} |", flush=True)


def prompt_of(reference: Reference, length: int) -> list[int]:
    """One token more: the last one of a prompt is always computed."""
    return [reference.random_token() for _ in range(length + 1)]


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, Request]:
    request = engine.generate(prompt, NEW_TOKENS)
    request.result(LARGEST_SECONDS)
    assert request.first is not None
    return request.first - request.sent, request


def in_storage_alone(engine: Engine, router: SyncClient, prompt: list[int]) -> None:
    pages, whole = proto.PromptPages(tokens=prompt), len(prompt) // PAGE

    def there() -> bool:
        assert engine.is_empty(60)
        found = router.lookup(pages)
        return (found.host_pages, found.storage_pages) == (0, whole)

    wait_until(there, 60)


def ended(router: SyncClient, operation: proto.CacheOperation) -> proto.CacheOperation:
    for message in router.watch_operations([operation.operation_id]):
        for each in message.operations:
            operation = each
    return operation


if __name__ == "__main__":
    main()
