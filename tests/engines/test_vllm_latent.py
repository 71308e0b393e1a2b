"""A model with multi-head latent attention (MLA): a token's KV cache is one latent a layer, the same in every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.model import LATENT_BYTES, Case, LatentReference
from tests.engines.stages import rank_address
from tests.engines.vllm_engine import LATENT_BLOCK as BLOCK
from tests.engines.vllm_engine import ON_CPU_MLA, VllmPair

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> LatentReference:
    return LatentReference(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def pair(folder: Path, latent: LatentReference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, latent.path, prefill=ON_CPU_MLA, decode=ON_CPU_MLA)
    pair.wait_ready()
    yield pair
    pair.close()


def check(pair: VllmPair, case: Case) -> None:
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens))
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    assert "kvgrpc: hand-off of request" not in pair.prefill.log() + pair.decode.log()


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, latent: LatentReference, length: int) -> None:
    check(pair, latent.case(length, new_tokens=12))


def test_both_ranks_say_that_their_pages_are_latents(pair: VllmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            (kv,) = client.get_rank().pools
        assert (kv.page_tokens, kv.heads_total) == (BLOCK, 0)
        assert [region.page_bytes for region in kv.regions] == [BLOCK * LATENT_BYTES] * 2


def test_all_blocks_come_back(pair: VllmPair, latent: LatentReference) -> None:
    pair.check_at_once([latent.case(length) for length in (20, 40, 60, 80)])


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
def test_one_rank_of_prefill_sends_to_each_of_decode(
    folder: Path, latent: LatentReference, prefill: int, decode: int
) -> None:
    """Each rank has all of a latent."""
    sizes = [{**ON_CPU_MLA, "tensor_parallel_size": size} for size in (prefill, decode)]
    pair = VllmPair(folder, latent.path, prefill=sizes[0], decode=sizes[1])
    try:
        pair.wait_ready()
        for length in (3, BLOCK + 1, 100):
            check(pair, latent.case(length))
        assert pair.prefill.is_empty() and pair.decode.is_empty()
    finally:
        pair.close()
