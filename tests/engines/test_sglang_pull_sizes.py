"""Two real SGLang engines, of one rank and of two: what one has computed the other takes, heads from each rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as proto
from kvgrpc.v1 import pull_service_pb2
from tests.engines.engine import LOCAL, PAGE, Engine
from tests.engines.hierarchical import ask, started
from tests.engines.model import Case, Reference
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
PAGES = 8
PROMPT = PAGES * PAGE + 5
SIZES = {"one": 1, "two": 2}


@pytest.fixture(scope="module")
def engines(registry: str, folder: Path, reference: Reference) -> Iterator[dict[str, Engine]]:
    found = {
        name: started(
            folder,
            reference,
            ranks=ranks,
            environment={"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0", "KVGRPC_ENGINE": name, "KVGRPC_REGISTRY": registry},
            timeout=8.0,  # a busy machine's engines may send nothing for seconds
            pull={"exported_pages": 64, "answer_timeout": 8.0, "stall_timeout": 8.0},
        )
        for name, ranks in SIZES.items()
    }
    try:
        for engine in found.values():
            engine.wait_ready()
        wait_until(lambda: all(len(lending(registry, name)) == ranks for name, ranks in SIZES.items()), 60)
        yield found
    finally:
        for engine in found.values():
            engine.close()


def lending(registry: str, name: str) -> list[str]:
    """The addresses of an engine's ranks that lend, the leading one first."""
    with SyncClient(registry) as client:
        rows = [row for engine in client.list_engines(include_rows=True) if engine.name == name for row in engine.rows]
    rows.sort(key=lambda row: row.rank.rank.tp)
    return [row.endpoints.grpc for row in rows if row.endpoints.cache]


def taken_by(registry: str, name: str) -> list[list[int]]:
    """By rank, pages of each pull; none of them failed."""
    found = []
    for address in lending(registry, name):
        with SyncClient(address) as client:
            pulls = client.list_pulls().pulls
        taken = [each for each in pulls if each.direction == pull_service_pb2.PULL_DIRECTION_TAKEN]
        assert not any(each.HasField("failure") for each in taken)
        found.append([each.done_pages for each in taken if each.ended])
    return found


def exported(engine: Engine, case: Case) -> Case:
    """Once the engine has written the prompt through, its pages can be lent; SGLang does so in the background."""
    ask(engine, case)
    assert engine.is_empty(30), "SGLang empties its cache when its backups are over"
    return case


@pytest.mark.parametrize(("holder", "taker"), [("two", "one"), ("one", "two")])
def test_what_an_engine_of_another_size_computed_is_not_computed_again(
    engines: dict[str, Engine], registry: str, reference: Reference, holder: str, taker: str
) -> None:
    case = exported(engines[holder], reference.case(PROMPT))
    before = taken_by(registry, taker)
    assert ask(engines[taker], case).cached == PAGES * PAGE, "of its own counter: the rest it computes"
    # A page of one rank is made of those of two, each in a room; two ranks take a whole page each.
    after = taken_by(registry, taker)
    came = [sum(now) - sum(then) for then, now in zip(before, after, strict=True)]
    assert came == ([2 * PAGES] if taker == "one" else [PAGES, PAGES])


def test_a_longer_prompt_takes_what_it_shares(engines: dict[str, Engine], reference: Reference) -> None:
    first = exported(engines["two"], reference.case(PROMPT))
    longer = reference.case(2 * PROMPT, prefix=first.prompt[: 6 * PAGE])
    assert ask(engines["one"], longer).cached == 6 * PAGE


def test_a_router_has_pages_taken_at_every_rank(
    engines: dict[str, Engine], registry: str, reference: Reference
) -> None:
    case = exported(engines["one"], reference.case(PROMPT))
    pages = proto.PromptPages(tokens=case.prompt)
    with SyncClient(lending(registry, "two")[0]) as router:
        found = router.lookup(pages)
        assert (found.host_pages, found.storage_pages) == (0, PAGES), "its own share, at the other engine"
        operation = router.start_prefetch(pages)
        for message in router.watch_operations([operation.operation_id]):
            for each in message.operations:
                operation = each
        assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_DONE, PAGES)
        assert router.lookup(pages).host_pages == PAGES, "the request would take them too"
    assert ask(engines["two"], case).cached == PAGES * PAGE


def test_a_holder_that_is_killed_costs_its_pages_and_no_request(
    engines: dict[str, Engine], reference: Reference
) -> None:
    """The last one: it ends an engine."""
    case = exported(engines["two"], reference.case(PROMPT))
    engines["two"].kill()
    assert ask(engines["one"], case).cached == 0
    assert ask(engines["one"], case).cached > 0
