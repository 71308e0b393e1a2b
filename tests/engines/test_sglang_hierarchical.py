"""A real SGLang engine whose third tier is a kvgrpc storage backend: pages leave both memories and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.prefetch.storage.mooncake.local import LocalStore
from tests.engines.engine import PAGE, Engine
from tests.engines.hierarchical import (
    DEVICE_AND_HOST_TOKENS,
    LONG_PROMPT,
    PROMPT,
    ask,
    started,
)
from tests.engines.model import Case, Reference

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def store() -> Iterator[LocalStore]:
    with LocalStore(owners=1) as store:
        yield store


@pytest.fixture(scope="module", params=["file", "mooncake"])
def storage(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    if request.param == "file":
        return {"storage": "file", "storage_config": {"path": str(folder / "kv")}}
    return {"storage": "mooncake", "storage_config": {"master": request.getfixturevalue("store").address}}


@pytest.fixture(scope="module")
def engine(storage: dict[str, Any], folder: Path, reference: Reference) -> Iterator[Engine]:
    engine = started(folder, reference, **storage)
    try:
        yield engine.wait_ready()
    finally:
        engine.close()


def comes_back(engine: Engine, case: Case, cached: int) -> None:
    """Empties device and host until the prompt's pages come from the store, which is written in the background."""
    deadline = time.monotonic() + 60
    while True:
        assert engine.is_empty()
        found = ask(engine, case).cached
        assert found % PAGE == 0 and found <= cached
        if found == cached:
            return
        assert time.monotonic() < deadline, f"{found} of {cached} tokens came back"


def test_a_prompt_comes_back_from_the_store_with_the_same_tokens(engine: Engine, reference: Reference) -> None:
    case = reference.case(PROMPT)
    assert ask(engine, case).cached == 0
    comes_back(engine, case, 8 * PAGE)


def test_a_longer_prompt_takes_what_it_shares(engine: Engine, reference: Reference) -> None:
    first = reference.case(PROMPT)
    ask(engine, first)
    comes_back(engine, first, 8 * PAGE)
    assert engine.is_empty()
    longer = reference.case(12 * PAGE + 1, prefix=first.prompt[: 6 * PAGE])
    assert ask(engine, longer).cached == 6 * PAGE, "of another prompt's pages: its own are not in the store yet"
    comes_back(engine, longer, 12 * PAGE)


def test_prompts_that_others_drove_out_of_device_and_host_come_back_from_the_store(
    engine: Engine, reference: Reference
) -> None:
    cases = [reference.case(PROMPT) for _ in range(2)]
    for case in cases:
        assert ask(engine, case).cached == 0
    for _ in range(DEVICE_AND_HOST_TOKENS // LONG_PROMPT + 4):
        ask(engine, reference.case(LONG_PROMPT, new_tokens=1))
    for case in cases:
        assert ask(engine, case).cached == 8 * PAGE


def test_a_store_that_dies_costs_its_hits_and_no_request(
    engine: Engine, storage: dict[str, object], reference: Reference, request: pytest.FixtureRequest
) -> None:
    if storage["storage"] != "mooncake":
        pytest.skip("files have no master that could die; the Mooncake run shows it")
    store = request.getfixturevalue("store")
    case = reference.case(PROMPT)
    ask(engine, case)
    comes_back(engine, case, 8 * PAGE)
    store.kill_master()
    assert engine.is_empty()
    began = time.monotonic()
    assert ask(engine, case).cached == 0
    assert time.monotonic() - began < 30
    for _ in range(3):
        ask(engine, reference.case(PROMPT))
    store.start_master()
    comes_back(engine, reference.case(PROMPT), 8 * PAGE)
