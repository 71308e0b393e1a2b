"""A model with multi-head latent attention (MLA): a token's KV cache is one latent a layer, the same in every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.engine import PAGE, Pair
from tests.engines.model import COMPILING_SECONDS, LATENT_BYTES, LatentReference
from tests.engines.stages import check_unseen, rank_address

pytestmark = pytest.mark.timeout(600)
ON_CPU = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.latent_on_cpu:register"}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> LatentReference:
    return LatentReference(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def pair(folder: Path, latent: LatentReference) -> Iterator[Pair]:
    pair = Pair(folder, latent.path, environment=ON_CPU, decode={"disaggregation_decode_enable_radix_cache": True})
    pair.wait_ready()
    try:
        case = latent.case(40)
        # With the first request torch compiles the model's norms, on either side.
        assert [half.result(COMPILING_SECONDS) for half in pair.submit(case.prompt, len(case.tokens))][1] == case.tokens
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, latent: LatentReference, length: int) -> None:
    case = latent.case(length, new_tokens=12)
    assert check_unseen(pair, case) == (0, math.ceil(length / PAGE))


def test_both_ranks_say_that_their_pages_are_latents(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            (kv,) = client.get_rank().pools
        assert (kv.page_tokens, kv.heads_total) == (PAGE, 0)
        assert [(region.component, region.page_bytes) for region in kv.regions] == [("latent", PAGE * LATENT_BYTES)] * 2


def test_decode_takes_only_what_it_does_not_hold(pair: Pair, latent: LatentReference) -> None:
    first = latent.case(6 * PAGE)
    assert check_unseen(pair, first) == (0, 6)
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    second = latent.case(9 * PAGE + 3, prefix=first.prompt[: 5 * PAGE])
    assert check_unseen(pair, second) == (5 * PAGE, 10 - 5)
    assert pair.prefill.is_empty()
