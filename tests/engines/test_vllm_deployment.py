"""Other ways to start vLLM over kvgrpc: inside MultiConnector, recomputing what was lost, with several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.engines.vllm.scheduler import UNUSED
from tests.engines.engine import Request
from tests.engines.model import Reference
from tests.engines.stages import wait_for
from tests.engines.vllm_engine import BLOCK, CONNECTOR, ROLES, VllmPair
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
# Blocks of a request whose prefill is dead are quiet 2 s after that is known (docs/session.md, rule 8); its prompt is
# computed on them. The rest is detection (1 s), scheduler steps and 300 tokens, on two cores.
QUIET_SECONDS, RECOMPUTED_SECONDS = 2.0, 5.0


def check(pair: VllmPair, reference: Reference, length: int = 100) -> None:
    """Decode does not know the prompt: where it computes it, after a failure or not, it has other tokens."""
    case = reference.case(length)
    prefill, decode = pair.submit_unseen(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


@pytest.fixture(scope="module")
def several_connectors(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    """Beside ours one of vLLM's own that stores in files; decode recomputes what it does not get."""

    def both(role: str) -> dict[str, object]:
        store = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / f"store-{role}")},
        }
        return {
            "disable_log_stats": False,
            "transfer": {
                "kv_connector": "MultiConnector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [{**CONNECTOR, "kv_role": ROLES[role]}, store]},
            },
        }

    pair = VllmPair(folder, reference.path, transfer={}, prefill=both("prefill"), decode=both("decode"))
    pair.wait_ready()
    yield pair
    pair.close()


def test_it_works_inside_multiconnector(several_connectors: VllmPair, reference: Reference) -> None:
    for length in (3, BLOCK, 100, 300):
        check(several_connectors, reference, length)
    assert several_connectors.prefill.is_empty() and several_connectors.decode.is_empty()


def test_with_policy_recompute_a_hand_off_that_failed_costs_time_and_no_token(
    several_connectors: VllmPair, reference: Reference
) -> None:
    """And is told, as each prefill that is not used."""
    decode, case = several_connectors.decode, reference.case(300)
    unused = "vllm:kvgrpc_prefills_unused"
    before = decode.counted(unused)
    params = {**several_connectors.at_decode(several_connectors.room()), "remote_bootstrap_addr": "http://192.0.2.7:1"}
    request = decode.generate(case.prompt, 8, **params)
    assert request.result() == case.tokens
    assert "ADDRESS_NOT_ALLOWED" in decode.reason()
    assert list(request.value) == [UNUSED] and "its hand-off failed" in request.value[UNUSED]
    wait_until(lambda: decode.counted(unused, reason="hand_off_failed") == before + 1)
    assert decode.is_empty()


def test_with_policy_recompute_a_stopped_prefill_is_waited_for_until_it_goes_on_and_costs_no_token(
    several_connectors: VllmPair, reference: Reference
) -> None:
    """It may still write to the blocks that the prompt would be computed on."""
    pair, case = several_connectors, reference.case(300)
    waiting = waits_for_prefill(pair, case.prompt)
    pair.prefill.stop()
    try:
        wait_until(lambda: "PEER_LOST" in pair.decode.reason())
        assert not waiting.wait(2 * QUIET_SECONDS), f"{waiting.error}: {waiting.tokens}"
        other = reference.case(100)
        assert pair.decode.generate(other.prompt, 8).result() == other.tokens
        assert waiting.ended is None
    finally:
        pair.prefill.go_on()
    assert waiting.result() == case.tokens
    assert pair.decode.is_empty(40)


def test_with_policy_recompute_a_killed_prefill_costs_seconds_and_no_token(
    several_connectors: VllmPair, reference: Reference
) -> None:
    pair, case = several_connectors, reference.case(300)
    check(pair, reference)
    waiting = waits_for_prefill(pair, case.prompt)
    killed = pair.prefill.kill()
    assert waiting.result() == case.tokens
    seconds = (waiting.first or 0) - killed
    print(f"prefill killed: the first token that decode recomputed came after {seconds:.3f} s")
    assert "PEER_LOST" in pair.decode.reason()
    assert QUIET_SECONDS <= seconds <= RECOMPUTED_SECONDS, pair.decode.reason() + pair.decode.log_tail()
    assert pair.decode.is_empty()


def waits_for_prefill(pair: VllmPair, prompt: list[int]) -> Request:
    """A request of decode alone, whose blocks prefill knows."""
    room = pair.room()
    waiting = pair.submit_to_decode(prompt, 8, room)
    wait_for(pair.prefill, pair.number_of(room), lambda found: found.pages > 0)
    return waiting


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_connector_extra_config": {"no_such_key": 1}}, "no_such_key"),
        (
            {"kv_buffer_device": "cuda"},
            "FEATURE_DISABLED: kvgrpc does not serve kv_buffer_device cuda: blocks go from device to device, without a "
            "buffer in between; leave it out of the --kv-transfer-config",
        ),
    ],
    ids=["that does not exist", "that is not served"],
)
def test_an_engine_with_a_setting_that_does_not_exist_or_is_not_served_does_not_start(
    folder: Path, reference: Reference, wrong: dict[str, object], says: str
) -> None:
    pair = VllmPair(
        folder, reference.path, prefill={"transfer": wrong, "enforce_eager": True}, decode={"block_size": 0}
    )
    try:
        with pytest.raises(AssertionError, match="did not start"):
            pair.prefill.wait_ready()
        assert pair.prefill.wait_gone(0) and says in pair.prefill.log()
    finally:
        pair.close()


def test_tensor_parallel_ranks_hand_over_to_their_counterparts(folder: Path, reference: Reference) -> None:
    pair = VllmPair(folder, reference.path, tp=2)
    try:
        pair.wait_ready()
        for length in (3, BLOCK + 1, 300):
            check(pair, reference, length)
        assert pair.prefill.is_empty() and pair.decode.is_empty()
    finally:
        pair.close()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_with_other_sizes_each_decode_rank_gets_its_heads(
    folder: Path, reference: Reference, prefill: int, decode: int
) -> None:
    sizes = {"prefill": {"tensor_parallel_size": prefill}, "decode": {"tensor_parallel_size": decode}}
    pair = VllmPair(folder, reference.path, prefill=sizes["prefill"], decode=sizes["decode"])
    try:
        pair.wait_ready()
        for length in (3, BLOCK + 1, 300):
            check(pair, reference, length)
        assert pair.prefill.is_empty() and pair.decode.is_empty()
    finally:
        pair.close()
