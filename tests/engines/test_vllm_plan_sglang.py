"""A fleet of SGLang and vLLM, as docs/pull.md has it: an index plans for real engines of both, and it is done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import each_block_hash, page_hashes, sglang_event_hash
from kvgrpc.server import IndexServer, RegistryServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1 import prefetch_service_pb2
from tests.engines.engine import LOCAL, SGLANG_PYTHON, Engine
from tests.engines.kinds import PAGE, PAGES, PROMPT, ask, cache_of, open_sglang, taken_by, wait_ready
from tests.engines.model import Case, Reference
from tests.engines.vllm_pulling import has, opened
from tests.support.native_index import NativeIndex
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not SGLANG_PYTHON.exists(), reason="SGLang's environment is not here: `.ci/setup sglang` makes it"
    ),
]
TOKENS_PER_SECOND = 20.0  # as if measured: so slow that a pull is planned, however busy the machine is


@dataclass(frozen=True)
class Fleet:
    """The engines by their names; ``index``: what plans for them."""

    engines: dict[str, Engine]
    registry: str
    index: SyncClient
    sources: tuple[str, ...]  # where events are served
    block: int  # tokens of vLLM's

    def plan(self, case: Case, *engines: str, reserve: bool = False) -> list[pb.Placement]:
        """For the prompt in the words of both."""
        sglang, vllm = pb.SglangPrompt(token_ids=case.prompt), pb.VllmPrompt(token_ids=case.prompt)
        request = asked(case, pb.ScorePrompt(sglang=sglang), pb.ScorePrompt(vllm=vllm), engines)
        request.reserve = reserve
        (plan,) = self.index.plan(request).plans
        return list(plan.placements)

    def pull_of(self, case: Case, engine: str) -> tuple[str, int]:
        """From whom a request at that engine is to pull how many tokens."""
        (place,) = self.plan(case, engine)
        return place.pull.engine, place.pull.blocks * place.page_tokens

    def wait_written_through(self, case: Case) -> None:
        """SGLang says that pages are on its host a moment before it writes them to where they are lent from."""
        with cache_of(self.registry, "vllm") as client:
            wait_until(partial(has, client, case, PAGES), 30)


def asked(case: Case, sglang: pb.ScorePrompt, vllm: pb.ScorePrompt, engines: Sequence[str]) -> pb.PlanRequest:
    request = pb.PlanRequest(max_placements=2)
    request.prompts.add(prompt=sglang, other_kinds=[vllm], tokens=len(case.prompt), engines=engines)
    return request


def hashed(hashes: Iterable[int | bytes]) -> pb.ScorePrompt:
    return pb.ScorePrompt(block_hashes=pb.BlockHashes(values=map(hash_key, hashes)))


@pytest.fixture(scope="module", params=[1, 2], ids=["a chunk of a block", "a chunk of two"])
def fleet(folder: Path, reference: Reference, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    block = PAGE // request.param
    registry = RegistryServer([f"{LOCAL}:0"]).open()
    served = {name: f"{LOCAL}:{free_port()}" for name in ("sglang", "vllm")}
    spoken = {
        name: {
            "KVGRPC_ENGINE": name,
            "KVGRPC_EVENTS_LISTEN": address,
            "KVGRPC_PREFILL_TOKENS_PER_SECOND": str(TOKENS_PER_SECOND),
        }
        for name, address in served.items()
    }
    events = [{"endpoint": f"tcp://*:{free_port()}", "topic": "kv"} for _ in served]
    ours = {"kv_events_config": json.dumps({"publisher": "kvgrpc", **events[0]})}
    theirs = {"kv_events_config": {"enable_kv_cache_events": True, **events[1]}}
    sglang = open_sglang(folder, reference, registry.address, environment=spoken["sglang"], sizes=ours)
    vllm = opened(
        "vllm",
        folder,
        reference.path,
        registry.address,
        block=block,
        environment=spoken["vllm"],
        arguments=theirs,
        # Else its events name the last block of a chunk alone.
        **({"blocks_per_chunk": 2, "self_describing_kv_events": True} if request.param == 2 else {}),
    )
    index = None
    try:
        wait_ready(sglang, vllm, registry.address)
        index = IndexServer([f"{LOCAL}:0"], registry=registry.address, sources=list(served.values())).open()
        with SyncClient(index.address) as client:
            yield Fleet({"sglang": sglang, "vllm": vllm}, registry.address, client, tuple(served.values()), block)
    finally:
        for each in (index, sglang, vllm, registry):
            if each is not None:
                each.close()


@pytest.mark.parametrize(("holder", "taker"), [("sglang", "vllm"), ("vllm", "sglang")])
def test_a_plan_of_both_kinds_is_done(fleet: Fleet, reference: Reference, holder: str, taker: str) -> None:
    case = reference.case(PROMPT)
    assert ask(fleet.engines[holder], case) == 0
    with cache_of(fleet.registry, taker) as client:
        wait_until(lambda: fleet.pull_of(case, taker) == (holder, PAGES * PAGE), 60)
        fleet.wait_written_through(case)
        (best,) = fleet.plan(case, taker, reserve=True)
        assert (best.engine, best.blocks, best.compute_tokens) == (taker, 0, PROMPT - PAGES * PAGE)
        assert best.pull.bytes == PAGES * best.load.page_bytes
        assert not best.speed_assumed and best.first_token_time.ToSeconds() < PROMPT / TOKENS_PER_SECOND

        before = len(taken_by(client))
        pages = prefetch_service_pb2.PromptPages(tokens=case.prompt)
        operation = client.start_prefetch(pages, timeout=30.0, engines=[best.pull.engine])
        for message in client.watch_operations([operation.operation_id]):
            operation = message.operations[-1] if message.operations else operation
        assert (operation.state, operation.completed_pages) == (prefetch_service_pb2.OPERATION_STATE_DONE, PAGES)
        assert taken_by(client)[: len(taken_by(client)) - before] == [(holder, PAGES)]
    assert ask(fleet.engines[taker], case) == PAGES * PAGE
    wait_until(lambda: fleet.pull_of(case, taker) == ("", 0), 60)
    (either, _) = fleet.plan(case)
    assert either.blocks * either.page_tokens == PAGES * PAGE, "whoever runs it now has it"
    assert not either.HasField("pull")


def test_a_request_names_the_engine_that_its_plan_found(fleet: Fleet, reference: Reference) -> None:
    case = reference.case(PROMPT)
    ask(fleet.engines["sglang"], case)
    wait_until(lambda: fleet.pull_of(case, "vllm") == ("sglang", PAGES * PAGE), 60)
    fleet.wait_written_through(case)
    (best,) = fleet.plan(case, "vllm")
    assert ask(fleet.engines["vllm"], case, pull_from=[best.pull.engine]) == PAGES * PAGE


def test_a_longer_prompt_pulls_what_the_other_engine_has_of_it(fleet: Fleet, reference: Reference) -> None:
    shorter = reference.case(4 * PAGE)
    longer = reference.case(7 * PAGE + 5, prefix=shorter.prompt)
    ask(fleet.engines["vllm"], shorter)
    wait_until(lambda: fleet.pull_of(longer, "sglang") == ("vllm", 4 * PAGE), 60)
    (best,) = fleet.plan(longer, "sglang")
    assert best.compute_tokens == 3 * PAGE + 5


def test_the_native_index_plans_the_same_by_hashes(fleet: Fleet, reference: Reference) -> None:
    case = reference.case(PROMPT)
    ask(fleet.engines["sglang"], case)
    of_sglang = hashed(map(sglang_event_hash, page_hashes(case.prompt, PAGE)))
    of_vllm = hashed(each_block_hash(case.prompt, fleet.block))
    request = asked(case, of_sglang, of_vllm, ["vllm"])
    native = NativeIndex(fleet.sources, "--registry", fleet.registry).open()
    try:
        with SyncClient(native.address) as client:

            def places() -> list[pb.Placement]:
                return list(client.plan(request).plans[0].placements)

            wait_until(lambda: [each.pull.engine for each in places()] == ["sglang"], 60)
            (place,) = places()
    finally:
        native.close()
    assert place.pull.blocks * place.page_tokens == PAGES * PAGE
    assert place.pull == fleet.plan(case, "vllm")[0].pull
