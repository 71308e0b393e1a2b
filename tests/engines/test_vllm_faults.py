"""What the other side of a real vLLM engine sees of a kill, a stop and a restart: an end with our reason, in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Request
from tests.engines.model import Reference
from tests.engines.stages import LONG, is_over, room_of, stop_at_every_stage, wait_until
from tests.engines.vllm_engine import VllmPair

pytestmark = pytest.mark.timeout(900)
# As in test_sglang_faults.py.
GONE_SECONDS, SILENT_SECONDS = 2.5, 6.0


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, reference.path)
    pair.wait_ready()
    yield pair
    pair.close()


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


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_prefill_that_is_gone_ends_what_waits_for_its_pages_and_nothing_else(
    pair: VllmPair, reference: Reference, fault: str
) -> None:
    serves(pair, reference)
    now = stop_at_every_stage(pair, reference, "prefill")
    bound = GONE_SECONDS if fault == "kill" else SILENT_SECONDS
    moment = pair.prefill.kill() if fault == "kill" else now.stopped
    now.alone.failure(bound)
    assert f"room {pair.number_of(now.alone_room)}: PEER_LOST" in pair.decode.log()
    assert now.under_way.wait(bound), pair.decode.log_tail()
    assert now.under_way.error is not None or now.under_way.tokens == now.under_way_tokens
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
def test_a_decode_that_is_gone_leaves_prefill_serving_and_what_waits_for_a_decode_gets_one(
    pair: VllmPair, reference: Reference, fault: str
) -> None:
    """Prefill's requests are answered whatever decode does; its pages come back."""
    serves(pair, reference)
    now = stop_at_every_stage(pair, reference, "decode")
    if fault == "kill":
        pair.decode.kill()
    assert now.under_way.result() == now.under_way_tokens
    assert now.computing.result() == now.computing_case.tokens[:1]
    assert now.alone.result() == now.alone_case.tokens[:1]
    if fault == "stop":
        wait_until(lambda: is_over_or_gone(pair, now.under_way_room))
        pair.decode.go_on()
        serves_again(pair, reference)
    else:
        pair.restart("decode")
    assert not pair.prefill.is_empty(1), "the pages of a prompt that no decode has asked for were given back"
    taken = pair.submit_to_decode(now.alone_case.prompt, 8, now.alone_room)
    assert taken.result() == now.alone_case.tokens
    serves(pair, reference)
    assert pair.prefill.alive and pair.prefill.is_empty(40)


def is_over_or_gone(pair: VllmPair, room: int) -> bool:
    found = room_of(pair.prefill, pair.number_of(room))
    return found is None or is_over(found)


def ended_after(moment: float, *requests: Request) -> str:
    return ", ".join(f"{(request.ended or 0) - moment:.3f}" for request in requests)
