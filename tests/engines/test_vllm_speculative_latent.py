"""A model of latents (MLA) whose own draft layer (MTP) speculates: a DeepSeek V3, whose draft has latents as well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.drafts import DRAFTS, TOKENS, accepted_alone, hand_over
from tests.engines.model import LATENT_BYTES, LatentHeadReference
from tests.engines.stages import rank_address
from tests.engines.vllm_engine import LATENT_BLOCK as BLOCK
from tests.engines.vllm_engine import ON_CPU_MLA, VllmPair

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def model(folder: Path) -> LatentHeadReference:
    return LatentHeadReference(folder / "latent-head")


@pytest.fixture(scope="module")
def pair(folder: Path, model: LatentHeadReference) -> Iterator[VllmPair]:
    own = {
        **ON_CPU_MLA,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
        "disable_log_stats": False,
    }
    pair = VllmPair(folder, model.path, prefill=own, decode=own)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, model: LatentHeadReference, length: int) -> None:
    """And as many tokens of drafts are right as in one engine: the draft has seen the prompt, all of it."""
    case = model.case(length, new_tokens=TOKENS)
    decode, accepted, pages = hand_over(pair, model, case.prompt)
    assert decode.tokens == case.tokens
    assert pages == math.ceil(length / BLOCK)
    print(f"{TOKENS} tokens in {decode.messages} messages, {accepted} of drafts")
    assert accepted == accepted_alone(pair, case.prompt)
    assert accepted >= TOKENS // 4 or length <= BLOCK


def test_the_drafts_layer_is_one_of_the_pages(pair: VllmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            (kv,) = client.get_rank().pools
        assert [region.page_bytes for region in kv.regions] == [BLOCK * LATENT_BYTES] * 2
