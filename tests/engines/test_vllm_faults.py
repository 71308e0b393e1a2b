"""What the other side of a real vLLM engine sees of a kill, a stop and a restart: an end with our reason, in time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Request
from tests.engines.model import Reference
from tests.engines.stages import LONG, ended_after, stop_prefill_at_every_stage
from tests.engines.vllm_engine import VllmEngine, VllmPair

pytestmark = pytest.mark.timeout(900)
# As in test_sglang_faults.py.
GONE_SECONDS, SILENT_SECONDS = 2.5, 6.0


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, reference.path)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def draw() -> random.Random:
    seed = int(os.environ.get("KVGRPC_TEST_SEED", "0") or 0) or random.SystemRandom().randrange(2**32)
    print(f"the moments of the faults: KVGRPC_TEST_SEED={seed}")
    return random.Random(seed)


def other(pair: VllmPair, role: str) -> VllmEngine:
    return pair.decode if role == "prefill" else pair.prefill


def request_under_way(
    pair: VllmPair, reference: Reference, at: VllmEngine, draw: random.Random
) -> tuple[Request, list[int]]:
    """A request of several chunks at a random moment of its life, as one side sees it, and the right tokens."""
    case = reference.case(400)
    prefill, decode = pair.submit(case.prompt, 8)
    time.sleep(draw.uniform(0, 0.1))  # anywhere within the request
    return (decode, case.tokens) if at is pair.decode else (prefill, case.tokens[:1])


def serves(pair: VllmPair, reference: Reference) -> None:
    case = reference.case(100)
    prefill, decode = pair.submit(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


def serves_again(pair: VllmPair, reference: Reference, seconds: float = 15.0) -> None:
    """A side that went on first has to hear what it missed."""
    end = time.monotonic() + seconds
    while True:
        case = reference.case(100)
        prefill, decode = pair.submit(case.prompt, 8)
        assert prefill.wait() and decode.wait()
        if decode.error is None:
            assert decode.tokens == case.tokens
            return
        assert time.monotonic() < end, pair.decode.reason()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_is_killed_ends_the_request_of_the_other_which_serves_on(
    pair: VllmPair, reference: Reference, draw: random.Random, role: str
) -> None:
    survivor = other(pair, role)
    serves(pair, reference)
    request, tokens = request_under_way(pair, reference, survivor, draw)
    waiting = pair.submit_to_decode(reference.case(100).prompt, 8)
    killed = getattr(pair, role).kill()
    assert request.wait(GONE_SECONDS), survivor.log_tail()
    assert request.error is not None or request.tokens == tokens
    if role == "prefill":
        waiting.failure(GONE_SECONDS)
        assert "PEER_LOST" in survivor.reason()
        print(
            f"prefill killed: decode's request ended after {(waiting.ended or 0) - killed:.3f} s: {survivor.reason()}"
        )
    pair.restart(role)
    serves(pair, reference)
    assert survivor.alive and survivor.is_empty()


def test_a_prefill_that_is_stopped_ends_what_waits_for_its_pages_and_nothing_else_and_the_pages_are_held(
    pair: VllmPair, reference: Reference
) -> None:
    serves(pair, reference)
    now = stop_prefill_at_every_stage(pair, reference)
    now.alone.failure(SILENT_SECONDS)
    assert f"room {pair.number_of(now.alone_room)}: PEER_LOST" in pair.decode.log()
    assert now.under_way.wait(SILENT_SECONDS), pair.decode.log_tail()
    assert now.under_way.error is not None or now.under_way.tokens == now.under_way_tokens
    print(f"prefill stopped: decode's requests ended after {ended_after(now.stopped, now.alone, now.under_way)} s")
    computed = now.computing.result()
    assert (computed[:8], len(computed)) == (now.computing_case.tokens, LONG)
    assert not pair.decode.is_empty(1), "pages were given back that a stopped prefill may still write to"
    pair.prefill.go_on()
    serves_again(pair, reference)
    assert pair.decode.alive and pair.decode.is_empty(40)


@pytest.mark.parametrize("role", ["decode"])
def test_a_side_that_is_stopped_ends_the_request_of_the_other_and_is_used_again_once_it_goes_on(
    pair: VllmPair, reference: Reference, draw: random.Random, role: str
) -> None:
    survivor = other(pair, role)
    serves(pair, reference)
    request, tokens = request_under_way(pair, reference, survivor, draw)
    waiting = pair.submit_to_decode(reference.case(100).prompt, 8)
    stopped = getattr(pair, role).stop()
    try:
        assert request.wait(SILENT_SECONDS), survivor.log_tail()
        assert request.error is not None or request.tokens == tokens
        if role == "prefill":
            waiting.failure(SILENT_SECONDS)
            assert "PEER_LOST" in survivor.reason()
            print(f"prefill stopped: decode's request ended after {(waiting.ended or 0) - stopped:.3f} s")
            assert not survivor.is_empty(1), "pages were given back that a stopped prefill may still write to"
    finally:
        getattr(pair, role).go_on()
    if role == "decode":
        pair.decode.abort(waiting)
    serves_again(pair, reference)
    assert survivor.is_empty(40)
