"""Speculative decoding in real vLLM engines over kvgrpc: with a draft model, whose KV cache is handed over with the
model's, and without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.model import Reference
from tests.engines.vllm_engine import BLOCK, VllmPair

pytestmark = pytest.mark.timeout(900)
DRAFTS = 3
TOKENS = 17


@pytest.fixture(scope="module", params=["draft_model", "ngram"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(method: str, folder: Path, reference: Reference) -> Iterator[VllmPair]:
    """The draft model is the model itself: what it says is accepted, if it has seen the right prompt."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "draft_model":
        speculation["model"] = str(reference.path)
    else:
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
    own = {"speculative_config": speculation, "enforce_eager": True}
    pair = VllmPair(folder, reference.path, prefill=own, decode=own)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, method: str, reference: Reference, length: int) -> None:
    """Decode is told another prompt with the same last token: it has the right tokens by prefill's pages alone."""
    case, room = reference.case(length, new_tokens=TOKENS), pair.room()
    prefill = pair.prefill.generate(case.prompt, 1, **pair.at_prefill(room))
    told = [*reference.case(length).prompt[:-1], case.prompt[-1]]
    decode = pair.decode.generate(told, TOKENS, **pair.at_decode(room))
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    print(f"{TOKENS} tokens in {decode.messages} messages")
    if method == "draft_model" and length > BLOCK:
        assert decode.messages <= TOKENS // 2, "the draft model has not seen the prompt"


def test_requests_at_once_leave_no_page_behind(pair: VllmPair, reference: Reference) -> None:
    cases = [reference.case(60 + length, new_tokens=TOKENS) for length in range(6)]
    requests = [pair.submit(case.prompt, TOKENS) for case in cases]
    for case, (_, decode) in zip(cases, requests, strict=True):
        assert decode.result() == case.tokens
    assert pair.prefill.is_empty() and pair.decode.is_empty()
