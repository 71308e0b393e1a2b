"""The port that a kubelet and Prometheus ask: what it answers, and that strangers there hurt nobody."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest

from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.net import split
from kvgrpc.observability import bounded_http, metrics
from kvgrpc.observability import http as status_http
from kvgrpc.observability.http import StatusServer


class Process:
    def __init__(self) -> None:
        self.live = {"loop": True, "transfer": True}
        self.ready = {"kvgrpc.v1.TransferService": True}
        self.server = StatusServer("127.0.0.1:0", lambda: self.live, lambda: self.ready)

    def connect(self) -> http.client.HTTPConnection:
        host, port = split(self.server.address)
        return http.client.HTTPConnection(host, int(port), timeout=10)

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.server.close()


def test_what_holds_answers_200_and_names_each_check(process: Process) -> None:
    assert process.ask("/livez") == (200, "[+] loop\n[+] transfer\n")
    assert process.ask("/readyz?verbose") == (200, "[+] kvgrpc.v1.TransferService\n")
    assert process.ask("/livez", "HEAD") == (200, "")


def test_a_drain_is_not_ready_and_yet_alive(process: Process) -> None:
    process.ready["kvgrpc.v1.TransferService"] = False
    assert process.ask("/readyz") == (503, "[-] kvgrpc.v1.TransferService\n")
    assert process.ask("/livez")[0] == 200


def test_a_dead_thread_is_not_alive(process: Process) -> None:
    process.live["transfer"] = False
    assert process.ask("/livez") == (503, "[+] loop\n[-] transfer\n")


def test_metrics_are_prometheus_text(process: Process) -> None:
    metrics.EVENT_BATCHES.inc()
    code, text = process.ask("/metrics")
    assert code == 200
    assert "kvgrpc_event_batches_total" in text
    assert 'kvgrpc_rooms_ended_total{outcome="success",reason="",role="decode"}' in text


def test_any_other_path_says_what_there_is(process: Process) -> None:
    assert process.ask("/healthz") == (404, "/livez, /readyz and /metrics are here\n")
    assert process.ask("/", "POST")[0] == 501


def test_connections_that_say_nothing_keep_nobody_out_for_ever(
    process: Process, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_http, "CONNECTION_SECONDS", 0.5)
    host, port = split(process.server.address)
    with contextlib.ExitStack() as stack:
        for _ in range(3 * bounded_http.MOST_CONNECTIONS):
            silent = stack.enter_context(socket.create_connection((host, int(port)), 5))
            silent.sendall(b"GET /livez HTTP/1.1\r\n")
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert process.ask("/livez")[0] == 200
                break
            assert time.monotonic() < end
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_or_none_is_refused_by_name(process: Process) -> None:
    with pytest.raises(AddressNotAllowed) as refused:
        StatusServer(process.server.address, dict, dict)
    assert refused.value.metadata == {"address": process.server.address, "configKey": "metrics_listen"}
    for nonsense in ("", "9090", "unix:/run/metrics", "127.0.0.1:99999"):
        with pytest.raises(InvalidRequest):
            StatusServer(nonsense, dict, dict)


def test_no_name_is_looked_up_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DNS does not answer, that took as long as it gives up: 10 s and more before a rank was open."""
    asked: list[str] = []

    def getfqdn(name: str = "") -> str:
        asked.append(name)
        return name

    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    StatusServer("0.0.0.0:0", dict, dict).close()
    assert asked == []
