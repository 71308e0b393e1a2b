"""What consumers ask an index that follows a large fleet: the fleet makes a small question long work, and a large
answer."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.questions import MAX_ANSWERS, MAX_PLAN_PROMPTS, MAX_PROMPTS
from kvgrpc.events.model import BlockStored
from kvgrpc.model import EngineLoad
from kvgrpc.rpc.status import error_from
from kvgrpc.server import IndexServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from tests.support.hostile.loop_turns import turns_of_the_loop
from tests.support.rank_host import RankHost

ENGINES, BLOCKS = 300, [7, 8, 9]
# Pieces end after a few milliseconds. A CPU second of a machine that is busy does half: 70 ms were seen there.
LONGEST_TURN_SECONDS = 0.15
LOAD = EngineLoad(prefill_tokens_per_second=1000.0, page_tokens=16, page_bytes=1_000_000)
PROMPT = pb.ScorePrompt(block_hashes=pb.BlockHashes(values=BLOCKS))


@pytest.fixture(scope="module")
def index(prefill: RankHost) -> Iterator[IndexServiceStub]:
    """Of a real server, with followers that have read what so many engines say."""
    server = IndexServer(["127.0.0.1:0"], sources=[prefill.rank.address])
    table = server.index._table
    for number in range(ENGINES):
        held = BLOCKS[: number % len(BLOCKS) + 1]
        core = FollowerCore(table.index, lambda _, held=held: [BlockStored(held, None, [], 16, None, "CPU")])  # type: ignore[misc]
        table.add(f"E{number}", 0, core, "127.0.0.1:9", live=False)
        core.start()
        core.begun(1, "log", 1, 0, 0.0)
        core.snapshot(1, 0, 1, [b"all"], 0.0)
        core.snapshot_complete(1, None, 0.0)
        core.told_load(1, LOAD)
    server.open()
    with grpc.insecure_channel(server.address) as channel:
        yield IndexServiceStub(channel)
    server.close()


def test_plans_over_a_large_fleet_are_made_in_pieces(index: IndexServiceStub) -> None:
    """One took 1.1 s of the loop for each 64 engines that it followed."""
    asked = pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=PROMPT)] * 32, max_placements=ENGINES, reserve=True)
    with turns_of_the_loop() as turns:
        calls = [index.Plan.future(asked, timeout=60) for _ in range(4)]
        answers = [call.result() for call in calls]
    assert [len(plan.placements) for each in answers for plan in each.plans] == [ENGINES] * 4 * 32
    assert turns.longest < LONGEST_TURN_SECONDS


@pytest.mark.parametrize("what", ["scores", "placements"])
def test_an_answer_that_no_client_would_take_is_refused_with_how_to_ask(index: IndexServiceStub, what: str) -> None:
    with turns_of_the_loop() as turns, pytest.raises(grpc.RpcError) as refused:
        if what == "scores":
            index.Score(pb.ScoreRequest(prompts=[PROMPT] * MAX_PROMPTS), timeout=60)
        else:
            prompts = [pb.PlanPrompt(prompt=PROMPT)] * MAX_PLAN_PROMPTS
            index.Plan(pb.PlanRequest(prompts=prompts, max_placements=ENGINES), timeout=60)
    error = error_from(refused.value)
    assert isinstance(error, InvalidRequest) and error.metadata["field"] == f"max_{what}"
    assert str(MAX_ANSWERS) in error.message
    assert turns.longest < LONGEST_TURN_SECONDS


def test_a_plan_that_is_refused_leaves_nothing_reserved(index: IndexServiceStub) -> None:
    """What it had planned before it was refused counted for others for 1.5 s."""
    prompt = pb.PlanPrompt(prompt=PROMPT, tokens=100_000)

    def waited() -> float:
        asked = pb.PlanRequest(prompts=[prompt], max_placements=ENGINES)
        (plan,) = index.Plan(asked, timeout=60).plans
        return sum(each.queue_time.ToTimedelta().total_seconds() for each in plan.placements)

    before = waited()  # what other tests reserved, which becomes less
    with pytest.raises(grpc.RpcError) as refused:
        asked = pb.PlanRequest(prompts=[prompt] * MAX_PLAN_PROMPTS, max_placements=ENGINES, reserve=True)
        index.Plan(asked, timeout=60)
    assert isinstance(error_from(refused.value), InvalidRequest)
    assert waited() <= before


def test_as_many_as_are_asked_for_come_for_as_many_prompts_as_there_may_be(index: IndexServiceStub) -> None:
    answer = index.Score(pb.ScoreRequest(prompts=[PROMPT] * MAX_PROMPTS, max_scores=8), timeout=60)
    assert [len(each.scores) for each in answer.prompts] == [8] * MAX_PROMPTS
