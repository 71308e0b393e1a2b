"""First tokens of prompts that a real engine computes, and of the same prompts once a router's order has warmed it.

SGLang's and vLLM's test_*_prefetch.py run it.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import Engine
from tests.engines.model import Case, Reference, Size
from tests.support.cache_serving import ended
from tests.support.waiting import wait_until

# Most of its work is beside attention, which SGLang computes of a cached prompt too on CPUs; 8 KiB of KV cache a token.
SIZE = Size(layers=4, hidden=1024, heads=4, kv_heads=4)
TOKENS = 1024  # of a prompt, but for the last one, which is always computed
ROUNDS = 5
STORED_SECONDS = 60.0
FIRST_SECONDS = 180.0  # of the first request ever, which compiles kernels
# The work that a warmed prompt saves is nine tenths, so its first token comes sooner by more than other work costs.
MOST_OF_COMPUTED = 0.5


def come_sooner(engine: Engine, router: SyncClient, reference: Reference, storage: Path, page: int) -> None:
    """A prompt is computed, written to ``storage`` alone, ordered, and asked for again when nothing can come from there
    any more: what is found is what the order brought. Medians over prompts in turns, for a machine that is busy.

    ``router``: at the engine's cache. ``page``: its tokens of a page, or chunk.
    """
    computed, warmed = list[float](), list[float]()
    first_token(engine, reference.case(TOKENS + 1, new_tokens=2), cached=0)
    for _ in range(ROUNDS):
        case = reference.case(TOKENS + 1, new_tokens=2)
        pages = proto.PromptPages(tokens=case.prompt)
        computed.append(first_token(engine, case, cached=0))
        in_storage_alone(engine, router, pages, TOKENS // page)
        operation = ended(router, router.start_prefetch(pages))
        assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_DONE, TOKENS // page)
        lose(storage)
        warmed.append(first_token(engine, case, cached=TOKENS))
    print(*(f"{seconds * 1e3:.0f} ms" for seconds in (*computed, *warmed)))
    assert statistics.median(warmed) < MOST_OF_COMPUTED * statistics.median(computed), (computed, warmed)


def first_token(engine: Engine, case: Case, cached: int) -> float:
    """Seconds until it came. All are the reference's, and so many of the prompt the engine itself counts as cached."""
    request = engine.generate(case.prompt, len(case.tokens))
    assert request.result(FIRST_SECONDS) == case.tokens
    assert request.cached == cached and request.first is not None
    return request.first - request.sent


def lose(storage: Path) -> None:
    """All pages that are there."""
    for page in storage.rglob("*"):
        if page.is_file():
            page.unlink()


def in_storage_alone(engine: Engine, router: SyncClient, pages: proto.PromptPages, whole: int) -> None:
    def there() -> bool:
        assert engine.is_empty(STORED_SECONDS, host=True)
        found = router.lookup(pages)
        return (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, whole)

    wait_until(lambda: router.lookup(pages).storage_pages == whole, STORED_SECONDS)
    wait_until(there, STORED_SECONDS)
