"""Two tensor-parallel ranks on each side; decode is told other prompts, and has the right tokens by pages alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import PAGE, Pair
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(230)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path, tp=2)
    yield pair.wait_ready()
    pair.close()


@pytest.mark.parametrize("length", [PAGE, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, reference: Reference, length: int) -> None:
    case = reference.case(length)
    prefill, decode = pair.submit_unseen(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(pair: Pair, reference: Reference) -> None:
    cases = [reference.case(120) for _ in range(6)]
    requests = [pair.submit_unseen(case.prompt, 8) for case in cases]
    pair.prefill.abort(requests[1][0])
    pair.decode.abort(requests[4][1])
    for case, (prefill, decode) in zip(cases, requests, strict=True):
        assert prefill.wait() and decode.wait()
        assert decode.error is not None or decode.tokens == case.tokens
    assert sum(decode.error is None for _, decode in requests) >= 4
    assert pair.prefill.is_empty() and pair.decode.is_empty()
