"""What the other side of a real vLLM engine sees of a kill, a stop and a restart: an end with our reason, in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import LOCAL
from tests.engines.faults import kill_at_every_stage, stop_at_every_stage_and_go_on
from tests.engines.model import Reference
from tests.engines.vllm_engine import VllmPair
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(900)
# docs/session/loss.md, "A registry that refuses": 5 s. The rest is an attempt, a scheduler step, and two cores.
NOT_THERE_SECONDS = 7.5


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, reference.path)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_is_killed_ends_the_requests_of_the_other_at_every_stage_which_serves_on(
    pair: VllmPair, reference: Reference, role: str
) -> None:
    kill_at_every_stage(pair, reference, role)


def test_a_request_for_a_prefill_that_is_not_there_ends_in_seconds(pair: VllmPair, reference: Reference) -> None:
    """Its proxy does not know yet: llm-d's sidecar asks both sides at once."""
    where = {**pair.at_decode(pair.room()), "remote_bootstrap_addr": f"http://{LOCAL}:{free_port()}"}
    asked = time.monotonic()
    request = pair.decode.generate(reference.case(100).prompt, 8, **where)
    request.failure(NOT_THERE_SECONDS)
    print(f"it ended after {(request.ended or 0) - asked:.3f} s: {pair.decode.reason()}")
    assert "PEER_UNREACHABLE" in pair.decode.reason()
    assert pair.decode.is_empty()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_is_stopped_ends_what_waits_for_it_and_nothing_else_and_is_used_again_once_it_goes_on(
    pair: VllmPair, reference: Reference, role: str
) -> None:
    stop_at_every_stage_and_go_on(pair, reference, role)
