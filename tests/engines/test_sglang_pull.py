"""Two real SGLang engines without storage: what one has computed, the other takes from it, and computes the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as proto
from kvgrpc.v1 import pull_service_pb2
from tests.engines.engine import LOCAL, PAGE, Engine
from tests.engines.hierarchical import ask, cache_address, known, started
from tests.engines.model import Case, Reference
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(700)
PAGES = 8
PROMPT = PAGES * PAGE + 5
NAMES = ("first", "second")
EXPORTED = 64


@pytest.fixture(scope="module")
def engines(registry: str, folder: Path, reference: Reference) -> Iterator[list[Engine]]:
    found = [
        started(
            folder,
            reference,
            environment={"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0", "KVGRPC_ENGINE": name, "KVGRPC_REGISTRY": registry},
            pull={"exported_pages": EXPORTED},
        )
        for name in NAMES
    ]
    try:
        for engine in found:
            engine.wait_ready()
        wait_until(lambda: known(registry) == set(NAMES), 60)
        yield found
    finally:
        for engine in found:
            engine.close()


def cache_of(engine: Engine) -> SyncClient:
    return SyncClient(cache_address(engine))


def exported(engine: Engine, case: Case) -> Case:
    """Once the engine has written the prompt through, its pages can be lent; SGLang does so in the background."""
    ask(engine, case)
    assert engine.is_empty(30), "SGLang empties its cache when its backups are over"
    return case


@pytest.mark.parametrize(("holder", "taker"), [(0, 1), (1, 0)], ids=["second takes", "first takes"])
def test_a_prompt_that_one_engine_has_computed_is_taken_by_the_other(
    engines: list[Engine], reference: Reference, holder: int, taker: int
) -> None:
    case = exported(engines[holder], reference.case(PROMPT))
    request = ask(engines[taker], case)
    assert request.tokens == case.tokens
    assert request.cached == PAGES * PAGE, "of its own counter: the rest it computes"
    with cache_of(engines[taker]) as client:
        pulls = client.list_pulls().pulls
    (taken,) = [pull for pull in pulls if pull.direction == pull_service_pb2.PULL_DIRECTION_TAKEN]
    assert (taken.done_pages, taken.peer.rank.engine) == (PAGES, NAMES[holder])


def test_a_longer_prompt_takes_what_it_shares(engines: list[Engine], reference: Reference) -> None:
    first = exported(engines[0], reference.case(PROMPT))
    longer = reference.case(2 * PROMPT, prefix=first.prompt[: 6 * PAGE])
    assert ask(engines[1], longer).cached == 6 * PAGE


def test_a_router_has_pages_taken_before_the_request_comes(engines: list[Engine], reference: Reference) -> None:
    case = exported(engines[0], reference.case(PROMPT))
    pages = proto.PromptPages(tokens=case.prompt)
    with cache_of(engines[1]) as router:
        operation = router.start_prefetch(pages)
        for message in router.watch_operations([operation.operation_id]):
            for each in message.operations:
                operation = each
        assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_DONE, PAGES)
        assert router.lookup(pages).host_pages == PAGES
    assert ask(engines[1], case).cached == PAGES * PAGE


def test_what_is_lent_is_bounded_and_the_oldest_goes_first(engines: list[Engine], reference: Reference) -> None:
    oldest = exported(engines[0], reference.case(PROMPT))
    for _ in range(EXPORTED // PAGES):
        newest = exported(engines[0], reference.case(PROMPT))
    assert ask(engines[1], newest).cached == PAGES * PAGE
    assert ask(engines[1], oldest).cached == 0


def test_a_holder_that_is_killed_costs_its_pages_and_no_request(engines: list[Engine], reference: Reference) -> None:
    """The last one: it ends an engine."""
    case = exported(engines[0], reference.case(PROMPT))
    engines[0].kill()
    began = time.monotonic()
    assert ask(engines[1], case).cached == 0
    print(f"a prompt of a holder that was killed: {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 10
    assert ask(engines[1], case).cached > 0
