"""Strangers: what anybody who reaches the port can send before they are asked who they are. Nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES, MAX_CALLS_OF_A_CONNECTION, SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.server import add_methods, new_server
from kvgrpc.v1.transfer_service_pb2 import ListRoomsRequest
from tests.support.hostile.http2 import DATA, GOAWAY, HEADERS, MAX_CONCURRENT_STREAMS, Connection, frame
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until

LIST_ROOMS = "/kvgrpc.v1.TransferService/ListRooms"
ONE_ROOM = ListRoomsRequest(page_size=1).SerializeToString()
REGISTER = "/kvgrpc.v1.RegistryService/Register"
UNIMPLEMENTED, RESOURCE_EXHAUSTED = b"12", b"8"


@pytest.fixture
def stranger(prefill: RankHost) -> Iterator[Connection]:
    with Connection(prefill.rank.address) as connection:
        wait_until(connection.settings)
        yield connection


def status_comes(connection: Connection, stream: int, status: bytes) -> None:
    """As the server writes it the first time on a connection: a literal header."""
    wait_until(lambda: any(status in raw for raw in connection.of(HEADERS, stream)))


class TestPaths:
    def test_a_path_that_is_not_utf8_ends_no_server(self, stranger: Connection) -> None:
        for path in (b"/x/\xff", b"/kvgrpc.v1.TransferService/\xc3\x28", b"\xff", b""):
            stream = stranger.begin_raw(path)
            stranger.message(stream, b"")
        wait_until(lambda: len(stranger.of(HEADERS)) >= 3)
        stream = stranger.begin(LIST_ROOMS)
        stranger.message(stream, b"")
        wait_until(lambda: stranger.of(DATA, stream))

    def test_methods_that_are_not_there_are_unimplemented(self, stranger: Connection) -> None:
        for path in ("/kvgrpc.v1.TransferService/Nothing", "/a.B/C", "nonsense"):
            status_comes(stranger, stranger.begin(path, end=True), b"Method not found!")


class TestHeaders:
    def test_headers_that_are_not_utf8_write_one_line(
        self, stranger: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            for _ in range(100):
                stream = stranger.begin(LIST_ROOMS, [(b"traceparent", b"\xff" * 500)])
                # Of one room: answers of many would close the connection's window, which a stranger opens no further.
                stranger.message(stream, ONE_ROOM)
                wait_until(lambda stream=stream: stranger.of(DATA, stream))  # type: ignore[misc]
        said = [record for record in caplog.records if "UTF-8" in record.getMessage() or record.exc_info]
        assert len(said) <= 2, [record.getMessage() for record in said]
        assert all(record.exc_info is None and len(record.getMessage()) < 200 for record in said)


class TestBodies:
    def test_a_compressed_request_is_refused_and_not_unpacked(self, stranger: Connection) -> None:
        packing = zlib.compressobj(9, zlib.DEFLATED, 31)
        zeros = packing.compress(bytes(LARGEST_REQUEST_BYTES - 1024)) + packing.flush()
        stream = stranger.begin(LIST_ROOMS, [(b"grpc-encoding", b"gzip")])
        stranger.message(stream, zeros, compressed=True)
        status_comes(stranger, stream, UNIMPLEMENTED)

    def test_a_request_above_the_servers_limit_is_refused_by_its_first_bytes(self, stranger: Connection) -> None:
        for path in (LIST_ROOMS, REGISTER, "/kvgrpc.v1.TransferService/Session"):
            stream = stranger.begin(path)
            head = struct.pack(">BI", 0, LARGEST_REQUEST_BYTES + 1)
            stranger.send(frame(DATA, 0, stream, head + bytes(100)))
            wait_until(lambda stream=stream: stranger.of(HEADERS, stream))  # type: ignore[misc]

    def test_a_small_methods_request_is_refused_before_it_is_parsed(self, stranger: Connection) -> None:
        stream = stranger.begin(LIST_ROOMS)
        stranger.message(stream, b"\x0a" + b"\xff\xff\x0f" + bytes(262_143))
        status_comes(stranger, stream, b"at most")


class TestConnections:
    def test_the_calls_of_one_connection_are_bounded(self, stranger: Connection) -> None:
        wait_until(lambda: stranger.settings().get(MAX_CONCURRENT_STREAMS) == MAX_CALLS_OF_A_CONNECTION)

    @pytest.fixture
    async def hasty(self) -> AsyncIterator[str]:
        """A server with all of our options, whose times are a twentieth; an idle connection has a hundredth."""
        times = dict.fromkeys(
            ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"), 20
        ) | {"grpc.max_connection_idle_ms": 100}
        options = tuple((name, int(value) // times[name] if name in times else value) for name, value in SERVER_OPTIONS)
        server = new_server(interceptors_of(ServerSecurity()), options)

        async def never(request: bytes, context: Any) -> bytes:
            await asyncio.sleep(60)  # for ever
            return b""

        handler: Any = grpc.unary_unary_rpc_method_handler(never)
        add_methods(server, "test.Never", {"Answers": handler})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(0)

    async def test_a_connection_without_calls_is_sent_away(self, hasty: str) -> None:
        with await asyncio.to_thread(Connection, hasty) as idle:
            await asyncio.to_thread(wait_until, lambda: idle.of(GOAWAY))

    async def test_a_peer_that_answers_no_ping_is_gone_after_the_ping_timeout(self, hasty: str) -> None:
        with await asyncio.to_thread(Connection, hasty, answer_pings=False) as silent:
            silent.message(silent.begin("/test.Never/Answers"), b"")
            began = time.monotonic()
            assert await asyncio.to_thread(silent.closed.wait, 20)
            assert silent.closed_at - began < 15
