"""Pipeline stages of several tensor-parallel ranks, two and two at either side: each rank has some of the layers, and
half of their heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.model import STAGED, Reference
from tests.engines.pipeline import check, check_at_once, check_empty
from tests.engines.stages import Asked, has_met, wait_for

pytestmark = pytest.mark.timeout(900)
STAGES, RANKS = 2, 2
# SGLang compiles for the first one, beside seven processes that poll.
FIRST_REQUEST_SECONDS = 180.0


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("staged"), STAGED)


@pytest.fixture(scope="module")
def pair(folder: Path, staged: Reference) -> Iterator[Pair]:
    pair = Pair(folder, staged.path, tp=RANKS, prefill={"pp_size": STAGES}, decode={"pp_size": STAGES})
    pair.wait_ready()
    warm_up(pair, staged)
    yield pair
    pair.close()


def warm_up(pair: Pair, staged: Reference) -> None:
    case = staged.case(3)
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens))
    assert prefill.wait(FIRST_REQUEST_SECONDS) and decode.wait(FIRST_REQUEST_SECONDS), pair.decode.log_tail()
    assert decode.tokens == case.tokens


@pytest.mark.parametrize("length", (3, 300), ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, staged: Reference, length: int) -> None:
    check(pair, staged.case(length))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(pair: Pair, staged: Reference) -> None:
    check_at_once(pair, staged)
    check_empty(pair.decode, STAGES)


def test_a_hand_off_that_decode_gives_up_under_way_ends_in_every_rank(pair: Pair, staged: Reference) -> None:
    asked = Asked(pair, staged.case(100), pair.room())
    decode = asked.ask_decode()
    wait_for(pair.decode, asked.number, has_met)
    pair.decode.abort(decode)
    assert decode.wait(), pair.decode.log_tail()
    check_empty(pair.decode, STAGES)
    check(pair, staged.case(50))
