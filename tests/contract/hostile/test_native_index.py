"""The native index beside those who are no friends of its: it asks as the index in Python does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.client import SyncClient
from kvgrpc.errors import KvGrpcError, Reason
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from tests.contract.certificates import OPENSSL, Authority
from tests.contract.hostile.http2 import DATA, Connection, frame
from tests.support.native_index import NativeIndex
from tests.support.rust import built_index
from tests.support.secrets import bearer, secret

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
        assert health.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
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
