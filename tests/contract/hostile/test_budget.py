"""What one caller costs: its requests' bytes before they are read, its work on the loop, its waits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest, TooManyRequests
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.methods import HEALTH_CHECK
from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.rpc.turns import Turns
from kvgrpc.server import RegistryServer
from kvgrpc.server.port import servicer
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.certificates import OPENSSL, Authority
from tests.support.hostile.greedy_caller import Caller
from tests.support.hostile.honest_pair import TIMING, hand_over, resident
from tests.support.hostile.http2 import END_STREAM, HEADERS, Connection
from tests.support.hostile.largest import TRANSFER, said
from tests.support.hostile.loop_turns import turns_of_the_loop
from tests.support.rank_host import RankHost
from tests.support.secrets import bearer, proof, tokens_of
from tests.support.transfer_peers import core_of
from tests.support.waiting import until, wait_until

LONGEST_TURN_SECONDS = 0.05
# Calls of each greedy connection: more than its places. One refusal a millisecond is told, and where a core is wanted
# by many, one in 40 ms: of 400 calls that took 17 s.
ASKED_AT_ONCE = 24
REGISTER = "/kvgrpc.v1.RegistryService/Register"
KEEP_ALIVE = "/kvgrpc.v1.RegistryService/KeepAlive"


def shape(
    tp: int, pp: int = 1, cp: int = 1, *, heads: int, layers: int, page_tokens: int, axes: str = ""
) -> pb.EngineShape:
    layout = common_pb2.Layout(dp=1, pp=pp, cp=cp, tp=tp)
    return pb.EngineShape(layout=layout, heads=heads, layers=layers, page_tokens=page_tokens, axes=axes)


def topology(one: pb.EngineShape, other: pb.EngineShape) -> pb.GetTopologyRequest:
    return pb.GetTopologyRequest(prefill=one, decode=other)


class TestTopology:
    @pytest.fixture
    def stub(self, prefill: RankHost) -> Iterator[TransferServiceStub]:
        with grpc.insecure_channel(prefill.rank.address) as channel:
            yield TransferServiceStub(channel)

    @pytest.mark.parametrize(
        "request_",
        [
            topology(*(shape(tp, heads=8_192, layers=8, page_tokens=8_192) for tp in (1, 8_192))),
            topology(*(shape(tp, heads=64, layers=2**31, page_tokens=512) for tp in (1, 64))),
            topology(*[shape(256, heads=64, layers=4_096, page_tokens=64)] * 2),
            topology(*(shape(tp, axes="kv,token,head,dim", heads=2**31, layers=1, page_tokens=512) for tp in (1, 2))),
        ],
        ids=["lines", "layers", "lines of layers", "heads"],
    )
    def test_one_that_would_take_minutes_is_refused_before_any_of_it(
        self, stub: TransferServiceStub, request_: pb.GetTopologyRequest
    ) -> None:
        assert request_.ByteSize() < 128
        with turns_of_the_loop() as turns, pytest.raises(grpc.RpcError) as refused:
            stub.GetTopology(request_, timeout=20)
        assert isinstance(error_from(refused.value), InvalidRequest)
        assert turns.longest < LONGEST_TURN_SECONDS

    def test_pieces_are_counted_without_being_made(self, stub: TransferServiceStub) -> None:
        one, two = (shape(tp, axes="kv,token,head,dim", heads=4_096, layers=1, page_tokens=4_096) for tp in (1, 2))
        with turns_of_the_loop() as turns:
            found = stub.GetTopology(topology(one, two), timeout=20)
        # Of keys and of values: each of half the heads of each token.
        assert [part.descriptors_per_page for part in found.parts] == [2 * 4_096 * 2_048] * 2
        assert turns.longest < LONGEST_TURN_SECONDS

    def test_the_largest_are_computed_in_pieces_and_rooms_go_on_between(
        self, stub: TransferServiceStub, prefill: RankHost, decode: RankHost
    ) -> None:
        # 4,096 lines of 64 layers, 63 tokens and a head each.
        largest = topology(
            shape(64, cp=64, heads=64, layers=64, page_tokens=63), shape(64, heads=64, layers=64, page_tokens=63)
        )
        hand_over(prefill, decode)
        with turns_of_the_loop() as turns:
            # Alone: on a machine that does much else each of its hundred pieces rests 0.15 s.
            call = stub.GetTopology.future(largest, timeout=50)
            rooms = 0
            while not call.done():
                hand_over(prefill, decode)
                rooms += 1
        assert len(call.result().parts) == 4_096
        # One, if it had waited for all of it.
        assert rooms > 2 and turns.longest < LONGEST_TURN_SECONDS


@pytest.fixture
def long_rest(prefill: RankHost, decode: RankHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """The turns of the loop, one of which is somebody's until the test ends it by ``_next``."""
    # The end of a room at prefill is news too, which comes a moment after the one at decode.
    monkeypatch.setattr("kvgrpc.rpc.turns.HURRY_SECONDS", float("inf"))
    hand_over(prefill, decode)
    loop = LoopThread.shared()

    async def begin() -> Turns:
        turns = Turns.of_this_loop()
        assert turns.hurries, "the hand-off told nobody that it went on"
        await until(lambda: not turns._busy)  # a piece of the rank's own calls, at whose end the next one begins
        turns._busy = True
        return turns

    turns = loop.run(begin(), 20)
    try:
        yield turns
    finally:
        loop.run(end_of(turns), 20)


