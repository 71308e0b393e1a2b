"""IndexService.Plan over real ranks: where to run a request, from whom to pull, and the figures that it rests on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.cache_serving import SHAPE, CacheRank, hashes_of, prompt
from tests.support.pull_fleet import PATIENT, PullFleet, candidates_of, pulled
from tests.support.waiting import wait_until

HASHES = hashes_of(prompt(12))
EVENTS = {"publisher": "null"}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PullFleet]:
    with closing(PullFleet(tmp_path)) as opened:
        yield opened


@pytest.fixture
def index(fleet: PullFleet) -> Iterator[SyncClient]:
    with fleet.index() as client:
        yield client


@pytest.fixture
def pair(fleet: PullFleet, index: SyncClient) -> tuple[CacheRank, CacheRank]:
    """A holder of the prompt that has a long queue, and a taker that has nothing to do."""
    limits = replace(PATIENT, batch_pages=12)  # as few as four at a time say nothing of a rate
    holder = fleet.open("holder", events=EVENTS, limits=limits)
    taker = fleet.open("taker", events=EVENTS, limits=limits)
    wait_until(lambda: bool(candidates_of(taker)))
    # So slow that a pull pays also at the speed that is measured on a busy machine.
    holder.rank.load.say(prefill_tokens_per_second=1.0, waiting_tokens=1_000)
    taker.rank.load.say(prefill_tokens_per_second=1.0)
    holder.fill(HASHES)

    def all_is_told() -> bool:
        found = plan(index).placements
        told = [each.load.prefill_tokens_per_second for each in found]
        return told == [1.0, 1.0] and sum(each.host_blocks for each in found) == 12

    wait_until(all_is_told, 20.0)
    return holder, taker


def asked(**more: Any) -> pb.PlanPrompt:
    values = [hash_key(sglang_event_hash(bytes.fromhex(each))) for each in HASHES]
    return pb.PlanPrompt(prompt=pb.ScorePrompt(block_hashes=pb.BlockHashes(values=values)), **more)


def plan(index: SyncClient, **more: Any) -> pb.PromptPlan:
    (found,) = index.plan(pb.PlanRequest(prompts=[asked(**more)], max_placements=10)).plans
    return found


def test_a_busy_holder_lends_to_an_idle_taker(pair: tuple[CacheRank, CacheRank], index: SyncClient) -> None:
    found = plan(index)
    taker, holder = found.placements
    assert (found.blocks, taker.engine, holder.engine) == (12, "taker", "holder")
    assert (holder.host_blocks, holder.device_blocks, taker.blocks, taker.page_tokens) == (12, 0, 0, 4)
    assert (taker.pull.engine, taker.pull.blocks, taker.pull.bytes) == ("holder", 12, 12 * SHAPE.page_bytes)
    assert not taker.pull.measured and not taker.speed_assumed
    assert taker.first_token_time.ToSeconds() < taker.first_token_time_without_pull.ToSeconds() + 1
    assert holder.queue_time.ToSeconds() == 1000 and not holder.HasField("pull")


def test_what_is_planned_is_done_and_measured(pair: tuple[CacheRank, CacheRank], index: SyncClient) -> None:
    _, taker = pair
    assert pulled(taker, HASHES).completed == 12
    wait_until(lambda: plan(index).placements[0].load.pull_rates[0:1] != [], 10.0)
    (rate,) = plan(index).placements[0].load.pull_rates
    assert rate.engine == "holder" and rate.bytes_per_second > 0
    wait_until(lambda: plan(index).placements[0].host_blocks == 12, 10.0)
    assert not plan(index).placements[0].HasField("pull")
    taker.evict()
    wait_until(lambda: plan(index).placements[0].HasField("pull"), 10.0)
    assert plan(index).placements[0].pull.measured


def test_engines_and_sources_that_are_named(pair: tuple[CacheRank, CacheRank], index: SyncClient) -> None:
    assert [each.engine for each in plan(index, engines=["holder"]).placements] == ["holder"]
    (only,) = plan(index, engines=["taker"], sources=["taker"]).placements
    assert not only.HasField("pull")


def test_a_longer_request_than_its_blocks_computes_more(pair: tuple[CacheRank, CacheRank], index: SyncClient) -> None:
    assert plan(index, tokens=1_000).placements[0].compute_tokens == 1_000 - 12 * 4


def test_people_see_a_plan(
    pair: tuple[CacheRank, CacheRank], index: SyncClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    named = [part for value in asked().prompt.block_hashes.values for part in ("--hash", str(value))]
    shown = []
    for arguments in ((), ("--json",)):
        with pytest.raises(SystemExit) as ended:
            main(["events", "plan", "-s", index.address, *named, *arguments])
        assert ended.value.code in (0, None)
        shown.append(capsys.readouterr().out)
    (tmp_path / "prompt.json").write_text(json.dumps(prompt(12)))
    by_vllm = ["--tokens", str(tmp_path / "prompt.json"), "--vllm", "--json"]
    for command in (by_vllm, [*by_vllm, "--both-kinds"]):
        with pytest.raises(SystemExit) as ended:
            main(["events", "plan", "-s", index.address, *command])
        assert ended.value.code in (0, None)
        shown.append(capsys.readouterr().out)
    nothing = json.loads(shown[2])["plans"][0]["placements"]
    assert {(each["hostBlocks"], "pull" in each) for each in nothing} == {(0, False)}, (
        "by vLLM's hashes nobody has anything"
    )
    assert json.loads(shown[3]) == json.loads(shown[1])
    assert "taker" in shown[0] and "holder" in shown[0] and "assumed" in shown[0]
    placements = json.loads(shown[1])["plans"][0]["placements"]
    assert placements[0]["pull"]["engine"] == "holder"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--hash", "1"], "--tokens"),
        (["--vllm-lora", "adapter", "/path"], "--lora-id"),
        (["--lora-id", "adapter"], "--vllm-lora"),
        (["--extra-key", "tenant"], "--extra-key"),
    ],
)
def test_what_only_one_kind_is_told_is_no_plan_of_both(
    index: SyncClient, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], why: str
) -> None:
    """The other kind's pages were those of the base model."""
    (tmp_path / "prompt.json").write_text(json.dumps(prompt(12)))
    tokens = [] if "--hash" in arguments else ["--tokens", str(tmp_path / "prompt.json")]
    with pytest.raises(SystemExit) as ended:
        main(["events", "plan", "-s", index.address, "--both-kinds", *tokens, *arguments])
    assert ended.value.code == 2 and why in capsys.readouterr().err


