"""A model all of whose layers keep a state (Mamba 2): a hand-off is one page, whatever the prompt's length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import common_pb2 as pb
from tests.engines.model import StatesReference
from tests.engines.pipeline import check
from tests.engines.stages import Asked, handed_over, rank_address, wait_for
from tests.engines.vllm_engine import IN_32_BITS, VllmPair

pytestmark = pytest.mark.timeout(700)
# vLLM hears of a failure when the pages are quiet, 2 s after the proof that prefill is dead, which takes 1 s; the rest
# is a scheduler step, and two cores.
QUIET_SECONDS = 6.0
# Of a layer: what the convolution remembers of its last tokens, and the state itself.
STATE_BYTES = 4 * (3 * (128 + 2 * 16) + 128 * 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StatesReference:
    return StatesReference(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def pair(folder: Path, model: StatesReference) -> Iterator[VllmPair]:
    arguments = {"enable_prefix_caching": False, "enforce_eager": True}
    pair = VllmPair(folder, model.path, environment=IN_32_BITS, prefill=arguments, decode=arguments)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 100, 129, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, model: StatesReference, length: int) -> None:
    check(pair, model.case(length, new_tokens=12))


def test_both_ranks_say_that_they_have_a_pool_of_states_alone(pair: VllmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            (states,) = client.get_rank().pools
        assert (states.name, states.kind, states.page_tokens) == ("kv", pb.POOL_KIND_STATE, 0)
        assert [region.page_bytes for region in states.regions] == [STATE_BYTES] * 2


def test_a_prompt_is_one_page(pair: VllmPair, model: StatesReference) -> None:
    case, room = model.case(300), pair.room()
    _, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
    assert decode.result() == case.tokens
    assert handed_over(pair, room) == 1


def test_requests_at_once_keep_their_states_apart(pair: VllmPair, model: StatesReference) -> None:
    pair.check_at_once([model.case(length) for length in (20, 40, 60, 80, 100, 120)])
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_a_prefill_that_is_killed_ends_what_waits_for_it_and_another_one_serves(
    pair: VllmPair, model: StatesReference
) -> None:
    asked = Asked(pair, model.case(300), pair.room())
    waiting = asked.ask_decode()
    wait_for(pair.prefill, asked.number, lambda found: found.pages > 0)
    pair.prefill.kill()
    waiting.failure(QUIET_SECONDS)
    assert "PEER_LOST" in pair.decode.reason()
    pair.restart("prefill")
    check(pair, model.case(100))
    assert pair.decode.is_empty()
