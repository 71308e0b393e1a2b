"""The native index beside those who are no friends of its: it asks as the index in Python does."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest, KvGrpcError, Reason, TooManyRequests
from kvgrpc.events.following.questions import MAX_ANSWERS, MAX_PLAN_PROMPTS, MAX_PROMPTS
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from tests.support.certificates import OPENSSL, Authority
from tests.support.hostile.http2 import DATA, Connection, frame
from tests.support.native_index import NativeIndex, made_up_block
from tests.support.rust import built_fleet, built_index
from tests.support.secrets import bearer, secret
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Half of the places that there are: what one caller has where it is alone.
SHARE = 32
QUESTION = pb.ScoreRequest(prompts=[pb.ScorePrompt(block_hashes=pb.BlockHashes(values=[1]))])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = tmp_path_factory.mktemp("index") / "tokens"
    tokens.write_text(f"consumer greedy:{secret('greedy')}\nrank honest-* role=decode:{secret('honest')}\n")
    index = NativeIndex(["127.0.0.1:1"], "--tokens-file", str(tokens)).open()
    yield index.address
    index.close()


def metadata(name: str, address: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", bearer(name, address)),)


def test_a_watch_of_health_is_for_callers_and_a_check_for_everybody(guarded: str) -> None:
    with grpc.insecure_channel(guarded) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="kvgrpc.v1.IndexService")
        # Once it has looked for what it follows; whoever asks is answered before.
        wait_until(lambda: health.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING)
        with pytest.raises(grpc.RpcError) as refused:
            next(health.Watch(request, timeout=10))
        assert error_from(refused.value).reason is Reason.CREDENTIALS_INVALID
        watched = health.Watch(request, timeout=10, metadata=metadata("greedy", guarded))
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()


def test_bodies_that_never_come_are_their_callers_share_and_no_one_elses(guarded: str) -> None:
    """As many as there were calls of connections were read at once, each up to 8 MiB."""
    header = [(b"authorization", bearer("greedy", guarded).encode())]
    with Connection(guarded) as slow, grpc.insecure_channel(guarded) as channel:
        for _ in range(SHARE):
            stream = slow.begin("/kvgrpc.v1.IndexService/Score", header)
            slow.send(frame(DATA, 0, stream, b"\0"))
        stub = IndexServiceStub(channel)
        end = time.monotonic() + 20
        with pytest.raises(grpc.RpcError) as waited:
            while time.monotonic() < end:  # until those above were let in
                stub.Score(QUESTION, timeout=3, metadata=metadata("greedy", guarded))
        assert waited.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for _ in range(4):
            stub.Score(QUESTION, timeout=10, metadata=metadata("honest", guarded))
    with grpc.insecure_channel(guarded) as channel:  # they hung up: their places are free
        IndexServiceStub(channel).Score(QUESTION, timeout=30, metadata=metadata("greedy", guarded))


CACHES, DP_RANKS = 300, 3
WATCHES = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """It follows a large fleet, of which all hold the first block."""
    tokens = tmp_path_factory.mktemp("index") / "tokens"
    tokens.write_text(f"consumer greedy:{secret('greedy')}\nconsumer honest:{secret('honest')}\n")
    with contextlib.ExitStack() as stack:
        command = [built_fleet(), str(CACHES), "64", "0", "chains", str(DP_RANKS)]
        fleet = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(fleet.kill)
        assert fleet.stdout is not None
        limits = f'{{"health_watches_per_caller": {WATCHES}}}'
        index = NativeIndex(
            [fleet.stdout.readline().strip()], "--tokens-file", str(tokens), "--call-limits", limits
        ).open()
        stack.callback(index.close)
        channel = stack.enter_context(grpc.insecure_channel(index.address))

        def all_are_known() -> bool:
            asked = pb.ListSourcesRequest(states=[pb.INDEX_SOURCE_STATE_CURRENT])
            told = IndexServiceStub(channel).ListSources(asked, timeout=60, metadata=metadata("honest", index.address))
            current = {each.state: each.sources for each in told.counts}.get(pb.INDEX_SOURCE_STATE_CURRENT, 0)
            placed = IndexServiceStub(channel).Plan(
                pb.PlanRequest(prompts=[FIRST], max_placements=CACHES),
                timeout=60,
                metadata=metadata("honest", index.address),
            )
            return current == CACHES and all(each.HasField("load") for each in placed.plans[0].placements)

        wait_until(all_are_known, 120)
        yield index.address


FIRST = pb.PlanPrompt(
    prompt=pb.ScorePrompt(block_hashes=pb.BlockHashes(values=map(made_up_block, range(8)))), tokens=100_000
)


def test_an_answer_that_no_client_would_take_is_refused_and_leaves_nothing_reserved(large: str) -> None:
    """It had no bound, and what a refused plan had reserved counted for others for 1.5 s."""
    with grpc.insecure_channel(large) as channel:
        stub, mine = IndexServiceStub(channel), metadata("honest", large)

        def waited() -> float:
            asked = pb.PlanRequest(prompts=[FIRST], max_placements=CACHES)
            (plan,) = stub.Plan(asked, timeout=60, metadata=mine).plans
            assert len(plan.placements) == CACHES
            return sum(each.queue_time.ToTimedelta().total_seconds() for each in plan.placements)

        before = waited()  # what other tests reserved, which becomes less
        everything = pb.PlanRequest(prompts=[FIRST] * MAX_PLAN_PROMPTS, max_placements=CACHES, reserve=True)
        refusals: list[tuple[str, Any, Any]] = [
            ("scores", stub.Score, pb.ScoreRequest(prompts=[FIRST.prompt] * MAX_PROMPTS)),
            ("placements", stub.Plan, everything),
        ]
        for what, call, request in refusals:
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=120, metadata=mine)
            error = error_from(refused.value)
            assert isinstance(error, InvalidRequest) and error.metadata["field"] == f"max_{what}"
            assert str(MAX_ANSWERS) in error.message
        assert waited() <= before
        answer = stub.Score(
            pb.ScoreRequest(prompts=[FIRST.prompt] * MAX_PROMPTS, max_scores=8), timeout=120, metadata=mine
        )
        assert [len(each.scores) for each in answer.prompts] == [8] * MAX_PROMPTS


def test_however_many_plans_one_caller_asks_another_waits_for_none_of_them(large: str) -> None:
    """They were made one after the other, each whole: whoever came after sixteen waited for sixteen."""
    asked = pb.PlanRequest(prompts=[FIRST] * 64, max_placements=8)
    with grpc.insecure_channel(large) as channel:
        stub = IndexServiceStub(channel)
        calls = [stub.Plan.future(asked, timeout=300, metadata=metadata("greedy", large)) for _ in range(16)]
        stub.Plan(pb.PlanRequest(prompts=[FIRST]), timeout=300, metadata=metadata("honest", large))
        assert sum(call.done() for call in calls) <= 4
        for call in calls:
            assert len(call.result().plans) == 64


def test_watches_of_one_caller_have_a_bound_and_leave_those_of_others_alone(large: str) -> None:
    with grpc.insecure_channel(large) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        def watch(caller: str) -> Any:
            call = health.Watch(health_pb2.HealthCheckRequest(), timeout=300, metadata=metadata(caller, large))
            next(call)
            return call

        held = [watch("greedy") for _ in range(WATCHES)]
        with pytest.raises(grpc.RpcError) as refused:
            watch("greedy")
        error = error_from(refused.value)
        assert isinstance(error, TooManyRequests) and error.retry_after
        assert error.metadata == {"limit": str(WATCHES), "value": str(WATCHES + 1), "scope": "Watch of one caller"}
        watch("honest").cancel()
        held[0].cancel()
        wait_until(lambda: _is_taken(watch), 30)
        for call in held:
            call.cancel()


def _is_taken(watch: Callable[[str], Any]) -> bool:
    """Once the server knows that one of them ended."""
    try:
        watch("greedy").cancel()
    except grpc.RpcError:
        return False
    return True


@pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")
def test_a_client_certificate_gives_the_role_that_a_name_in_it_ends_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.sign("index", "IP:127.0.0.1")
    tls = ("--cert-file", server.cert_file, "--key-file", server.key_file, "--client-ca-file", authority.ca_file)
    index = NativeIndex(["127.0.0.1:1"], *tls).open()

    def status(names: str, call: Callable[[SyncClient], object], signed_by: Authority = authority) -> str:
        own = signed_by.sign("client", names)
        security = ClientSecurity(ca_file=authority.ca_file, cert_file=own.cert_file, key_file=own.key_file)
        with SyncClient(index.address, security, timeout=2.0) as client:
            try:
                call(client)
            except KvGrpcError as error:
                return error.reason.name
        return "OK"

    def score(client: SyncClient) -> object:
        return client.score(QUESTION)

    try:
        assert status("DNS:router-a.consumer", score) == "OK"
        assert status("URI:spiffe://cluster/kvgrpc/rank", score) == "OK"
        assert status("DNS:router-a", score) == "CREDENTIALS_INVALID"
        assert status("DNS:router-a.consumer", score, Authority(tmp_path, "another")) == "PEER_UNREACHABLE"
        assert status("DNS:router-a.consumer", lambda client: client.drain(0.1)) == "PERMISSION_DENIED"
        for names in ("URI:spiffe://c/kvgrpc/consumer,DNS:ops.operator", "email:x@y.consumer,DNS:ops.operator"):
            assert status(names, lambda client: client.drain(0.1)) == "PERMISSION_DENIED", "the first name counts"
        assert status("DNS:a.operator", lambda client: client.drain(0.1)) == "OK"
    finally:
        index.close()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (f"consumer a:{secret('one')}\noperator:{secret('one')}\n", "not the same on lines 1 and 2"),
        (f"consumer a b:{secret('one')}\n", "line 1: must be ROLE [NAME]:SECRET"),
        (f"consumer a role=decode:{secret('one')}\n", "line 1: must be ROLE [NAME]:SECRET"),
        (f"rank decode-* role=router:{secret('one')}\n", "line 1: must be ROLE [NAME]:SECRET"),
    ],
)
def test_lines_of_tokens_that_could_mean_two_things_are_refused(tmp_path: Path, lines: str, why: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(lines)
    command = [built_index(), "--listen", "127.0.0.1:0", "--source", "127.0.0.1:1", "--tokens-file", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and why in done.stderr and secret("one") not in done.stderr
