"""A model of which some layers see their own chunk alone, whose blocks vLLM keeps apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.model import WINDOW, Case, ChunkReference
from tests.engines.stages import handed_over, rank_address
from tests.engines.vllm_engine import BLOCK, VllmPair

pytestmark = pytest.mark.timeout(700)
CHUNKS = [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW - 4, 2 * WINDOW, 2 * WINDOW + 1, 300]


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> ChunkReference:
    return ChunkReference(tmp_path_factory.mktemp("chunked"))


@pytest.fixture(scope="module")
def pair(folder: Path, chunked: ChunkReference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, chunked.path)
    pair.wait_ready()
    yield pair
    pair.close()


def check(pair: VllmPair, case: Case) -> int:
    """How many blocks of layers that see all tokens were handed over. A hand-off that is not used has other tokens:
    decode does not know the prompt."""
    room = pair.room()
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
    assert decode.result() == case.tokens
    prefill.result()
    return handed_over(pair, room)


@pytest.mark.parametrize("length", [1, 3, *CHUNKS], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, chunked: ChunkReference, length: int) -> None:
    """Some answers go on into the next chunk."""
    check(pair, chunked.case(length, new_tokens=12))


def test_chunks_are_a_pool_of_their_own(pair: VllmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            assert [pool.name for pool in client.get_rank().pools] == ["kv", "swa-1"]


def test_decode_takes_only_what_it_does_not_hold(pair: VllmPair, chunked: ChunkReference) -> None:
    first = chunked.case(6 * BLOCK)
    assert check(pair, first) == 6
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    assert check(pair, chunked.case(9 * BLOCK + 3, prefix=first.prompt[: 5 * BLOCK])) == 10 - 5
    assert pair.decode.is_empty()