def by_sglang(**more: Any) -> pb.ScorePrompt:
    return pb.ScorePrompt(sglang=pb.SglangPrompt(**{"token_ids": [1, 2, 3], **more}))


def by_vllm(**more: Any) -> pb.ScorePrompt:
    return pb.ScorePrompt(vllm=pb.VllmPrompt(**{"token_ids": [1, 2, 3], **more}))


LORA = pb.LoraAdapter(name="n", path="p")


@pytest.mark.parametrize(
    ("first", "other", "field"),
    [
        (by_sglang(), by_vllm(token_ids=[1, 2]), "vllm.token_ids"),
        (by_vllm(), by_sglang(token_ids=[1, 2, 4]), "sglang.token_ids"),
        (by_sglang(cache_salt="s"), by_vllm(), "vllm.cache_salt"),
        (by_vllm(), by_sglang(cache_salt="s"), "sglang.cache_salt"),
        (by_sglang(lora_id="n"), by_vllm(), "vllm.lora"),
        (by_vllm(), by_sglang(lora_id="n"), "sglang.lora_id"),
        (by_vllm(lora=LORA), by_vllm(lora=pb.LoraAdapter(name="n", path="q")), "vllm.lora"),
        (by_sglang(lora_id="n"), by_sglang(lora_id="m"), "sglang.lora_id"),
        (by_sglang(extra_key="k"), by_sglang(extra_key="l"), "sglang.extra_key"),
        (by_vllm(), by_sglang(extra_key="k"), "sglang.extra_key"),
        (by_sglang(extra_key="k"), by_vllm(), "vllm"),
    ],
)
def test_other_kinds_are_of_the_same_request(
    index: SyncClient, first: pb.ScorePrompt, other: pb.ScorePrompt, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        index.plan(pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=first, other_kinds=[first, other])]))
    assert refused.value.metadata["field"] == f"prompts[0].other_kinds[1].{field}"


def test_one_request_in_the_words_of_each_kind_is_taken(index: SyncClient) -> None:
    image = pb.MultimodalItem(identifier="i", first_token=0, tokens=1)
    hashes = asked().prompt
    for first, other in (
        (by_sglang(lora_id="n", cache_salt="s"), by_vllm(lora=LORA, cache_salt="s")),
        (by_sglang(page_tokens=4), by_sglang(bigram=True)),
        (by_vllm(multimodal=[image]), by_sglang(token_ids=[77, 2, 3])),
        (hashes, by_vllm(cache_salt="s")),
    ):
        index.plan(pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=first, other_kinds=[other])]))
    index.plan(pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=hashes, other_kinds=[hashes], tokens=3)]))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PlanRequest(), "prompts"),
        (pb.PlanRequest(prompts=[asked()] * 257), "prompts"),
        (pb.PlanRequest(prompts=[pb.PlanPrompt()]), "prompts[0].prompt.prefix"),
        (pb.PlanRequest(prompts=[asked(engines=["e"] * 1025)]), "prompts[0].engines"),
        (pb.PlanRequest(prompts=[asked(sources=["e"] * 1025)]), "prompts[0].sources"),
        (pb.PlanRequest(prompts=[asked(other_kinds=[asked().prompt] * 4)]), "prompts[0].other_kinds"),
        (pb.PlanRequest(prompts=[asked(other_kinds=[asked().prompt])]), "prompts[0].tokens"),
        (pb.PlanRequest(prompts=[asked(other_kinds=[pb.ScorePrompt()])]), "prompts[0].other_kinds[0].prefix"),
        (pb.PlanRequest(prompts=[asked(other_kinds=[pb.ScorePrompt(model="m")])]), "prompts[0].other_kinds[0].model"),
        (
            pb.PlanRequest(prompts=[asked(other_kinds=[pb.ScorePrompt(labels={"zone": "a"})])]),
            "prompts[0].other_kinds[0].labels",
        ),
    ],
)
def test_bad_input_is_refused_with_its_field(index: SyncClient, request_: pb.PlanRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        index.plan(request_)
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_an_engine_cannot_say_what_is_no_speed(fleet: PullFleet, value: float) -> None:
    with pytest.raises(InvalidRequest):
        fleet.open("holder").rank.load.say(prefill_tokens_per_second=value)
