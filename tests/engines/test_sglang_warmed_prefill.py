"""A router warms a real prefill engine while hand-offs run: its orders are served beside them, and what they brought is
handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, PAGE, Pair
from tests.engines.hierarchical import PLUGIN, cache_address, cache_arguments
from tests.engines.load import handing_over
from tests.engines.model import Case, Reference
from tests.engines.ordering import order_by_name
from tests.support.cache_serving import ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(700)
PAGES = 8
PROMPT = PAGES * PAGE + 5


@pytest.fixture(scope="module")
def pair(registry: str, folder: Path, reference: Reference) -> Iterator[Pair]:
    storage = {"storage": "file", "storage_config": {"path": str(folder / "kv-warmed")}, "prefetch_threshold": PAGE}
    pair = Pair(
        folder,
        reference.path,
        environment={"KVGRPC_REGISTRY": registry},
        prefill_environment={**PLUGIN, "KVGRPC_CACHE_LISTEN": f"{LOCAL}:0"},
        prefill=cache_arguments(**storage),
    )
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.fixture
def router(pair: Pair) -> Iterator[SyncClient]:
    with SyncClient(cache_address(pair.prefill)) as client:
        yield client


def pages(case: Case) -> proto.PromptPages:
    return proto.PromptPages(tokens=case.prompt)


def hand_over(pair: Pair, case: Case) -> int:
    """Cached tokens of prefill, as it counts them; the tokens of both are right."""
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens))
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    return prefill.cached


def stored(pair: Pair, router: SyncClient, reference: Reference) -> Case:
    """A prompt that prefill has handed over, and has in storage alone."""
    case = reference.case(PROMPT)
    assert hand_over(pair, case) == 0
    wait_until(lambda: router.lookup(pages(case)).storage_pages == PAGES, 60)
    assert pair.prefill.is_empty()
    found = router.lookup(pages(case))
    assert (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, PAGES)
    return case


def caches(pair: Pair, registry: str) -> list[str]:
    """Engines in the registry beside the one of hand-offs; decode registers nowhere."""
    with SyncClient(registry) as client:
        return [engine.name for engine in client.list_engines() if engine.name != f"{LOCAL}-{pair.bootstrap_port}"]


def test_an_order_beside_hand_offs_brings_what_the_next_one_needs(
    pair: Pair, router: SyncClient, registry: str, reference: Reference, folder: Path
) -> None:
    case = stored(pair, router, reference)
    wait_until(lambda: caches(pair, registry))
    (name,) = caches(pair, registry)
    with handing_over(pair, [reference.case(100) for _ in range(4)]) as served:
        wait_until(lambda: served.requests > 2, 60)
        before = served.requests
        operation = order_by_name(registry, name, case.prompt)
        assert (operation["state"], operation["completedPages"]) == ("OPERATION_STATE_DONE", PAGES)
        assert served.requests > before, "no hand-off went on beside the order"
        # Nothing can come from there any more: what the hand-off finds is what the router brought.
        away = (folder / "kv-warmed").rename(folder / "kv-away")
        try:
            assert hand_over(pair, case) == PAGES * PAGE
        finally:
            away.rename(folder / "kv-warmed")
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_orders_and_hand_offs_of_the_same_prompts_at_once_cost_no_token(
    pair: Pair, router: SyncClient, reference: Reference
) -> None:
    cases = [stored(pair, router, reference) for _ in range(4)]
    came = 0
    for _ in range(3):
        assert pair.prefill.is_empty()
        operations, asked = [], []
        for case in cases:
            operations.append(router.start_prefetch(pages(case)))
            asked.append(pair.submit_unseen(case.prompt, len(case.tokens)))
        for case, (prefill, decode) in zip(cases, asked, strict=True):
            assert (decode.result(), prefill.result()) == (case.tokens, case.tokens[:1])
        for operation in operations:
            came += ended(router, operation).completed_pages
    assert came, "some orders were quicker than the hand-off"
    assert not router.list_operations(open_only=True)
    assert pair.prefill.is_empty() and pair.decode.is_empty()
