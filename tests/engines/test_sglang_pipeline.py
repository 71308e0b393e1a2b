"""Pipeline stages at either side, each with some of the layers and a rank of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.model import STAGED, Reference
from tests.engines.pipeline import LENGTHS, check, check_at_once, check_empty, kill_last_stage
from tests.engines.stages import Asked, has_met, wait_for

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
def pair(folder: Path, staged: Reference, sizes: tuple[int, int]) -> Iterator[Pair]:
    pair = Pair(folder, staged.path, prefill={"pp_size": sizes[0]}, decode={"pp_size": sizes[1]})
    yield pair.wait_ready()
    pair.close()


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, staged: Reference, length: int) -> None:
    check(pair, staged.case(length))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(
    pair: Pair, staged: Reference, sizes: tuple[int, int]
) -> None:
    check_at_once(pair, staged)
    check_empty(pair.decode, sizes[1])


def test_a_hand_off_that_decode_gives_up_under_way_ends_in_every_stage(
    pair: Pair, staged: Reference, sizes: tuple[int, int]
) -> None:
    asked = Asked(pair, staged.case(100), pair.room())
    decode = asked.ask_decode()
    wait_for(pair.decode, asked.number, has_met)
    pair.decode.abort(decode)
    assert decode.wait(), pair.decode.log_tail()
    check_empty(pair.decode, sizes[1])
    check(pair, staged.case(50))


def test_a_stage_that_is_killed_fails_what_waits_for_it_and_its_engine_serves_again(
    pair: Pair, staged: Reference, sizes: tuple[int, int]
) -> None:
    kill_last_stage(pair, staged, "prefill" if sizes[0] > 1 else "decode")
    check_empty(pair.decode, sizes[1])
