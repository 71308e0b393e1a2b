"""Two real vLLM engines without storage: what one has computed, the other takes from it, and computes the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.engines.model import Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.vllm_pulling import address, chunks_at, compute, has, opened, pulled
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def engines(registry: str, folder: Path, reference: Reference) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    first, second = (opened(name, folder, reference.path, registry) for name in NAMES)
    try:
        first.wait_ready()
        second.wait_ready()
        yield first, second
    finally:
        first.close()
        second.close()


def test_what_one_engine_computed_is_not_computed_by_the_other(
    engines: tuple[VllmEngine, VllmEngine], registry: str, reference: Reference
) -> None:
    clients = [SyncClient(address(registry, name)) for name in NAMES]
    for here, there in ((0, 1), (1, 0)):
        case = reference.case(6 * BLOCK + 3)
        assert compute(engines[here], case) == 0
        wait_until(partial(has, clients[there], case, 6))
        before = pulled(clients[there])
        assert compute(engines[there], case) == 6 * BLOCK
        assert pulled(clients[there]) - before == 6
    for engine, client in zip(engines, clients, strict=True):
        assert engine.is_empty()
        client.close()


def test_a_longer_prompt_computes_what_the_other_lacks(
    engines: tuple[VllmEngine, VllmEngine], registry: str, reference: Reference
) -> None:
    shorter = reference.case(4 * BLOCK)
    longer = reference.case(7 * BLOCK + 5, prefix=shorter.prompt)
    with SyncClient(address(registry, "second")) as client:
        assert compute(engines[0], shorter) == 0
        wait_until(lambda: chunks_at(client, longer) == 4)
        assert compute(engines[1], longer) == 4 * BLOCK


def test_a_router_has_a_prompt_pulled_before_its_request_comes(
    engines: tuple[VllmEngine, VllmEngine], registry: str, reference: Reference
) -> None:
    case = reference.case(6 * BLOCK + 3)
    with SyncClient(address(registry, "second")) as client:
        assert compute(engines[0], case) == 0
        wait_until(lambda: chunks_at(client, case) == 6)
        operation = client.start_prefetch(pb.PromptPages(tokens=case.prompt))
        for message in client.watch_operations([operation.operation_id]):
            operation = message.operations[-1] if message.operations else operation
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 6)
        assert client.lookup(pb.PromptPages(tokens=case.prompt)).host_pages == 6
        assert compute(engines[1], case) == 6 * BLOCK


def test_a_holder_that_was_killed_costs_a_computed_prompt(
    engines: tuple[VllmEngine, VllmEngine], registry: str, reference: Reference
) -> None:
    """The last one: the first engine is gone afterwards."""
    cases = [reference.case(6 * BLOCK + 3) for _ in range(3)]
    with SyncClient(address(registry, "second")) as client:
        for case in cases:
            assert compute(engines[0], case) == 0
        wait_until(lambda: all(chunks_at(client, case) == 6 for case in cases))
    engines[0].kill()
    began = time.monotonic()
    assert compute(engines[1], cases[0]) == 0
    print(f"computed {time.monotonic() - began:.2f} s after the holder was killed")
    assert [compute(engines[1], case) for case in cases[1:]] == [0, 0]
    assert engines[1].is_empty()
