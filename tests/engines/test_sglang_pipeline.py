"""Two pipeline stages of prefill, each with some of the layers and a rank of its own; decode has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.model import STAGED, Reference
from tests.engines.pipeline import LENGTHS, check, check_at_once, kill_last_stage

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("staged"), STAGED)


@pytest.fixture(scope="module")
def pair(folder: Path, staged: Reference) -> Iterator[Pair]:
    pair = Pair(folder, staged.path, prefill={"pp_size": 2})
    yield pair.wait_ready()
    pair.close()


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, staged: Reference, length: int) -> None:
    check(pair, staged.case(length))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(pair: Pair, staged: Reference) -> None:
    check_at_once(pair, staged)


def test_a_stage_that_is_killed_fails_what_waits_for_it_and_prefill_serves_again(pair: Pair, staged: Reference) -> None:
    kill_last_stage(pair, staged, "prefill")
