"""Slow readers and writers at the plain HTTP port: a kubelet's probes are answered all the same, and at once."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest

from kvgrpc.net import split
from kvgrpc.observability import bounded_http
from kvgrpc.observability import http as status_http
from kvgrpc.observability.http import StatusServer
from tests.support.waiting import wait_until

SLOW = 2 * bounded_http.MOST_CONNECTIONS
# A kubelet gives a probe a second; a busy machine gets more here, and those who hold places have them for longer still.
PROBE_SECONDS = 5.0


@pytest.fixture
def port() -> Iterator[tuple[str, int]]:
    server = StatusServer("127.0.0.1:0", lambda: {"loop": True}, lambda: {"loop": True})
    host, port = split(server.address)
    yield host, int(port)
    server.close()


def probe(port: tuple[str, int], path: str) -> int:
    connection = http.client.HTTPConnection(*port, timeout=PROBE_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def slow(port: tuple[str, int], path: str, *, whole: bool = False) -> socket.socket:
    """A connection whose request never comes to its end, or whose answer is never read."""
    connection = socket.create_connection(port, 10)
    if whole:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.sendall(f"GET {path} HTTP/1.1\r\n".encode() + (b"\r\n" if whole else b""))
    return connection


def test_slow_heads_keep_no_probe_out(port: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            for _ in range(SLOW):
                stack.enter_context(slow(port, "/livez"))
            assert [probe(port, path) for path in ("/livez", "/readyz")] == [200, 200]


def test_who_sends_no_head_is_hung_up_on_after_a_second(port: tuple[str, int]) -> None:
    with slow(port, "/livez") as connection:
        began = time.monotonic()
        connection.settimeout(8)
        assert connection.recv(100) == b""
        assert time.monotonic() - began < status_http.CONNECTION_SECONDS / 2


def test_scrapes_that_nobody_reads_leave_probes_their_places(
    port: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "choose_encoder", lambda accept: (lambda registry: bytes(16 << 20), "text/plain"))
    with contextlib.ExitStack() as stack:
        for _ in range(SLOW):
            stack.enter_context(slow(port, "/metrics", whole=True))
        wait_until(lambda: is_full(port))
        assert [probe(port, path) for path in ("/livez", "/readyz")] == [200, 200]


def is_full(port: tuple[str, int]) -> bool:
    """A busy machine may take longer than a probe waits; then it is asked again."""
    with contextlib.suppress(TimeoutError):
        return probe(port, "/metrics") == 503
    return False


def test_the_greedy_address_gives_way_first(port: tuple[str, int]) -> None:
    """A probe whose head is late (a busy node) keeps its place, whatever another address opens meanwhile."""
    with contextlib.ExitStack() as stack:
        # 127.0.0.2 is another address of this host, so of another caller.
        late = stack.enter_context(socket.create_connection(port, 10, ("127.0.0.2", 0)))
        for _ in range(SLOW):
            stack.enter_context(slow(port, "/livez"))
        late.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        late.settimeout(10)
        assert late.recv(100).startswith(b"HTTP/1.0 200")
