"""Two data-parallel replicas on both sides: each has a KV cache of its own, and any replica of decode takes a prompt
from the replica of prefill that computed it. Those of a dense model are engines of their own; those of one with experts
share these: each has half, and sends it the tokens of both (wide EP is the same with more of them).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.transfer import room_from_transfer_id
from tests.engines.engine import LOCAL, another
from tests.engines.model import ExpertReference, Reference
from tests.engines.stages import rank_addresses
from tests.engines.vllm_engine import BLOCK, VllmPair

pytestmark = pytest.mark.timeout(900)
REPLICAS = 2
LENGTHS = [3, BLOCK, BLOCK + 1, 100]
# Some proxies leave the hand-off's name to prefill, and give decode what it answers.
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module", params=[Reference, ExpertReference], ids=["dense", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    found: Reference = request.param(tmp_path_factory.mktemp("replicas"))
    return found


@pytest.fixture(scope="module")
def pair(folder: Path, model: Reference) -> Iterator[VllmPair]:
    wide = {"enable_expert_parallel": isinstance(model, ExpertReference)}
    pair = VllmPair(
        folder,
        model.path,
        # The second replica asks for a second memory node, which most machines that test this lack.
        environment={"VLLM_CPU_SIM_MULTI_NUMA": "0"},
        prefill={"data_parallel_size": REPLICAS, "enforce_eager": True, **wide},
        decode={"data_parallel_size": REPLICAS, "enforce_eager": True, **wide},
    )
    pair.wait_ready()
    yield pair
    pair.close()


def test_each_replica_holds_half_of_the_expert_weights(pair: VllmPair, model: Reference) -> None:
    for engine in (pair.prefill, pair.decode):
        assert ("Local/global number of experts: 2/4" in engine.log()) == isinstance(model, ExpertReference)


@pytest.mark.parametrize("taker", range(REPLICAS))
@pytest.mark.parametrize("replica", range(REPLICAS))
def test_any_decode_takes_the_prompt_from_the_prefill_that_the_router_named(
    pair: VllmPair, model: Reference, replica: int, taker: int
) -> None:
    for case in map(model.case, LENGTHS):
        room = pair.room()
        address: dict[str, Any] = {"remote_bootstrap_addr": f"http://{LOCAL}:{pair.bootstrap_port + replica}"}
        prefill = pair.prefill.generate_at(replica, case.prompt, 1, **pair.at_prefill(room))
        asked = {**pair.at_decode(room), **address}
        decode = pair.decode.generate_at(taker, another(case.prompt), len(case.tokens), **asked)
        assert decode.result() == case.tokens
        assert prefill.result() == case.tokens[:1]


def test_prefill_answers_which_replica_has_the_prompt(pair: VllmPair, model: Reference) -> None:
    """vLLM chooses it, of requests at once each in turn; and so it does at decode. No page stays behind."""
    cases = [model.case(60 + length) for length in range(6)]
    prefills = [pair.prefill.generate(case.prompt, 1, **ASKED) for case in cases]
    for prefill in prefills:
        prefill.result()
    decodes = [
        pair.decode.generate(another(case.prompt), len(case.tokens), **prefill.value)
        for case, prefill in zip(cases, prefills, strict=True)
    ]
    assert [decode.result() for decode in decodes] == [case.tokens for case in cases]
    answered = {prefill.value["remote_bootstrap_addr"] for prefill in prefills}
    assert answered == {f"http://{LOCAL}:{pair.bootstrap_port + replica}" for replica in range(REPLICAS)}
    numbers = {room_from_transfer_id(prefill.value["transfer_id"]) for prefill in prefills}
    for engine in (pair.prefill, pair.decode):
        had = [numbers & rooms_at(address) for address in rank_addresses(engine)]
        assert len(had) == REPLICAS and all(had) and sum(map(len, had)) == len(cases)
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def rooms_at(address: str) -> set[int]:
    with SyncClient(address) as client:
        return {room.room for room in client.list_rooms()}
