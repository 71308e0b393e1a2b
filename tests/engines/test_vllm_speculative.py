"""Speculative decoding in real vLLM engines over kvgrpc: with a draft model or a draft head, whose KV cache is handed
over with the model's, and without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.drafts import DRAFTS, TOKENS, accepted_alone, hand_over
from tests.engines.model import HeadReference, Reference
from tests.engines.vllm_engine import BLOCK, VllmPair

pytestmark = pytest.mark.timeout(900)
HEADS = ("eagle", "eagle3", "mtp")


@pytest.fixture(scope="module", params=["draft_model", "ngram", *HEADS])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(method: str, folder: Path, reference: Reference) -> Reference:
    return HeadReference(folder / method, method) if method in HEADS else reference


@pytest.fixture(scope="module")
def pair(method: str, folder: Path, model: Reference) -> Iterator[VllmPair]:
    """The draft model is the model itself: what it says is accepted, if it has seen the right prompt."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "ngram":
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
    elif method != "mtp":  # whose layers lie beside the model's
        speculation["model"] = str(model.head if isinstance(model, HeadReference) else model.path)
    own = {"speculative_config": speculation, "enforce_eager": True, "disable_log_stats": False}
    pair = VllmPair(folder, model.path, prefill=own, decode=own)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, method: str, model: Reference, length: int) -> None:
    """And as many tokens of drafts are right as in one engine: the draft has seen the prompt, all of it."""
    case = model.case(length, new_tokens=TOKENS)
    decode, accepted, pages = hand_over(pair, model, case.prompt)
    assert decode.tokens == case.tokens
    assert pages == math.ceil(length / BLOCK)
    print(f"{TOKENS} tokens in {decode.messages} messages, {accepted} of drafts")
    if method != "ngram":
        assert accepted == accepted_alone(pair, case.prompt)
        assert accepted >= TOKENS // 4 or length <= BLOCK


def test_what_decode_holds_of_the_prompt_is_not_handed_over(pair: VllmPair, method: str, model: Reference) -> None:
    """Of a prefix that it holds vLLM computes the last block again where a draft head has seen the next token."""
    held = model.case(100, new_tokens=TOKENS).prompt
    assert pair.decode.is_empty()
    pair.submit(held, 1)[1].result()
    case = model.case(150, new_tokens=TOKENS, prefix=held[: 2 * BLOCK])
    decode, accepted, pages = hand_over(pair, model, case.prompt, known=2 * BLOCK)
    assert decode.tokens == case.tokens
    assert pages == 5 - (1 if method in HEADS else 2)
    if method != "ngram":
        assert accepted == accepted_alone(pair, case.prompt)


def test_requests_at_once_leave_no_page_behind(pair: VllmPair, model: Reference) -> None:
    pair.check_at_once([model.case(60 + length, new_tokens=TOKENS) for length in range(6)])
