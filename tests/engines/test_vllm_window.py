"""A model of which vLLM keeps the layers with a sliding window apart: their blocks are handed over with the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.model import WINDOW, Case, WindowReference
from tests.engines.stages import handed_over, rank_address
from tests.engines.vllm_engine import BLOCK, VllmPair

pytestmark = pytest.mark.timeout(700)
# vLLM hears of a failure when the blocks are quiet, 2 s after the proof that prefill is dead (docs/session.md rule 8,
# pages come back by evidence), which takes 1 s. The rest is a scheduler step, and two cores.
QUIET_SECONDS = 6.0
# Of a prompt of that length the last token sees one token of the first block, and the next one sees none.
AT_A_BLOCKS_END = WINDOW + BLOCK - 1
LENGTHS = [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, AT_A_BLOCKS_END - 1, AT_A_BLOCKS_END, AT_A_BLOCKS_END + 1, 100, 300]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> WindowReference:
    return WindowReference(tmp_path_factory.mktemp("windowed")).for_vllm()


@pytest.fixture(scope="module")
def pair(folder: Path, windowed: WindowReference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, windowed.path)
    pair.wait_ready()
    yield pair
    pair.close()


def check(pair: VllmPair, case: Case) -> int:
    """How many blocks of layers that see all tokens were handed over. A hand-off that is not used has other tokens:
    decode does not know the prompt."""
    room = pair.room()
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
    assert decode.result() == case.tokens
    prefill.result()  # of a prompt without its last token
    return handed_over(pair, room)


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, windowed: WindowReference, length: int) -> None:
    check(pair, windowed.case(length, new_tokens=12))


def test_both_ranks_say_that_they_have_a_pool_of_windows(pair: VllmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            kv, windows = client.get_rank().pools
        assert (kv.name, windows.name) == ("kv", "swa-1")
        assert len(kv.regions) == len(windows.regions) == 2  # of two layers each
        assert kv.page_tokens == windows.page_tokens == BLOCK


def test_decode_takes_only_what_it_does_not_hold(pair: VllmPair, windowed: WindowReference) -> None:
    """It holds a prefix whose last tokens, of the length of a window, it holds of both pools."""
    first = windowed.case(6 * BLOCK + 3)
    assert check(pair, first) == 7
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    assert check(pair, windowed.case(9 * BLOCK + 3, prefix=first.prompt[: 6 * BLOCK])) == 10 - 6
    assert pair.decode.is_empty()


def test_a_prompt_that_both_sides_hold_has_the_right_tokens(pair: VllmPair, windowed: WindowReference) -> None:
    """All blocks but that of its last token, which decode computes: none comes."""
    case = windowed.case(5 * BLOCK + 1)
    assert check(pair, case) == 5
    assert check(pair, case) == 0
    assert pair.decode.is_empty()
    assert check(pair, case) == 5
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_a_request_whose_prefill_never_comes_gives_its_blocks_back(pair: VllmPair, windowed: WindowReference) -> None:
    waiting = pair.submit_to_decode(windowed.case(300).prompt, 8)
    assert not waiting.wait(1.0)
    pair.decode.abort(waiting)
    waiting.failure(5)
    assert pair.decode.is_empty()


def test_a_prefill_that_is_killed_ends_what_waits_for_it_and_another_one_serves(
    pair: VllmPair, windowed: WindowReference
) -> None:
    check(pair, windowed.case(100))
    waiting = pair.submit_to_decode(windowed.case(300).prompt, 8)
    assert not waiting.wait(0.5)
    killed = pair.prefill.kill()
    waiting.failure(QUIET_SECONDS)
    print(f"prefill killed: decode's request ended after {(waiting.ended or 0) - killed:.3f} s: {pair.decode.reason()}")
    assert "PEER_LOST" in pair.decode.reason()
    pair.restart("prefill")
    case = windowed.case(100)
    assert pair.submit_unseen(case.prompt, 8)[1].result() == case.tokens
    assert pair.decode.is_empty()
