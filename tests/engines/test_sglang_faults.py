"""What the other side of a real engine sees of a kill, a stop and a restart: an end with our reason, in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair, Request
from tests.engines.model import Reference
from tests.engines.stages import LONG, stop_at_every_stage

pytestmark = pytest.mark.timeout(600)
# docs/session.md rule 3: a peer that is gone is noticed in 1 s, a silent one after the idle timeout, 3 s; prefill waits
# 1 s for decode to come back first. The rest is a scheduler step, and two cores.
GONE_SECONDS, SILENT_SECONDS = 2.5, 6.0


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path)
    yield pair.wait_ready()
    pair.close()


def serves(pair: Pair, reference: Reference) -> None:
    case = reference.case(100)
    prefill, decode = pair.submit(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_prefill_that_is_gone_ends_what_waits_for_its_pages_and_nothing_else(
    pair: Pair, reference: Reference, fault: str
) -> None:
    serves(pair, reference)
    now = stop_at_every_stage(pair, reference, "prefill")
    bound = GONE_SECONDS if fault == "kill" else SILENT_SECONDS
    moment = pair.prefill.kill() if fault == "kill" else now.stopped
    for request in (now.alone, now.under_way):
        assert "PEER_LOST" in request.failure(bound)
    print(f"prefill, {fault}: decode's requests ended after {ended_after(moment, now.alone, now.under_way)} s")
    computed = now.computing.result()
    assert (computed[:8], len(computed)) == (now.computing_case.tokens, LONG)
    if fault == "stop":
        assert not pair.decode.is_empty(1), "pages were given back that a stopped prefill may still write to"
        pair.prefill.go_on()
        serves_again(pair, reference)
    else:
        pair.restart("prefill")
        serves(pair, reference)
    assert pair.decode.alive and pair.decode.is_empty(40)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_decode_that_is_gone_ends_what_prefill_sends_it_and_what_waits_for_a_decode_gets_one(
    pair: Pair, reference: Reference, fault: str
) -> None:
    serves(pair, reference)
    now = stop_at_every_stage(pair, reference, "decode")
    bound = GONE_SECONDS if fault == "kill" else SILENT_SECONDS
    moment = pair.decode.kill() if fault == "kill" else now.stopped
    assert now.under_way.wait(bound), pair.prefill.log_tail()
    ended_well_or_with_our_reason(now.under_way, now.under_way_tokens)
    print(f"decode, {fault}: prefill's request ended after {ended_after(moment, now.under_way)} s")
    assert now.computing.result() == now.computing_case.tokens[:1]
    assert not now.alone.wait(0), "nobody had heard of it but prefill"
    if fault == "stop":
        pair.decode.go_on()
        serves_again(pair, reference)
    else:
        pair.restart("decode")
    taken = pair.submit_to_decode(now.alone_case.prompt, 8, now.alone_room)
    assert taken.result() == now.alone_case.tokens
    assert now.alone.result() == now.alone_case.tokens[:1]
    serves(pair, reference)
    assert pair.prefill.alive and pair.prefill.is_empty(40)


def ended_after(moment: float, *requests: Request) -> str:
    return ", ".join(f"{(request.ended or 0) - moment:.3f}" for request in requests)


def ended_well_or_with_our_reason(request: Request, tokens: list[int]) -> None:
    """A small chunk may be in the sockets of a decode that reads it no more; else the session, or a write, notices."""
    if request.error is None:
        assert request.tokens == tokens
    else:
        assert "PEER_LOST" in request.error or "TRANSFER_FAILED" in request.error, request.error


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
