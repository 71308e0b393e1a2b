"""A rank that keeps what it is sent: of no use to it anywhere, and nothing is sent where only a request said to go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import KvGrpcError, Reason
from kvgrpc.model import Layout, RankId, RankRef, new_epoch
from kvgrpc.rpc.credentials.tokens import BearerToken
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.server import IndexServer, RegistryServer
from kvgrpc.transfer import KVPoll
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.wire import layout_to_pb, pool_to_pb, rank_ref_to_pb
from tests.support.fleet_tokens import SECURITY, TOKENS, sent
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.rank_host import RankHost
from tests.support.secrets import bearer, proof
from tests.support.transfer_peers import METHOD, DecodeClient, Memory, core_of, receiver_of
from tests.support.waiting import wait_until

DEREGISTER = "/kvgrpc.v1.RegistryService/Deregister"


class Thief:
    """A port that answers nothing, and keeps the header of each call by its method."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self._server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers((self._Keeps(self.headers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(10)

    class _Keeps(grpc.GenericRpcHandler):
        def __init__(self, headers: dict[str, str]) -> None:
            self._headers = headers

        def service(self, details: Any) -> Any:
            metadata = {key: str(value) for key, value in details.invocation_metadata}
            self._headers[details.method] = metadata.get("authorization", "")


@pytest.fixture
def thief() -> Iterator[Thief]:
    made = Thief()
    yield made
    made.close()


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryServer]:
    made = RegistryServer(["127.0.0.1:0"], SECURITY).open()
    yield made
    made.close()


@pytest.fixture(scope="module")
def honest(registry: RegistryServer) -> Iterator[RankHost]:
    """A prefill that the thief would like to speak to as decode-7."""
    security = {"server_security": SECURITY, "client_security": proof("prefill")}
    host = RankHost("honest-p", "PREFILL", {"timing": TIMING, "registry": registry.address, **security})
    yield host
    host.close(1.0)


@pytest.fixture
def seven(registry: RegistryServer) -> Iterator[RankHost]:
    security = {"server_security": SECURITY, "client_security": proof("seven")}
    host = RankHost("decode-7", "DECODE", {"timing": TIMING, "registry": registry.address, **security})
    yield host
    host.close(1.0)


def register(registry: RegistryServer, memory: Memory, address: str) -> None:
    """The thief's own row: its scope allows it, and the address is its own."""
    row = registry_pb.RankRow(
        rank=rank_ref_to_pb(RankRef(RankId("prefill-evil"), new_epoch())),
        role=common_pb2.ROLE_PREFILL,
        endpoints=registry_pb.Endpoints(grpc=address),
        layout=layout_to_pb(Layout()),
        pools=[pool_to_pb(memory.pool.without_addresses())],
        data_plane="shm",
        serves_events=True,
    )
    with grpc.insecure_channel(registry.address) as channel:
        RegistryServiceStub(channel).Register(
            registry_pb.RegisterRequest(rows=[row]),
            metadata=(("authorization", bearer("evil", registry.address)),),
            timeout=10,
        )


def test_what_a_decode_sends_to_the_rank_of_another_engine_proves_it_nowhere_else(
    registry: RegistryServer, honest: RankHost, seven: RankHost, thief: Thief, memory: Memory
) -> None:
    register(registry, memory, thief.address)
    receiver = receiver_of(seven, f"{registry.address}/prefill-evil", next(ROOMS))
    wait_until(lambda: METHOD in thief.headers, 30)
    stolen = thief.headers[METHOD]
    assert BearerToken.read(stolen).target == thief.address
    assert sent(registry.address, DEREGISTER, stolen) is Reason.WRONG_AUDIENCE
    relayed = DecodeClient(honest, memory, "decode-7")
    relayed.header = stolen
    error = relayed.dial().send(hello=relayed.hello()).over()
    assert error is not None and error_from(error).reason is Reason.WRONG_AUDIENCE
    assert relayed.ref not in core_of(honest).pairs
    receiver.abort()
    wait_until(lambda: receiver.poll() is KVPoll.Failed, 30)
    relayed.close()


def test_what_an_index_sends_to_the_rank_that_it_reads_proves_it_nowhere_else(
    registry: RegistryServer, thief: Thief, memory: Memory
) -> None:
    register(registry, memory, thief.address)
    index = IndexServer(["127.0.0.1:0"], registry=registry.address, client_security=proof("index")).open()
    try:
        watch = "/kvgrpc.v1.EventService/Watch"
        wait_until(lambda: thief.headers.get(watch), 30)
        list_engines = "/kvgrpc.v1.RegistryService/ListEngines"
        assert sent(registry.address, list_engines, thief.headers[watch]) is Reason.WRONG_AUDIENCE
        assert sent(registry.address, list_engines, bearer("index", registry.address)) is None
    finally:
        index.close()


def test_a_registry_that_only_a_request_named_is_asked_without_any_proof(seven: RankHost, thief: Thief) -> None:
    receiver = receiver_of(seven, f"{thief.address}/any", next(ROOMS))
    wait_until(lambda: thief.headers, 30)
    assert set(thief.headers.values()) == {""}
    receiver.abort()
    wait_until(lambda: receiver.poll() is KVPoll.Failed, 30)


