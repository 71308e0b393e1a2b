"""Speculative decoding in real SGLang engines over kvgrpc, by a draft head whose KV cache is handed over with the
model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import PAGE, Engine, Pair, engine_arguments
from tests.engines.model import CarriedHeadReference
from tests.engines.stages import check_unseen, handed_over

pytestmark = pytest.mark.timeout(600)
ON_CPU = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.speculative_on_cpu:register"}
DRAFTS = 3
TOKENS = 17


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(algorithm: str, folder: Path) -> CarriedHeadReference:
    model = CarriedHeadReference(folder / algorithm, algorithm.lower())
    model.for_sglang()
    return model


@pytest.fixture(scope="module")
def own(algorithm: str, model: CarriedHeadReference) -> dict[str, object]:
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(model.head),
        "speculative_num_steps": DRAFTS,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": DRAFTS + 1,
    }


@pytest.fixture(scope="module")
def pair(folder: Path, model: CarriedHeadReference, own: dict[str, object]) -> Iterator[Pair]:
    held = {"disaggregation_decode_enable_radix_cache": True}
    pair = Pair(folder, model.path, environment=ON_CPU, prefill=own, decode={**own, **held})
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def single(folder: Path, model: CarriedHeadReference, own: dict[str, object], pair: Pair) -> Iterator[Engine]:
    """One engine that does it all."""
    engine = Engine("null", folder, {**engine_arguments(model.path, 1), **own}, ON_CPU)
    engine.wait_ready()
    yield engine
    engine.close()


@pytest.mark.parametrize("length", [3, PAGE, PAGE + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, single: Engine, model: CarriedHeadReference, length: int) -> None:
    """And as many tokens of drafts are right as in one engine: the draft has seen the prompt, all of it."""
    case, room = model.case(length, new_tokens=TOKENS), pair.room()
    told = [*model.case(length, new_tokens=1).prompt[:-1], case.prompt[-1]]
    prefill = pair.submit_to_prefill(case.prompt, room)
    decode = pair.submit_to_decode(told, TOKENS, room)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    alone = single.generate(case.prompt, TOKENS)
    assert alone.result() == case.tokens
    print(f"{TOKENS} tokens in {decode.messages} messages, {decode.accepted} of drafts, {alone.accepted} alone")
    assert decode.accepted == alone.accepted
    assert decode.accepted >= TOKENS // 4 or length <= PAGE


@pytest.mark.parametrize("length", [3, PAGE + 1, 100], ids=lambda length: f"{length} tokens")
def test_the_first_drafts_are_as_right_as_in_one_engine(
    pair: Pair, single: Engine, model: CarriedHeadReference, length: int
) -> None:
    """All but the first of them are made of the hidden states that prefill hands over."""
    for _ in range(100):
        case = model.case(length, new_tokens=2)  # with the second one drafts are tried once
        alone = single.generate(case.prompt, 2)
        assert alone.result() == case.tokens
        if alone.accepted > 1:
            break
    decode = pair.submit_unseen(case.prompt, 2)[1]
    assert decode.result() == case.tokens
    assert decode.accepted == alone.accepted > 1


def test_what_decode_holds_of_the_prompt_is_not_handed_over(
    pair: Pair, single: Engine, model: CarriedHeadReference
) -> None:
    """SGLang looks for pages of a prompt with drafts by pairs of tokens."""
    held = model.case(6 * PAGE + 2, new_tokens=TOKENS)
    assert check_unseen(pair, held) == (0, 7)
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    case, room = model.case(9 * PAGE + 3, new_tokens=TOKENS, prefix=held.prompt[:-1]), pair.room()
    prefill, decode = pair.submit_unseen(case.prompt, TOKENS, room)
    assert decode.result() == case.tokens and prefill.result() == case.tokens[:1]
    assert (decode.cached, handed_over(pair, room)) == (6 * PAGE, 10 - 6)
    alone = single.generate(case.prompt, TOKENS)
    assert alone.result() == case.tokens
    assert decode.accepted == alone.accepted


def test_requests_at_once_leave_no_page_behind(pair: Pair, model: CarriedHeadReference) -> None:
    pair.check_at_once([model.case(60 + length, new_tokens=TOKENS) for length in range(6)])


def test_ranks_of_other_heads_hand_over_those_of_the_draft_too(
    folder: Path, model: CarriedHeadReference, own: dict[str, object], single: Engine
) -> None:
    """One tensor-parallel rank to two. As many tokens of drafts are right as in one engine."""
    pair = Pair(folder, model.path, environment=ON_CPU, prefill=own, decode={**own, "tp_size": 2})
    try:
        pair.wait_ready()
        for length in (3, PAGE + 1, 100):
            case = model.case(length, new_tokens=TOKENS)
            prefill, decode = pair.submit_unseen(case.prompt, TOKENS)
            assert (prefill.result(), decode.result()) == (case.tokens[:1], case.tokens)
            alone = single.generate(case.prompt, TOKENS)
            assert alone.result() == case.tokens
            assert decode.accepted == alone.accepted
        assert decode.accepted >= TOKENS // 4
    finally:
        pair.close()