async def end_of(turns: Turns) -> None:
    turns._hurries_until = 0.0
    turns._next()


def test_while_rooms_go_on_calls_wait_for_their_turns_and_rooms_for_no_call(
    long_rest: Turns, prefill: RankHost, decode: RankHost
) -> None:
    with grpc.insecure_channel(prefill.rank.address) as channel:
        call = TransferServiceStub(channel).ListRooms.future(pb.ListRoomsRequest(), timeout=60)
        wait_until(lambda: long_rest._waiting)  # the rank's own calls wait too
        hand_over(prefill, decode)
        assert not call.done()
        LoopThread.shared().run(end_of(long_rest), 20)
        call.result()


def ask(connection: Connection, path: str, request: Message) -> int:
    stream = connection.begin(path)
    connection.message(stream, request.SerializeToString())
    return stream


def test_a_session_that_begins_waits_for_its_turn_and_one_that_stands_for_none(
    long_rest: Turns, prefill: RankHost, decode: RankHost
) -> None:
    """Callers that may open none, and ask again at once, had more of the loop than all calls together."""
    hello = next(said("anew", rank_ref_to_pb(prefill.rank.ref))[TRANSFER + "Session"](1))
    with Connection(prefill.rank.address, source="127.0.0.2") as connection:
        stream = ask(connection, TRANSFER + "Session", hello)
        wait_until(lambda: ("", "127.0.0.2") in long_rest._places._of_callers)
        hand_over(prefill, decode)
        assert connection.of(HEADERS, stream) == []
        LoopThread.shared().run(end_of(long_rest), 20)
        wait_until(lambda: connection.of(HEADERS, stream))


def answered(connection: Connection) -> dict[int, bytes]:
    """Trailers of the calls that are over, by their streams."""
    frames = list(connection.frames)
    return {stream: raw for kind, flags, stream, raw in frames if kind == HEADERS and flags & END_STREAM}


