"""What a kubelet and Prometheus ask over plain HTTP: ``/livez``, ``/readyz`` and ``/metrics``. Read-only, no names.

On threads of its own, so that it answers while the event loop is stuck, and says so.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client.exposition import choose_encoder

from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import check_listen, joined, port_of, split
from kvgrpc.observability.metrics import REGISTRY

MOST_CONNECTIONS = 32
CONNECTION_SECONDS = 10.0
_POLL_SECONDS = 0.1

Checks = Callable[[], Mapping[str, bool]]


class StatusServer:
    """Serves from construction to ``close``. All methods are thread-safe.

    ``live``: what a restart of the process would mend, by name; one that does not hold answers ``/livez`` with 503. A
    drain is not among them. ``ready``: the same for ``/readyz``, whether new work may come. Both are called on threads
    of this server, so they only read. Raises InvalidRequest for what is no address, AddressNotAllowed for one that is
    taken; both name ``metrics_listen``.
    """

    def __init__(self, listen: str, live: Checks, ready: Checks) -> None:
        check_listen(listen, "metrics_listen", unix=False)
        host, port = split(listen)
        try:
            self._server = _Server(host, port_of(port, lowest=0) or 0, {"/livez": live, "/readyz": ready})
        except OSError as error:
            raise AddressNotAllowed(
                f"metrics_listen: cannot listen on {listen}: {error.strerror or error}; port 0 takes a free one",
                metadata={"address": listen, "configKey": "metrics_listen"},
            ) from None
        self.address = joined(host or "0.0.0.0", self._server.server_address[1])
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_POLL_SECONDS,), name="kvgrpc-status", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, at most 32 of them, each for 10 s at most: strangers may reach this port."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, checks: Mapping[str, Checks]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.checks = checks
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the look in DNS for this host's name, which waits for many seconds where no DNS answers."""
        TCPServer.server_bind(self)

    def process_request(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        # One byte now and then would keep a connection for ever: its whole time is bounded, not only each read.
        end = threading.Timer(CONNECTION_SECONDS, _hang_up, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke off is nobody's news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "kvgrpc"
    sys_version = ""
    timeout = CONNECTION_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("accept", ""))
            self._answer(200, content_type, encode(REGISTRY))
        elif path in self.server.checks:
            states = self.server.checks[path]()
            lines = [f"[{'+' if holds else '-'}] {name}\n" for name, holds in states.items()]
            code = 200 if all(states.values()) else 503
            self._answer(code, "text/plain; charset=utf-8", "".join(lines).encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"/livez, /readyz and /metrics are here\n")

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """A probe each second is no news."""

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
