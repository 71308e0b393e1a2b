"""One prefix across engines: what a real SGLang has computed a real vLLM takes from it, and the other way round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.engines.engine import SGLANG_PYTHON, Engine
from tests.engines.kinds import PAGE, PAGES, PROMPT, ask, cache_of, open_sglang, taken_by, wait_ready
from tests.engines.model import Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.vllm_pulling import opened
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not SGLANG_PYTHON.exists(), reason="SGLang's environment is not here: `.ci/setup sglang` makes it"
    ),
]


@pytest.fixture(scope="module")
def sglang(registry: str, folder: Path, reference: Reference) -> Iterator[Engine]:
    engine = open_sglang(folder, reference, registry)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engines(sglang: Engine, registry: str, folder: Path, reference: Reference) -> Iterator[tuple[Engine, VllmEngine]]:
    vllm = opened("vllm", folder, reference.path, registry, block=PAGE)
    try:
        wait_ready(sglang, vllm, registry)
        yield sglang, vllm
    finally:
        vllm.close()


def test_a_prompt_that_sglang_computed_is_taken_by_vllm(
    engines: tuple[Engine, VllmEngine], registry: str, reference: Reference
) -> None:
    sglang, vllm = engines
    case = reference.case(PROMPT)
    ask(sglang, case)
    assert sglang.is_empty(30), "SGLang empties its cache when its backups are over"
    assert ask(vllm, case) == PAGES * PAGE
    with cache_of(registry, "vllm") as client:
        assert taken_by(client) == [("sglang", PAGES)]


def test_vllm_computes_the_rest_of_a_longer_prompt(engines: tuple[Engine, VllmEngine], reference: Reference) -> None:
    sglang, vllm = engines
    shorter = reference.case(4 * PAGE)
    ask(sglang, shorter)
    assert sglang.is_empty(30)
    assert ask(vllm, reference.case(7 * PAGE + 5, prefix=shorter.prompt)) == 4 * PAGE


def test_a_router_has_a_prompt_of_sglang_pulled_before_its_request_comes(
    engines: tuple[Engine, VllmEngine], registry: str, reference: Reference
) -> None:
    sglang, vllm = engines
    case = reference.case(PROMPT)
    ask(sglang, case)
    assert sglang.is_empty(30)
    with cache_of(registry, "vllm") as client:
        operation = client.start_prefetch(pb.PromptPages(tokens=case.prompt), engines=["sglang"])
        for message in client.watch_operations([operation.operation_id]):
            operation = message.operations[-1] if message.operations else operation
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, PAGES)
    assert ask(vllm, case) == PAGES * PAGE


def test_a_prompt_that_vllm_computed_is_taken_by_sglang(
    engines: tuple[Engine, VllmEngine], registry: str, reference: Reference
) -> None:
    sglang, vllm = engines
    with cache_of(registry, "vllm") as vllms, cache_of(registry, "sglang") as sglangs:
        case = reference.case(PROMPT)
        ask(vllm, case)
        pages = pb.PromptPages(tokens=case.prompt)
        wait_until(lambda: vllms.lookup(pages).host_pages == PAGES, 30)
        assert ask(sglang, case) == PAGES * PAGE
        assert taken_by(sglangs)[0] == ("vllm", PAGES)
    assert sglang.is_empty(30) and vllm.is_empty()


def test_a_vllm_whose_workers_share_a_chunk_takes_what_one_rank_computed_and_lends_it_its_own(
    sglang: Engine, registry: str, folder: Path, reference: Reference
) -> None:
    """Two workers with half of the heads each, which the canonical layout puts beside each other, block by block."""
    two = opened("two", folder, reference.path, registry, 2, canonical_layout=True, blocks_per_chunk=PAGE // BLOCK)
    try:
        wait_ready(sglang, two, registry)
        case = reference.case(PROMPT)
        ask(sglang, case)
        assert sglang.is_empty(30)
        assert ask(two, case) == PAGES * PAGE
        with cache_of(registry, "two") as client:
            back = reference.case(PROMPT)
            ask(two, back)
            pages = pb.PromptPages(tokens=back.prompt)
            wait_until(lambda: client.lookup(pages).host_pages == PAGES, 30)
            assert ask(sglang, back) == PAGES * PAGE
    finally:
        two.close()


def test_a_holder_of_another_kind_that_was_killed_costs_a_computed_prompt(
    engines: tuple[Engine, VllmEngine], reference: Reference
) -> None:
    """The last one: SGLang is gone afterwards."""
    sglang, vllm = engines
    case = reference.case(PROMPT)
    ask(sglang, case)
    sglang.kill()
    began = time.monotonic()
    assert ask(vllm, case) == 0
    print(f"computed {time.monotonic() - began:.2f} s after the holder was killed")
    assert ask(vllm, reference.case(PROMPT)) == 0