def test_one_address_leaves_places_to_others_and_to_probes_before_anybody_asked_who_it_is(
    long_rest: Turns, prefill: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls filled all that wait for their turns: whoever came after them was not even looked at."""
    monkeypatch.setattr(long_rest._places, "_limit", 64)
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(Connection(prefill.rank.address, source="127.0.0.2")) for _ in range(4)]
        for connection in greedy:
            for _ in range(ASKED_AT_ONCE):
                ask(connection, TRANSFER + "ListRooms", pb.ListRoomsRequest())
        # A connection may have 16 in any case, the four together half of all.
        asked = len(greedy) * ASKED_AT_ONCE
        wait_until(lambda: sum(len(answered(connection)) for connection in greedy) >= asked - 32)
        refusals = [raw for connection in greedy for raw in answered(connection).values()]
        assert len(refusals) < asked and any(
            b"which may have as many as it leaves to others" in raw for raw in refusals
        )

        channel = stack.enter_context(grpc.insecure_channel(prefill.rank.address))
        honest = TransferServiceStub(channel).ListRooms.future(pb.ListRoomsRequest(), timeout=60)
        health = ask(greedy[0], HEALTH_CHECK, health_pb2.HealthCheckRequest())
        wait_until(lambda: ("", "127.0.0.2") in long_rest._probes._of_callers)
        wait_until(lambda: ("", "127.0.0.1") in long_rest._places._of_callers)
        assert not honest.done() and health not in answered(greedy[0])
        LoopThread.shared().run(end_of(long_rest), 20)
        honest.result()
        wait_until(lambda: health in answered(greedy[0]))


def test_large_requests_of_one_caller_wait_outside_until_there_is_room_for_them(
    prefill: RankHost, decode: RankHost
) -> None:
    """200 of 4 MiB at once: read as they came, they were 800 MB."""
    size = LARGEST_REQUEST_BYTES - 1_024
    hand_over(prefill, decode)
    before = most = resident()
    asked = [sys.executable, "-m", "tests.support.hostile.asking", prefill.rank.address, REGISTER, "200", str(size)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as caller, turns_of_the_loop() as turns:
        while caller.poll() is None:
            hand_over(prefill, decode)
            most = max(most, resident())
        assert caller.stdout is not None
        assert caller.stdout.read() == "{'INVALID_ARGUMENT': 200}\n"
    assert most - before < 384 << 20
    assert turns.longest < LONGEST_TURN_SECONDS


def test_sessions_that_are_opened_anew_with_the_largest_frames_leave_turns_to_others(
    prefill: RankHost, decode: RankHost
) -> None:
    """Each of a decode rank of its own, with two frames of 60,000 rooms: a pair's p99 was 0.8 s."""
    session = said("anew", rank_ref_to_pb(prefill.rank.ref))[TRANSFER + "Session"]
    streams = [[each.SerializeToString() for each in session(number)] for number in (1, 2, 4, 5, 7, 8)]
    hand_over(prefill, decode)
    with grpc.insecure_channel(prefill.rank.address) as channel, turns_of_the_loop() as turns:
        opened: Any = channel.stream_stream(TRANSFER + "Session")
        asking = [opened(iter(messages), timeout=60) for messages in streams]
        took = [hand_over(prefill, decode) for _ in range(20)]
        for stream in asking:
            assert pb.SessionResponse.FromString(next(stream)).HasField("welcome")
            stream.cancel()
        wait_until(lambda: len(core_of(prefill).pairs) <= 1, 60)
    assert turns.longest < LONGEST_TURN_SECONDS
    assert statistics.median(took) < 1.0, took


@pytest.fixture(scope="module")
def shared_token() -> Iterator[RankHost]:
    """A rank whose registry is called by many that have one token, from one host."""
    security = ServerSecurity(tokens=tokens_of("rank S:own\nrank *:shared\nrank honest-*:honest\nconsumer c:reads"))
    limits = CallLimits(keepalives_per_caller=64)
    host = RankHost("S", "PREFILL", {"timing": TIMING, "registry": "embedded", "server_security": security,
                                     "call_limits": limits, "client_security": proof("own")})  # fmt: skip
    yield host
    host.close(1.0)


def test_one_connection_leaves_places_to_others_of_its_host_and_token(shared_token: RankHost) -> None:
    with contextlib.ExitStack() as stack:
        greedy, honest = (Caller(shared_token, "shared", "rank *") for _ in range(2))
        stack.callback(greedy.close)
        stack.callback(honest.close)
        for _ in range(16):
            greedy.hold(KEEP_ALIVE)
        refused = greedy.refusal(KEEP_ALIVE)
        assert isinstance(refused, TooManyRequests) and refused.retry_after
        assert refused.metadata["scope"] == "KeepAlive of one caller of one connection"
        honest.hold(KEEP_ALIVE)


def test_rows_and_engines_of_one_caller_leave_as_many_to_others(
    shared_token: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = cast(Any, shared_token.rank)._parts.registry.store.registry
    monkeypatch.setattr(known._owners._rows, "_limit", 64)
    with grpc.insecure_channel(shared_token.rank.address) as channel:

        def register(engine: str, token: str) -> None:
            request = registry_pb.RegisterRequest()
            request.rows.add(
                rank=common_pb2.RankRef(rank=common_pb2.RankId(engine=engine), epoch=1),
                role=common_pb2.ROLE_DECODE,
                layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=1),
                endpoints=registry_pb.Endpoints(grpc="127.0.0.1:9"),
                data_plane="shm",
            )
            metadata = (("authorization", bearer(token, shared_token.rank.address)),)
            RegistryServiceStub(channel).Register(request, timeout=20, metadata=metadata)

        with pytest.raises(grpc.RpcError) as refused:
            for number in range(40):
                register(f"greedy-{number}", "shared")
        error = error_from(refused.value)
        assert isinstance(error, TooManyRequests) and error.retry_after
        assert error.metadata["scope"].startswith("rows of one")
        register("honest-1", "honest")


@pytest.mark.parametrize(("token", "status"), [("wrong", b"16"), ("reads", b"7")])
def test_who_may_not_call_is_told_so_before_a_byte_of_its_request(
    shared_token: RankHost, token: str, status: bytes
) -> None:
    with Connection(shared_token.rank.address) as connection:
        stream = connection.begin(REGISTER, [(b"authorization", bearer(token, shared_token.rank.address).encode())])
        began = time.monotonic()
        wait_until(lambda: any(status in raw for raw in connection.of(HEADERS, stream)))
        assert time.monotonic() - began < 10


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificate with openssl")
def test_what_a_server_says_of_itself_is_looked_up_once_however_often_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GetServerInfo is counted by no bound, so that a full server can be looked at: each took 3 ms of the loop to find
    versions, and a thread to read the certificate."""
    authority = Authority(tmp_path)
    made = authority.sign("server", "IP:127.0.0.1")
    looked_up: list[str] = []

    def noted(module: Any, name: str) -> None:
        look_up = getattr(module, name)

        def looking_up(what: str) -> Any:
            looked_up.append(what)
            return look_up(what)

        monkeypatch.setattr(module, name, looking_up)

    noted(importlib.metadata, "version")
    noted(servicer, "certificate_end")
    server = RegistryServer(["127.0.0.1:0"], ServerSecurity(made.cert_file, made.key_file)).open()
    try:
        with SyncClient(server.address, ClientSecurity(ca_file=authority.ca_file)) as client:
            first = client.get_server_info()
            assert first.versions["grpcio"] and first.security.HasField("certificate_end_time")
            looked_up.clear()
            began = time.monotonic()
            for _ in range(200):
                assert client.get_server_info().security == first.security
            assert len(looked_up) <= 1 + time.monotonic() - began
    finally:
        server.close()
