"""A model of which vLLM keeps, for half of the layers, one state a request instead of its tokens (gated delta net)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import common_pb2 as pb
from tests.engines.model import Case, RecurrentReference
from tests.engines.stages import handed_over, rank_address
from tests.engines.vllm_engine import BLOCK, IN_32_BITS, VllmPair

pytestmark = pytest.mark.timeout(700)
# vLLM hears of a failure when the blocks are quiet, 2 s after the proof that prefill is dead (docs/session.md rule 8,
# pages come back by evidence), which takes 1 s. The rest is a scheduler step, and two cores.
QUIET_SECONDS = 6.0
# Of a layer: what the convolution remembers of its last tokens, and the state itself.
STATE_BYTES = {
    "GDN_ATTN": 4 * (3 * (2 * 2 * 16 + 4 * 16) + 4 * 16 * 16),
    "MAMBA2": 4 * (3 * (128 + 2 * 16) + 128 * 16),
    "SHORT_CONV": 4 * 3 * 64,
}
# Of Mamba 2 vLLM's kernels for CPUs give no states where blocks end, which a prefix cache would keep.
KINDS = [("GDN_ATTN", True), ("GDN_ATTN", False), ("MAMBA2", False), ("SHORT_CONV", True)]


@dataclass(frozen=True)
class Setting:
    """Of both engines. ``caches``: they keep prefixes, and of a request the states at ends of blocks."""

    kind: str
    caches: bool
    reference: RecurrentReference
    pair: VllmPair


@pytest.fixture(scope="module", params=KINDS, ids=lambda param: f"{param[0]}{'' if param[1] else ' without prefixes'}")
def setting(request: pytest.FixtureRequest, folder: Path) -> Iterator[Setting]:
    kind, caches = request.param
    reference = RecurrentReference(folder / f"{kind}-{caches}", kind)
    arguments = {"enable_prefix_caching": caches, "enforce_eager": True}
    pair = VllmPair(folder, reference.path, environment=IN_32_BITS, prefill=arguments, decode=arguments)
    pair.wait_ready()
    yield Setting(kind, caches, reference, pair)
    pair.close()


@pytest.fixture
def pair(setting: Setting) -> VllmPair:
    return setting.pair


@pytest.fixture
def recurrent(setting: Setting) -> RecurrentReference:
    return setting.reference


def check(pair: VllmPair, case: Case) -> int:
    """How many blocks of layers that see all tokens were handed over. A hand-off that is not used has other tokens:
    decode does not know the prompt."""
    room = pair.room()
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
    assert decode.result() == case.tokens
    prefill.result()  # of a prompt without its last token
    return handed_over(pair, room)


def test_the_engine_alone_has_the_tokens_of_transformers(pair: VllmPair, recurrent: RecurrentReference) -> None:
    case = recurrent.case(100, new_tokens=12)
    assert pair.decode.generate(case.prompt, 12).result() == case.tokens


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, 5, BLOCK, BLOCK + 1, 100, 129, 300], ids=lambda length: f"{length} tokens"
)
def test_tokens_are_those_of_transformers(pair: VllmPair, recurrent: RecurrentReference, length: int) -> None:
    check(pair, recurrent.case(length, new_tokens=12))


def test_both_ranks_say_that_they_have_a_pool_of_states(setting: Setting) -> None:
    for engine in (setting.pair.prefill, setting.pair.decode):
        with SyncClient(rank_address(engine)) as client:
            kv, states = client.get_rank().pools
        assert (kv.name, kv.kind, states.name, states.kind) == ("kv", pb.POOL_KIND_KV, "state-1", pb.POOL_KIND_STATE)
        assert [region.page_bytes for region in states.regions] == [STATE_BYTES[setting.kind]] * 2
        assert states.page_tokens == 0


def test_requests_at_once_keep_their_states_apart(pair: VllmPair, recurrent: RecurrentReference) -> None:
    pair.check_at_once([recurrent.case(length) for length in (20, 40, 60, 80, 100, 120)])


def test_decode_takes_only_what_it_does_not_hold(setting: Setting) -> None:
    """A state is held where a block ends: that of the first prompt's last token but one is."""
    if not setting.caches:
        pytest.skip("nothing is held")
    pair, recurrent = setting.pair, setting.reference
    first = recurrent.case(4 * BLOCK + 1)
    assert check(pair, first) == 4
    check(pair, first)
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    assert check(pair, recurrent.case(9 * BLOCK + 3, prefix=first.prompt[: 4 * BLOCK])) == 10 - 4
    assert pair.decode.is_empty()


def test_a_prefill_that_is_killed_ends_what_waits_for_it_and_another_one_serves(
    pair: VllmPair, recurrent: RecurrentReference
) -> None:
    check(pair, recurrent.case(100))
    waiting = pair.submit_to_decode(recurrent.case(300).prompt, 8)
    assert not waiting.wait(0.5)
    pair.prefill.kill()
    waiting.failure(QUIET_SECONDS)
    assert "PEER_LOST" in pair.decode.reason()
    pair.restart("prefill")
    case = recurrent.case(100)
    assert pair.submit_unseen(case.prompt, 8)[1].result() == case.tokens
    assert pair.decode.is_empty()
