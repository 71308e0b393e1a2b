"""Two dp ranks at prefill whose controller gives requests out in turn: decode finds out who has which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(230)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path, prefill={"dp_size": 2, "load_balance_method": "round_robin"})
    yield pair.wait_ready()
    pair.close()


def test_tokens_are_right_whichever_dp_rank_computed_the_prompt(pair: Pair, reference: Reference) -> None:
    for _ in range(6):  # all even rooms: room % dp would name one rank only
        case = reference.case(100)
        prefill, decode = pair.submit(case.prompt, 8, room=pair.room() & ~1)
        assert decode.result() == case.tokens
        assert prefill.result() == case.tokens[:1]


def test_requests_at_once_leave_no_page_behind(pair: Pair, reference: Reference) -> None:
    cases = [reference.case(120) for _ in range(6)]
    requests = [pair.submit(case.prompt, 8) for case in cases]
    for case, (_, decode) in zip(cases, requests, strict=True):
        assert decode.result() == case.tokens
    assert pair.decode.is_empty()
