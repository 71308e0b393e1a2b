"""A model of which SGLang keeps, for half of the layers, one state a request instead of its tokens (``mamba``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import common_pb2 as pb
from tests.engines.engine import PAGE, Pair
from tests.engines.model import COMPILING_SECONDS, RecurrentReference
from tests.engines.stages import check_continued, check_unseen, rank_address

pytestmark = pytest.mark.timeout(700)
ON_CPU = {
    "SGLANG_ON_CPU_PLUGIN": "tests.engines.sglang_recurrent_on_cpu:register",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
CHUNK = 64
# Of a layer: what the convolution remembers of its last tokens, and the state itself.
STATE_BYTES = {
    "GDN_ATTN": (4 * 3 * (2 * 2 * 16 + 4 * 16), 4 * 4 * 16 * 16),
    "KDA": (4 * 3 * 3 * 4 * 16, 4 * 4 * 16 * 16),
    "MAMBA2": (4 * 3 * (128 + 2 * 16), 4 * 128 * 16),
    "SHORT_CONV": (4 * 3 * 64,),
}
# A prefix cache takes the states of GDN at ends of pages, those of short convolutions with pages of one token alone.
PAGES = {"SHORT_CONV": 1}
KINDS = [("SHORT_CONV", True), ("GDN_ATTN", True), ("GDN_ATTN", False), ("MAMBA2", False), ("KDA", False)]


@dataclass(frozen=True)
class Setting:
    """Of both engines. ``caches``: they keep prefixes, with the states at their ends."""

    kind: str
    caches: bool
    reference: RecurrentReference
    pair: Pair


@pytest.fixture(scope="module", params=KINDS, ids=lambda param: f"{param[0]}{'' if param[1] else ' without prefixes'}")
def setting(request: pytest.FixtureRequest, folder: Path) -> Iterator[Setting]:
    kind, caches = request.param
    reference = RecurrentReference(folder / f"{kind}-{caches}", kind).for_sglang()
    common: dict[str, Any] = {"max_mamba_cache_size": 48}
    common.update({"page_size": PAGES.get(kind, PAGE)} if caches else {"disable_radix_cache": True})
    decode = {**common, **({"disaggregation_decode_enable_radix_cache": True} if caches else {})}
    pair = Pair(folder, reference.path, environment=ON_CPU, prefill=common, decode=decode)
    pair.wait_ready()
    try:
        case = reference.case(40)
        # With the first request torch compiles the model's norms, on either side.
        assert [half.result(COMPILING_SECONDS) for half in pair.submit(case.prompt, len(case.tokens))][1] == case.tokens
        yield Setting(kind, caches, reference, pair)
    finally:
        pair.close()


@pytest.fixture
def pair(setting: Setting) -> Pair:
    return setting.pair


@pytest.fixture
def recurrent(setting: Setting) -> RecurrentReference:
    return setting.reference


def pages_of(setting: Setting, tokens: int) -> int:
    return math.ceil(tokens / PAGES.get(setting.kind, PAGE))


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 129, 300], ids=lambda length: f"{length} tokens"
)
def test_tokens_are_those_of_transformers(setting: Setting, length: int) -> None:
    case = setting.reference.case(length, new_tokens=12)
    assert check_unseen(setting.pair, case) == (0, pages_of(setting, length))


def test_both_ranks_say_that_they_have_a_pool_of_states(setting: Setting) -> None:
    for engine in (setting.pair.prefill, setting.pair.decode):
        with SyncClient(rank_address(engine)) as client:
            kv, states = client.get_rank().pools
        assert (kv.name, kv.kind, states.name, states.kind) == ("kv", pb.POOL_KIND_KV, "mamba", pb.POOL_KIND_STATE)
        latents = setting.kind == "KDA"
        # Of two layers latents, the same in each rank, or keys and values of heads.
        assert (len(kv.regions), kv.heads_total > 0) == ((2, False) if latents else (4, True))
        expected = [size for size in STATE_BYTES[setting.kind] for _ in range(2)]
        assert [region.page_bytes for region in states.regions] == expected
        assert states.page_tokens == 0


def test_requests_at_once_keep_their_states_apart(pair: Pair, recurrent: RecurrentReference) -> None:
    pair.check_at_once([recurrent.case(length) for length in (20, 40, 60, 80, 100, 120)])


def test_a_prompt_that_continues_another_has_the_right_tokens(pair: Pair, recurrent: RecurrentReference) -> None:
    """Whatever SGLang's caches keep of the first one; with its state they keep all of it, or what a chunk ended."""
    first = recurrent.case(2 * CHUNK)
    for case in (first, first, recurrent.case(3 * CHUNK + 3, prefix=first.prompt)):
        check_unseen(pair, case)
    assert pair.prefill.is_empty()
    check_unseen(pair, recurrent.case(4 * CHUNK + 3, prefix=first.prompt))
    assert pair.decode.is_empty()


def test_of_a_conversation_that_goes_on_decode_takes_only_what_it_does_not_hold(setting: Setting) -> None:
    """It holds what it had the state of: short convolutions' at the end of its answer, GDN's at every 256th token."""
    if not setting.caches:
        pytest.skip("it holds nothing")
    pair, recurrent = setting.pair, setting.reference
    first = recurrent.case(252)
    assert check_unseen(pair, first) == (0, pages_of(setting, 252))
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    # Its last token decode has computed nothing for.
    held = 256 if setting.kind == "GDN_ATTN" else 252 + len(first.tokens) - 1
    left = pages_of(setting, 300) - pages_of(setting, held)
    assert check_continued(pair, recurrent, first, 300) == (held, left)


def test_a_hand_off_that_is_given_up_leaves_no_state_behind(pair: Pair, recurrent: RecurrentReference) -> None:
    """At decode while prefill was not asked, and at either side while chunks are under way."""
    waiting = pair.submit_to_decode(recurrent.case(100).prompt, 8)
    assert not waiting.wait(0.5)
    pair.decode.abort(waiting)
    halves = [pair.submit_unseen(recurrent.case(300).prompt, 8) for _ in range(2)]
    pair.decode.abort(halves[0][1])
    pair.prefill.abort(halves[1][0])
    for request in (waiting, *halves[0], *halves[1]):
        assert request.wait()
    pair.check_at_once([recurrent.case(length) for length in (1, 50, 150, 250)])


def test_a_prefill_that_is_killed_ends_what_waits_for_it_and_another_one_serves(setting: Setting) -> None:
    if (setting.kind, setting.caches) != ("GDN_ATTN", True):
        pytest.skip("once is enough: which states there are does not matter to it")
    pair, recurrent = setting.pair, setting.reference
    check_unseen(pair, recurrent.case(100))
    waiting = pair.submit_to_decode(recurrent.case(300).prompt, 8)
    assert not waiting.wait(0.5)
    pair.prefill.kill()
    waiting.failure(10)
    pair.restart("prefill")
    case = recurrent.case(100)
    assert pair.submit_unseen(case.prompt, 8)[1].result(COMPILING_SECONDS) == case.tokens
    assert pair.decode.is_empty()
