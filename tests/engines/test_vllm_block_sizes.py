"""vLLM engines whose blocks differ in size: decode's is a multiple of prefill's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.model import Case, Reference
from tests.engines.stages import pages_at, rank_address
from tests.engines.vllm_engine import BLOCK, VllmPair

pytestmark = pytest.mark.timeout(700)
LARGE = 2 * BLOCK


def sized(folder: Path, model: Path, prefill: int, decode: int) -> VllmPair:
    """Prompts of more than 128 tokens are computed in chunks (vllm_engine.py)."""
    sizes = [{"block_size": size, "num_gpu_blocks_override": 8 * 512 // size + 1} for size in (prefill, decode)]
    return VllmPair(folder, model, prefill=sizes[0], decode=sizes[1])


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    pair = sized(folder, reference.path, BLOCK, LARGE)
    pair.wait_ready()
    yield pair
    pair.close()


def check(pair: VllmPair, case: Case) -> int:
    """How many of decode's blocks were handed over. It is told another prompt with the same last token: it has these
    tokens by the hand-off alone."""
    room = pair.room()
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
    assert decode.result() == case.tokens, pair.prefill.reason() + pair.decode.reason()
    assert prefill.result() == case.tokens[:1]
    assert "kvgrpc: hand-off of request" not in pair.prefill.log() + pair.decode.log()
    return pages_at(pair.decode, pair.number_of(room))


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, LARGE, LARGE + 1, 100, 300])
def test_tokens_are_those_of_one_engine(pair: VllmPair, reference: Reference, length: int) -> None:
    check(pair, reference.case(length))


def test_each_rank_says_its_own_block_size(pair: VllmPair) -> None:
    found = []
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            (pool,) = client.get_rank().pools
        found.append((pool.page_tokens, pool.axes))
    assert found == [(BLOCK, "head,kv,token,dim"), (LARGE, "head,kv,token,dim")]


@pytest.mark.parametrize("more", [1, BLOCK, LARGE + 3], ids=lambda more: f"{more} tokens more")
def test_decode_takes_what_is_behind_the_prefix_that_it_holds(pair: VllmPair, reference: Reference, more: int) -> None:
    """Of a prompt that begins as the one before, prefill holds more: its blocks are smaller."""
    first = reference.case(3 * BLOCK + 2 + more)
    assert check(pair, first) == math.ceil(len(first.prompt) / LARGE)
    second = reference.case(3 * BLOCK + 5 + more, prefix=first.prompt[: 3 * BLOCK])
    assert check(pair, second) == math.ceil(len(second.prompt) / LARGE) - 1


def test_all_blocks_come_back(pair: VllmPair, reference: Reference) -> None:
    pair.check_at_once([reference.case(length) for length in (20, 40, 60, 80, 200)])


def test_the_other_way_round_such_a_request_fails_with_both_sizes(folder: Path, reference: Reference) -> None:
    other = sized(folder, reference.path, LARGE, BLOCK)
    try:
        other.wait_ready()
        case, room = reference.case(100), other.room()
        prefill, decode = other.submit(case.prompt, 8, room)
        decode.failure(30)
        assert f"pools[0].page_tokens: prefill {LARGE}, decode {BLOCK}" in other.reason_of(decode, room)
        assert prefill.wait(30)
    finally:
        other.close()
