"""A router warms a real prefill engine while hand-offs run: ours inside MultiConnector, beside vLLM's offloading with
our tier of orders. What they brought is handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.engines.load import handing_over
from tests.engines.model import Case, Reference
from tests.engines.ordering import order_by_name
from tests.engines.vllm_engine import BLOCK, CONNECTOR, VllmPair
from tests.engines.vllm_pulling import address, file_tier, offloading, orders
from tests.support.cache_serving import ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
CHUNKS = 32
PAGES = 6
PROMPT = PAGES * BLOCK + 3


@pytest.fixture(scope="module")
def pair(registry: str, folder: Path, reference: Reference) -> Iterator[VllmPair]:
    caching = offloading(CHUNKS, file_tier(folder / "kv-warmed"), orders("P0", registry))
    ours = {**CONNECTOR, "kv_role": "kv_producer"}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours, caching]}}
    pair = VllmPair(folder, reference.path, transfer={}, prefill={"transfer": both}, decode={"transfer": {**CONNECTOR}})
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.fixture
def router(pair: VllmPair, registry: str) -> Iterator[SyncClient]:
    with SyncClient(address(registry, "P0")) as client:
        yield client


def prompt(case: Case) -> pb.PromptPages:
    return pb.PromptPages(tokens=case.prompt)


def hand_over(pair: VllmPair, reference: Reference, case: Case) -> int:
    """Cached tokens of prefill, as it counts them. Decode is told another prompt with the same last token: it has the
    right tokens by prefill's pages alone."""
    room = pair.room()
    prefill = pair.prefill.generate(case.prompt, 1, **pair.at_prefill(room))
    told = [*reference.case(len(case.prompt)).prompt[:-1], case.prompt[-1]]
    decode = pair.decode.generate(told, len(case.tokens), **pair.at_decode(room))
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    return prefill.cached


def stored(pair: VllmPair, router: SyncClient, reference: Reference) -> Case:
    """A prompt that prefill has handed over, and has in storage alone: others took the host."""
    case = reference.case(PROMPT)
    assert hand_over(pair, reference, case) == 0
    wait_until(lambda: router.lookup(prompt(case)).storage_pages == PAGES, 60)
    forget(pair, reference)
    found = router.lookup(prompt(case))
    assert (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, PAGES)
    return case


def forget(pair: VllmPair, reference: Reference) -> None:
    for _ in range(CHUNKS // PAGES + 1):
        hand_over(pair, reference, reference.case(PAGES * BLOCK))
    assert pair.prefill.is_empty()


def test_an_order_beside_hand_offs_brings_what_the_next_one_needs(
    pair: VllmPair, router: SyncClient, registry: str, reference: Reference
) -> None:
    case = stored(pair, router, reference)
    with handing_over(pair, [reference.case(40) for _ in range(4)]) as served:
        wait_until(lambda: served.requests > 2, 60)
        before = served.requests
        operation = order_by_name(registry, "P0", case.prompt)
        assert (operation["state"], operation["completedPages"]) == ("OPERATION_STATE_DONE", PAGES)
        assert served.requests > before, "no hand-off went on beside the order"
        assert router.lookup(prompt(case), without_storage=True).host_pages == PAGES
        assert hand_over(pair, reference, case) == PAGES * BLOCK
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_orders_and_hand_offs_of_the_same_prompts_at_once_cost_no_token(
    pair: VllmPair, router: SyncClient, reference: Reference
) -> None:
    cases = [stored(pair, router, reference) for _ in range(2)]
    came = 0
    for _ in range(3):
        forget(pair, reference)
        operations = [router.start_prefetch(prompt(case)) for case in cases]
        for case in cases:
            hand_over(pair, reference, case)
        for operation in operations:
            came += ended(router, operation).completed_pages
    assert came, "some orders were quicker than the hand-off"
    assert not router.list_operations(open_only=True)
    assert pair.prefill.is_empty() and pair.decode.is_empty()
