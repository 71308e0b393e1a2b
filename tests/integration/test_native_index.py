"""``kvgrpc-index``: the contract of an index, served natively; what it lacks it says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvgrpc.client import PrefixIndex, SyncClient
from kvgrpc.errors import CredentialsInvalid, FeatureDisabled, InvalidRequest, PermissionDenied, WrongAudience
from kvgrpc.events import BlockStored
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.model import ModelIdentity
from kvgrpc.pull.model import PullConfig
from kvgrpc.registry.model import Endpoints, Labels, RankRow
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.server import IndexServer, RegistryServer
from kvgrpc.server.port.description import limits_to_pb
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.server_service_pb2 import CALLER_ROLE_UNSPECIFIED
from tests.support.cache_serving import hashes_of, open_cache_rank, prompt
from tests.support.native_index import NativeIndex
from tests.support.publishing import Publishing
from tests.support.registry_builders import row
from tests.support.registry_serving import Served
from tests.support.rust import built_index
from tests.support.waiting import until, wait_until

SECRET = "9f86d081884c7d659a2feaa0c55ad015"
CURRENT = pb.INDEX_SOURCE_STATE_CURRENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def asked(*hashes: int, **more: object) -> pb.ScoreRequest:
    request = pb.ScoreRequest(**more)  # type: ignore[arg-type]
    request.prompts.add().block_hashes.values.extend(hashes)
    return request


@pytest.fixture
async def engine() -> AsyncIterator[Publishing]:
    async with Publishing("P", snapshots=True) as publishing:
        await publishing.store([1, 2, 3])
        await publishing.store([4], "CPU")
        yield publishing


@pytest.fixture
async def client(engine: Publishing) -> AsyncIterator[SyncClient]:
    index = await asyncio.to_thread(NativeIndex([engine.address, "127.0.0.1:1"]).open)
    client = await asyncio.to_thread(SyncClient, index.address)
    await until(lambda: asyncio.to_thread(is_current, client))
    yield client
    await asyncio.to_thread(client.close)
    assert await asyncio.to_thread(index.close) == 0


def is_current(client: SyncClient) -> bool:
    return [source.freshness.state for source in client.list_sources()] == [CURRENT]


async def test_score_says_who_holds_each_of_many_prompts(client: SyncClient) -> None:
    request = asked(1, 2, 3, 4, 5, with_freshness=True)
    request.prompts.add().block_hashes.values.extend([2, 9])
    request.prompts.add().block_hashes.values.extend([9])
    first, second, none = (await asyncio.to_thread(client.score, request)).prompts
    (score,) = first.scores
    assert (first.blocks, score.engine, score.device_blocks, score.host_blocks, score.blocks) == (5, "P", 3, 4, 4)
    assert (score.page_tokens, score.freshness.state, score.freshness.whole) == (16, CURRENT, True)
    assert [(each.blocks, each.HasField("freshness")) for each in second.scores] == [(1, True)]
    assert not none.scores
    (score,) = (await asyncio.to_thread(client.score, asked(1))).prompts[0].scores
    assert not score.HasField("freshness")


async def test_sources_say_what_is_followed_and_what_is_not(client: SyncClient, engine: Publishing) -> None:
    listed = await asyncio.to_thread(client.list_sources)
    (source,) = listed
    assert (source.engine, source.dp, source.address) == ("P", 0, engine.address)
    assert [(held.medium, held.blocks) for held in source.blocks] == [("CPU", 1), ("GPU", 3)]
    assert any(line.startswith("127.0.0.1:1: ") for line in listed.not_followed)
    await engine.restart()
    await engine.store([7])
    await until(lambda: asyncio.to_thread(is_current, client))
    (source,) = await asyncio.to_thread(client.list_sources)
    assert (source.new_logs, [held.blocks for held in source.blocks]) == (1, [1])


async def test_what_it_lacks_or_cannot_mean_has_its_reason(client: SyncClient) -> None:
    def score(request: pb.ScoreRequest) -> None:
        client.score(request)

    tokens = pb.ScoreRequest(prompts=[pb.ScorePrompt(sglang=pb.SglangPrompt(token_ids=[1], page_tokens=1))])
    with pytest.raises(FeatureDisabled) as disabled:
        await asyncio.to_thread(score, tokens)
    assert "block_hashes" in disabled.value.metadata["howToEnable"]
    long = asked(*range(65_537))
    for request, field in (
        (pb.ScoreRequest(), "prompts"),
        (pb.ScoreRequest(prompts=[pb.ScorePrompt()]), "prompts[0].prefix"),
        (asked(1, engines=["e"] * 1025), "engines"),
        (long, "prompts[0].block_hashes.values"),
    ):
        with pytest.raises(InvalidRequest) as wrong:
            await asyncio.to_thread(score, request)
        assert wrong.value.metadata["field"] == field


async def test_a_state_of_sources_that_it_does_not_know_is_refused(client: SyncClient) -> None:
    unknown, unspecified = pb.IndexSourceState.ValueType(6), pb.INDEX_SOURCE_STATE_UNSPECIFIED
    for states, field in (([unknown], "states[0]"), ([CURRENT, unspecified], "states[1]")):
        with pytest.raises(InvalidRequest) as wrong:
            await asyncio.to_thread(client.list_sources, states=states)
        assert wrong.value.metadata["field"] == field
    assert await asyncio.to_thread(client.list_sources, states=[CURRENT])


async def test_those_in_one_state_are_listed_alone_and_all_are_counted(engine: Publishing) -> None:
    async with Publishing("Q", snapshots=True) as other:
        await other.store([1])
        index = await asyncio.to_thread(NativeIndex([engine.address, other.address]).open)
        with SyncClient(index.address) as client:

            def listed(state: pb.IndexSourceState.ValueType) -> list[str]:
                return [source.engine for source in client.list_sources(states=[state])]

            await until(lambda: asyncio.to_thread(lambda: listed(CURRENT) == ["P", "Q"]))
            await other.hang_up()
            connecting = pb.INDEX_SOURCE_STATE_CONNECTING
            await until(lambda: asyncio.to_thread(lambda: listed(connecting) == ["Q"]))
            assert await asyncio.to_thread(listed, CURRENT) == ["P"]
            rebuilding = [pb.INDEX_SOURCE_STATE_REBUILDING]
            told = await asyncio.to_thread(lambda: client.list_sources(states=rebuilding))
            assert (list(told), {state: count for state, count in told.counts.items() if count}) == (
                [],
                {connecting: 1, CURRENT: 1},
            )
        await asyncio.to_thread(index.close)


async def test_it_says_what_it_is_and_answers_health(client: SyncClient) -> None:
    info = await asyncio.to_thread(client.get_server_info)
    assert info.limits.index.max_score_blocks == 65_536 and "kvgrpc.v1.IndexService" in info.services
    for service in ("kvgrpc.v1.IndexService", ""):
        await until(lambda service=service: asyncio.to_thread(is_serving, client, service))  # type: ignore[misc]


def is_serving(client: SyncClient, service: str = "kvgrpc.v1.IndexService") -> bool:
    return client.health(service) == "SERVING"


async def test_it_is_ready_once_it_knows_most_of_what_it_follows(engine: Publishing) -> None:
    await engine.hang_up()
    served = (await Served().start()).grown_up()
    await served.register(at_registry(engine, "m"))
    index = NativeIndex((), "--registry", served.address, "--metrics-listen", "127.0.0.1:0")
    await asyncio.to_thread(index.open)

    def page(path: str) -> str:
        try:
            answer = urllib.request.urlopen(f"http://{index.metrics_address}{path}", timeout=10)
        except urllib.error.HTTPError as error:
            answer = error
        return f"{answer.status} {answer.read().decode()}"

    await until(lambda: asyncio.to_thread(lambda: page("/readyz") == "503 [-] 0 of 1 caches are current\n"))
    with SyncClient(index.address) as client:
        assert not await asyncio.to_thread(is_serving, client)
        await engine.serve()
        await until(lambda: asyncio.to_thread(is_serving, client))
        await asyncio.to_thread(client.score, asked(1, 2))
        await asyncio.to_thread(client.score, asked(77))
    assert await asyncio.to_thread(page, "/readyz") == "200 [+] 1 of 1 caches are current\n"
    assert await asyncio.to_thread(page, "/livez") == "200 [+] index\n"
    lines = (await asyncio.to_thread(page, "/metrics")).splitlines()
    for line in (
        'kvgrpc_index_sources{state="CURRENT"} 1',
        'kvgrpc_index_sources{state="CONNECTING"} 0',
        "kvgrpc_index_blocks 4",
        "kvgrpc_index_lag_batches 0",
        "kvgrpc_index_prompts_total 2",
        "kvgrpc_index_prompt_misses_total 1",
        'kvgrpc_rpc_seconds_count{method="/kvgrpc.v1.IndexService/Score"} 2',
        'kvgrpc_rpc_seconds_bucket{method="/kvgrpc.v1.IndexService/Plan",le="+Inf"} 0',
    ):
        assert line in lines, lines
    await asyncio.to_thread(index.close)
    await served.stop()


async def test_a_restarted_one_goes_on_from_what_either_index_saved(tmp_path: Path) -> None:
    saved = str(tmp_path / "index")
    async with Publishing("a", snapshots=True) as first, Publishing("b", snapshots=True) as second:
        await first.store([1, 2])
        await first.store([1])  # twice: it is there until it was removed twice
        window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 16}
        await first.publish(BlockStored([1, 2], None, [], 16, medium="GPU", group_idx=1, **window))  # type: ignore[arg-type]
        await second.store([1, 2, 3], "CPU")
        sources = [first.address, second.address]
        index = await asyncio.to_thread(NativeIndex(sources, "--saved", saved).open)
        assert await known(index, [(2, 2), (0, 3)]) == [1, 1]
        await asyncio.to_thread(index.close)
        async with PrefixIndex(sources=sources, saved=saved) as in_python:
            await in_python.until_current(2)
            assert [source.counts.snapshots for source in in_python.sources()] == [0, 0], "Python reads the file too"
        await first.remove([1])
        await first.store([3])
        await second.restart()
        await second.store([1])
        index = await asyncio.to_thread(NativeIndex(sources, "--saved", saved).open)
        assert await known(index, [(2, 2), (1, 1)]) == [0, 1], "the log of a went on, that of b did not"
        await asyncio.to_thread(index.close)


async def test_one_that_is_stopped_before_it_knows_all_again_keeps_what_was_saved(
    engine: Publishing, tmp_path: Path
) -> None:
    saved = tmp_path / "index"
    async with Publishing("a", snapshots=True) as other:
        await other.store([1, 2])
        sources = [engine.address, other.address]
        index = await asyncio.to_thread(NativeIndex(sources, "--saved", str(saved)).open)
        assert await known(index, [(3, 3), (2, 2)]) == [1, 1]
        await asyncio.to_thread(index.close)
        before = saved.read_bytes()
    index = await asyncio.to_thread(NativeIndex(sources, "--saved", str(saved)).open)
    with SyncClient(index.address) as client:
        await until(lambda: asyncio.to_thread(is_current, client))
    assert await asyncio.to_thread(index.close) == 0
    assert saved.read_bytes() == before, "what was known of a is gone"


async def known(index: NativeIndex, blocks: list[tuple[int, int]]) -> list[int]:
    """Waits until both are current and hold so many of three blocks, on the device and anywhere; their snapshots."""

    def found() -> list[tuple[int, int]]:
        with SyncClient(index.address) as client:
            if [source.freshness.state for source in client.list_sources()] != [CURRENT] * 2:
                return []
            scores = client.score(asked(1, 2, 3)).prompts[0].scores
            return [(score.device_blocks, score.blocks) for score in sorted(scores, key=lambda score: score.engine)]

    await until(lambda: asyncio.to_thread(lambda: found() == blocks))
    with SyncClient(index.address) as client:
        return [source.snapshots for source in await asyncio.to_thread(client.list_sources)]


async def test_a_damaged_file_costs_its_snapshots_and_nothing_else(engine: Publishing, tmp_path: Path) -> None:
    saved = tmp_path / "index"
    saved.write_bytes(b"nonsense")
    index = await asyncio.to_thread(NativeIndex([engine.address], "--saved", str(saved)).open)
    with SyncClient(index.address) as client:
        await until(lambda: asyncio.to_thread(is_current, client))
        listed = await asyncio.to_thread(client.list_sources)
        assert listed.not_followed == ["saved file: all snapshots are taken anew: its checksum is wrong"]
    assert await asyncio.to_thread(index.close) == 0
    assert b"kvgrpc index 1" in saved.read_bytes()


def test_plans_are_those_of_the_index_in_python(tmp_path: Path) -> None:
    registry = RegistryServer(["127.0.0.1:0"]).open()
    in_python = IndexServer(["127.0.0.1:0"], registry=registry.address).open()
    native = NativeIndex((), "--registry", registry.address).open()
    ranks = []
    for name, waiting, pages in (("a", 100_000, 12), ("b", 50_000, 5), ("c", 0, 0), ("d", 20_000, 8)):
        events: Any = {"publisher": "null"}
        rank = open_cache_rank(tmp_path, None, engine=name, registry=registry.address, pull=PullConfig(), events=events)
        rank.rank.load.say(prefill_tokens_per_second=100.0 if name != "d" else 0.0, waiting_tokens=waiting)
        rank.fill(hashes_of(prompt(pages)))
        ranks.append(rank)
    values = [hash_key(sglang_event_hash(bytes.fromhex(each))) for each in hashes_of(prompt(12))]
    try:
        with SyncClient(in_python.address) as one, SyncClient(native.address) as other:

            def plans(client: SyncClient, **more: Any) -> list[pb.PromptPlan]:
                prompt_ = pb.ScorePrompt(block_hashes=pb.BlockHashes(values=values))
                prompts = [pb.PlanPrompt(prompt=prompt_, **more), pb.PlanPrompt(prompt=prompt_, tokens=10_000)]
                return list(client.plan(pb.PlanRequest(prompts=prompts, max_placements=10)).plans)

            def same(**more: Any) -> bool:
                ours, theirs = plans(one, **more), plans(other, **more)
                return len(ours[0].placements) > 0 and ours == theirs

            def all_is_told(client: SyncClient) -> bool:
                told = [each.load.waiting_tokens for each in plans(client)[0].placements]
                return sorted(told) == [0, 20_000, 50_000, 100_000]

            for client in (one, other):
                wait_until(lambda client=client: all_is_told(client))  # type: ignore[misc]
            wait_until(same)
            assert any(each.HasField("pull") for each in plans(other)[0].placements)
            for more in ({"engines": ["b", "c"]}, {"sources": ["b"]}, {"tokens": 77}, {"tokens": 5000}):
                wait_until(lambda more=more: same(**more))  # type: ignore[misc]
            by_hashes = pb.ScorePrompt(block_hashes=pb.BlockHashes(values=values))
            for request, field in (
                (pb.PlanRequest(), "prompts"),
                (pb.PlanRequest(prompts=[pb.PlanPrompt()]), "prompts[0].prompt.prefix"),
                (pb.PlanRequest(prompts=[pb.PlanPrompt(engines=["e"] * 1025)]), "prompts[0].engines"),
                (
                    pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=by_hashes, other_kinds=[by_hashes])]),
                    "prompts[0].tokens",
                ),
            ):
                with pytest.raises(InvalidRequest) as wrong:
                    other.plan(request)
                assert wrong.value.metadata["field"] == field
            # What was reserved counts for others until the engine has told what it has to do.
            prompt_ = pb.ScorePrompt(block_hashes=pb.BlockHashes(values=values))
            asked = [pb.PlanPrompt(prompt=prompt_, engines=["c"], tokens=10_000)]
            answers = [other.plan(pb.PlanRequest(prompts=asked, reserve=True)) for _ in range(2)]
            queues = [answer.plans[0].placements[0].queue_time.ToSeconds() for answer in answers]
            assert queues[0] < queues[1]
    finally:
        for each in ranks:
            each.close()
        native.close()
        in_python.close()
        registry.close()


async def test_engines_of_a_registry_are_followed_and_another_models_is_never_told(engine: Publishing) -> None:
    served = (await Served().start()).grown_up()
    index = await asyncio.to_thread(NativeIndex((), "--registry", served.address).open)
    async with Publishing("Q", snapshots=True) as other:
        await other.store([1, 2])
        await served.register(at_registry(engine, "m"))
        await served.register(at_registry(other, "n", labels=(("zone", "a"),)))
        with SyncClient(index.address) as client:

            def holders(model: str, **labels: str) -> list[str]:
                request = asked(1, 2)
                request.prompts[0].model = model
                request.prompts[0].labels.update(labels)
                return [score.engine for score in client.score(request).prompts[0].scores]

            await until(lambda: asyncio.to_thread(lambda: holders("m") == ["P"] and holders("n") == ["Q"]))
            with pytest.raises(InvalidRequest, match=r"prompts\[0\]\.model: must be .* m or n"):
                await asyncio.to_thread(holders, "")
            assert await asyncio.to_thread(lambda: (holders("", zone="a"), holders("", zone="b"))) == (["Q"], [])
            with pytest.raises(InvalidRequest, match=r"prompts\[0\]\.labels: must be at most 16"):
                await asyncio.to_thread(lambda: holders("m", **{f"name{at}": "" for at in range(17)}))
            assert [dict(each.labels) for each in await asyncio.to_thread(client.list_sources)] == [{}, {"zone": "a"}]
            unnamed = [pb.PlanPrompt(prompt=asked(1).prompts[0]) for _ in range(2)]
            unnamed[0].prompt.model = "m"
            with pytest.raises(InvalidRequest, match=r"prompts\[1\]\.prompt\.model: must be .* m or n"):
                await asyncio.to_thread(client.plan, pb.PlanRequest(prompts=unnamed))
    await asyncio.to_thread(index.close)
    await served.stop()


def at_registry(engine: Publishing, model: str, labels: Labels = ()) -> RankRow:
    made = row(engine.engine, port=int(engine.address.rpartition(":")[2]), model=ModelIdentity(name=model))
    return replace(made, serves_events=True, endpoints=Endpoints(grpc=engine.address), labels=labels)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# who\nconsumer router:{SECRET}\noperator:{SECRET}o\n")
    index = NativeIndex(["127.0.0.1:1"], "--tokens-file", str(tokens)).open()
    yield index.address
    index.close()


def test_a_token_lets_in_whom_it_is_meant_for(guarded: str) -> None:
    with SyncClient(guarded, security=ClientSecurity(token=SECRET)) as client:
        assert not client.score(asked(1)).prompts[0].scores
        with pytest.raises(PermissionDenied) as denied:
            client.drain()
        assert denied.value.metadata["method"] == "/kvgrpc.v1.ServerService/Drain"
        for call in (client.undrain, client.list_callers):
            with pytest.raises(PermissionDenied):
                call()
    with SyncClient(guarded) as client, pytest.raises(CredentialsInvalid):
        client.score(asked(1))
    with SyncClient(guarded, security=ClientSecurity(token="x" * 32)) as client, pytest.raises(CredentialsInvalid):
        client.score(asked(1))
    elsewhere = ClientSecurity(token=SECRET, audience="10.1.2.3:8997")
    with SyncClient(guarded, security=elsewhere) as client, pytest.raises(WrongAudience):
        client.score(asked(1))
    with SyncClient(guarded, security=ClientSecurity(token=SECRET + "o")) as client:
        client.drain()
        wait_until(lambda: client.get_server_info().draining)
        client.undrain()
        assert not client.get_server_info().draining
        assert client.score(asked(1)).prompts
        wait_until(lambda: client.list_callers() == [])  # once the last answer was taken


def test_callers_are_told_with_what_they_have_open() -> None:
    """Nobody has to prove anything there, so they have no role."""
    watch = "/grpc.health.v1.Health/Watch"
    index = NativeIndex(["127.0.0.1:1"]).open()
    with grpc.insecure_channel(index.address) as channel, SyncClient(index.address) as client:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        next(watching)
        (caller,) = client.list_callers()
        told = caller.name, caller.role, caller.open_calls, caller.open_streams
        assert told == ("127.0.0.1", CALLER_ROLE_UNSPECIFIED, 0, 1)
        assert [(method.method, method.open) for method in caller.methods] == [(watch, 1)]
        watching.cancel()
        wait_until(lambda: client.list_callers() == [])
    index.close()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--listen", "0.0.0.0:0", "--source", "127.0.0.1:1"], "there is no TLS"),
        (["--listen", "127.0.0.1:0"], "name a registry"),
        (["--listen", "127.0.0.1:0", "--source", "nowhere"], "nowhere"),
        (["--listen", "127.0.0.1:0", "--source", "127.0.0.1:1", "--tokens-file", "/dev/null"], "nobody could call"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(arguments: list[str], why: str) -> None:
    done = subprocess.run([built_index(), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and why in done.stderr, done


async def test_it_is_asked_through_a_unix_socket_too(engine: Publishing, tmp_path: Path) -> None:
    path, tokens = tmp_path / "index", tmp_path / "tokens"
    tokens.write_text(f"consumer:{SECRET}\n")
    listen = f"unix:{path}"
    index = NativeIndex([engine.address], "--tokens-file", str(tokens), listen=listen)
    await asyncio.to_thread(index.open)
    assert index.address == listen
    with SyncClient(listen, ClientSecurity(token=SECRET)) as client:
        await until(lambda: asyncio.to_thread(is_current, client))
        scores = (await asyncio.to_thread(client.score, asked(1, 2))).prompts[0].scores
        assert [score.blocks for score in scores] == [2]
    with SyncClient(listen) as stranger, pytest.raises(CredentialsInvalid):
        await asyncio.to_thread(stranger.list_sources)
    with pytest.raises(AssertionError, match="another process listens there"):
        await asyncio.to_thread(NativeIndex([engine.address], listen=listen).open)
    assert await asyncio.to_thread(index.close) == 0 and not path.exists()
    left = NativeIndex([engine.address], listen=listen)
    await asyncio.to_thread(left.open)
    await asyncio.to_thread(left.kill)
    assert path.exists()
    again = NativeIndex([engine.address], listen=listen)
    await asyncio.to_thread(again.open)
    assert await asyncio.to_thread(again.close) == 0
    path.write_text("a file of somebody")
    with pytest.raises(AssertionError, match="listen: unix:"):
        await asyncio.to_thread(NativeIndex([engine.address], listen=listen).open)
    assert path.read_text() == "a file of somebody"


async def test_health_asks_for_a_token_where_it_was_told_to(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"consumer:{SECRET}\n")
    index = NativeIndex(["127.0.0.1:1"], "--tokens-file", str(tokens), "--health-needs-token")
    await asyncio.to_thread(index.open)
    with SyncClient(index.address) as stranger, pytest.raises(CredentialsInvalid):
        await asyncio.to_thread(stranger.health)
    assert await asyncio.to_thread(index.close) == 0


async def test_generic_clients_find_its_contract_by_reflection(client: SyncClient) -> None:
    def found() -> tuple[set[str], list[str]]:
        with grpc.insecure_channel(client.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName("kvgrpc.v1.IndexService")
            return set(database.get_services()), [method.name for method in service.methods]

    services, methods = await asyncio.to_thread(found)
    assert {"kvgrpc.v1.IndexService", "kvgrpc.v1.ServerService", "grpc.health.v1.Health"} <= services
    assert methods == ["Score", "Plan", "ListSources"]


async def test_it_tells_the_call_limits_that_it_has(engine: Publishing) -> None:
    usual = NativeIndex([engine.address])
    told = NativeIndex([engine.address], "--call-limits", '{"unary": 100, "streams": 7}')
    limits = []
    for index in (usual, told):
        await asyncio.to_thread(index.open)
        with SyncClient(index.address) as client:
            limits.append((await asyncio.to_thread(client.get_server_info)).limits.calls)
        await asyncio.to_thread(index.close)
    assert limits[0] == limits_to_pb(CallLimits())
    assert limits[1] == limits_to_pb(CallLimits(unary=100, streams=7))


def test_serve_index_native_becomes_it_where_it_is_installed(tmp_path: Path) -> None:
    # It is looked for beside the interpreter first, where an older one may be installed.
    (tmp_path / "kvgrpc-index").symlink_to(built_index())
    (tmp_path / "python").symlink_to(sys.executable)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [str(tmp_path / "python"), "-m", "kvgrpc", "serve", "index", "--native", "--source", "127.0.0.1:1"]
    lacking = subprocess.run([*command, "--live"], capture_output=True, text=True, env=environ, timeout=60)
    assert lacking.returncode == 2 and "no --live" in lacking.stderr
    more = ["--saved", str(tmp_path / "saved"), "--call-limits", '{"unary": 5}', "--health-needs-token"]
    listen = [*command, "--listen", f"unix:{tmp_path / 'socket'}", *more]
    process = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    began = time.monotonic()
    assert process.stdout.readline() == f"kvgrpc index listens on unix:{tmp_path / 'socket'}\n"
    with SyncClient(f"unix:{tmp_path / 'socket'}") as client:
        assert client.get_server_info().limits.calls.unary == 5
    process.terminate()
    assert process.wait(30) == 0 and time.monotonic() - began < 30
