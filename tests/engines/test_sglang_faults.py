"""What the other side of a real engine sees of a kill, a stop and a restart: an end with our reason, in time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Engine, Pair, Request
from tests.engines.model import Reference
from tests.engines.stages import LONG, ended_after, stop_prefill_at_every_stage

pytestmark = pytest.mark.timeout(600)
# docs/session.md rule 3, break and loss: a peer that is gone is noticed in 1 s, a silent one after the idle timeout,
# 3 s; prefill waits 1 s for decode to come back first. The rest is a scheduler step, and two cores.
GONE_SECONDS, SILENT_SECONDS = 2.5, 6.0


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path)
    yield pair.wait_ready()
    pair.close()


@pytest.fixture(scope="module")
def draw() -> random.Random:
    seed = int(os.environ.get("KVGRPC_TEST_SEED", "0") or 0) or random.SystemRandom().randrange(2**32)
    print(f"the moments of the faults: KVGRPC_TEST_SEED={seed}")
    return random.Random(seed)


def other(pair: Pair, role: str) -> Engine:
    return pair.decode if role == "prefill" else pair.prefill


def request_under_way(pair: Pair, reference: Reference, at: Engine, draw: random.Random) -> tuple[Request, list[int]]:
    """A request of many chunks at a random moment of its life, as one side sees it, and the tokens it should have."""
    case = reference.case(400)
    prefill, decode = pair.submit(case.prompt, 8)
    time.sleep(draw.uniform(0, 0.08))  # anywhere within the request
    return (decode, case.tokens) if at is pair.decode else (prefill, case.tokens[:1])


def ended_well_or_with_our_reason(request: Request, tokens: list[int]) -> None:
    """Either the session or, at prefill, a write was the first to notice."""
    if request.error is None:
        assert request.tokens == tokens
    else:
        assert "PEER_LOST" in request.error or "TRANSFER_FAILED" in request.error, request.error


def serves(pair: Pair, reference: Reference) -> None:
    case = reference.case(100)
    prefill, decode = pair.submit(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_is_killed_ends_the_request_of_the_other_which_serves_on(
    pair: Pair, reference: Reference, draw: random.Random, role: str
) -> None:
    survivor = other(pair, role)
    serves(pair, reference)
    request, tokens = request_under_way(pair, reference, survivor, draw)
    killed = getattr(pair, role).kill()
    assert request.wait(GONE_SECONDS), survivor.log_tail()
    ended_well_or_with_our_reason(request, tokens)
    print(f"{role} killed: the other side ended after {(request.ended or 0) - killed:.3f} s: {request.error}")
    pair.restart(role)
    serves(pair, reference)
    assert survivor.alive and survivor.is_empty()


def test_a_prefill_that_is_stopped_ends_what_waits_for_its_pages_and_nothing_else_and_the_pages_are_held(
    pair: Pair, reference: Reference
) -> None:
    serves(pair, reference)
    now = stop_prefill_at_every_stage(pair, reference)
    for request in (now.alone, now.under_way):
        assert "PEER_LOST" in request.failure(SILENT_SECONDS)
    print(f"prefill stopped: decode's requests ended after {ended_after(now.stopped, now.alone, now.under_way)} s")
    computed = now.computing.result()
    assert (computed[:8], len(computed)) == (now.computing_case.tokens, LONG)
    assert not pair.decode.is_empty(1), "pages were given back that a stopped prefill may still write to"
    pair.prefill.go_on()
    serves_again(pair, reference)
    assert pair.decode.alive and pair.decode.is_empty(40)


@pytest.mark.parametrize("role", ["decode"])
def test_a_side_that_is_stopped_ends_the_request_of_the_other_and_is_used_again_once_it_goes_on(
    pair: Pair, reference: Reference, draw: random.Random, role: str
) -> None:
    survivor = other(pair, role)
    request, tokens = request_under_way(pair, reference, survivor, draw)
    stopped = getattr(pair, role).stop()
    try:
        assert request.wait(SILENT_SECONDS), survivor.log_tail()
    finally:
        getattr(pair, role).go_on()
    ended_well_or_with_our_reason(request, tokens)
    print(f"{role} stopped: the other side ended after {(request.ended or 0) - stopped:.3f} s: {request.error}")
    serves_again(pair, reference)
    assert survivor.is_empty(40)


def serves_again(pair: Pair, reference: Reference, seconds: float = 15.0) -> None:
    """A side that went on first has to hear what it missed."""
    end = time.monotonic() + seconds
    while True:
        case = reference.case(100)
        prefill, decode = pair.submit(case.prompt, 8)
        assert prefill.wait() and decode.wait()
        if decode.error is None:
            assert decode.tokens == case.tokens
            return
        assert time.monotonic() < end, decode.error