def test_a_decode_that_was_refused_for_want_of_proof_says_how_to_trust_the_registry(
    registry: RegistryServer, thief: Thief
) -> None:
    security = {"server_security": SECURITY, "client_security": proof("seven")}
    decode = RankHost("decode-7", "DECODE", {"timing": TIMING, **security})
    receiver = receiver_of(decode, f"{registry.address}/honest-p", next(ROOMS))
    wait_until(lambda: receiver.poll() is KVPoll.Failed, 30)
    assert receiver.failure.reason is Reason.CREDENTIALS_INVALID and "bootstrap_allow" in receiver.failure.message
    decode.close(1.0)


def test_what_a_registry_was_sent_proves_nothing_to_a_rank(registry: RegistryServer, honest: RankHost) -> None:
    captured = bearer("boss", registry.address)
    assert sent(honest.rank.address, "/kvgrpc.v1.TransferService/CancelRoom", captured) is Reason.WRONG_AUDIENCE


class TestAServerOfSeveralNames:
    """Replicas behind one name are one target, and a server is called as its clients were told."""

    @pytest.fixture
    def replicas(self) -> Iterator[tuple[RegistryServer, RegistryServer]]:
        security = ServerSecurity(tokens=TOKENS, audience=("registry.kvgrpc:8998",))
        made = RegistryServer(["127.0.0.1:0"], security).open(), RegistryServer(["127.0.0.1:0"], security).open()
        yield made
        for each in made:
            each.close()

    def test_one_header_serves_at_all_replicas_of_a_name_and_not_at_others(
        self, replicas: tuple[RegistryServer, RegistryServer], registry: RegistryServer
    ) -> None:
        header, path = bearer("index", "registry.kvgrpc:8998"), "/kvgrpc.v1.RegistryService/ListEngines"
        assert [sent(each.address, path, header) for each in replicas] == [None, None]
        assert sent(registry.address, path, header) is Reason.WRONG_AUDIENCE
        own = bearer("index", replicas[0].address)
        assert [sent(each.address, path, own) for each in replicas] == [None, Reason.WRONG_AUDIENCE]

    def test_a_tunnel_is_named_by_its_other_end(self, replicas: tuple[RegistryServer, RegistryServer]) -> None:
        from dataclasses import replace

        through = replace(proof("boss"), audience="registry.kvgrpc:8998")
        with SyncClient(replicas[0].address, through) as client:
            assert client.list_engines() == []

    def test_a_wildcard_is_called_by_the_numbers_of_its_host(self) -> None:
        security = ServerSecurity(tokens=TOKENS, insecure=True)
        wide = RegistryServer(["0.0.0.0:0"], security).open()
        port = wide.address.rpartition(":")[2]
        try:
            with SyncClient(f"127.0.0.1:{port}", proof("boss")) as client:
                assert client.list_engines() == []
            foreign = bearer("boss", f"192.0.2.1:{port}")
            path = "/kvgrpc.v1.RegistryService/ListEngines"
            assert sent(f"127.0.0.1:{port}", path, foreign) is Reason.WRONG_AUDIENCE
        finally:
            wide.close()

    def test_a_unix_socket_is_a_target_too(self, tmp_path: Any) -> None:
        socket = f"unix:{tmp_path}/s"
        server = RegistryServer([socket], SECURITY).open()
        try:
            for address in (socket, f"unix://{tmp_path}/s"):
                with SyncClient(address, proof("boss")) as client:
                    assert client.list_engines() == []
        finally:
            server.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda address: "Bearer boss-as-a-secret-of-tests", Reason.CREDENTIALS_INVALID),
        (lambda address: bearer("nobody", address), Reason.CREDENTIALS_INVALID),
        (lambda address: bearer("boss", "127.0.0.1:1"), Reason.WRONG_AUDIENCE),
    ],
)
def test_each_refusal_names_its_remedy(registry: RegistryServer, make: Callable[[str], str], reason: Reason) -> None:
    with grpc.insecure_channel(registry.address) as channel, pytest.raises(grpc.RpcError) as refused:
        RegistryServiceStub(channel).ListEngines(
            registry_pb.ListEnginesRequest(), metadata=(("authorization", make(registry.address)),), timeout=10
        )
    error: KvGrpcError = error_from(refused.value)
    assert error.reason is reason and error.code == "UNAUTHENTICATED"
    remedies = ("kvgrpc token TARGET", "tokens_file", "KVGRPC_AUDIENCE")
    assert sum(remedy in error.message for remedy in remedies) == 1


def test_a_header_that_was_kept_is_worth_nothing_two_minutes_later(
    registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, path = bearer("boss", registry.address), "/kvgrpc.v1.RegistryService/ListEngines"
    assert sent(registry.address, path, header) is None
    later = time.time() + 120
    monkeypatch.setattr("kvgrpc.rpc.credentials.token_table.time.time", lambda: later)
    assert sent(registry.address, path, header) is Reason.CREDENTIALS_EXPIRED
