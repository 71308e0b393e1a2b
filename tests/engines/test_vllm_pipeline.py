"""Pipeline stages at either side, each with some of the layers and a rank of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.model import STAGED, Reference
from tests.engines.pipeline import LENGTHS, check, check_at_once, kill_last_stage
from tests.engines.vllm_engine import VllmPair, stages

pytestmark = pytest.mark.timeout(900)
SIZES = (2, 1), (2, 2), (1, 2)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("staged"), STAGED)


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: f"{sizes[0]} to {sizes[1]}")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Stages of prefill and of decode."""
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(scope="module")
def pair(folder: Path, staged: Reference, sizes: tuple[int, int]) -> Iterator[VllmPair]:
    pair = VllmPair(folder, staged.path, prefill=stages(sizes[0]), decode=stages(sizes[1]))
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, staged: Reference, length: int) -> None:
    check(pair, staged.case(length))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(pair: VllmPair, staged: Reference) -> None:
    check_at_once(pair, staged)


def test_a_stage_that_is_killed_fails_what_waits_for_it_and_its_engine_serves_again(
    pair: VllmPair, staged: Reference, sizes: tuple[int, int]
) -> None:
    kill_last_stage(pair, staged, "prefill" if sizes[0] > 1 else "decode")
