"""What a kubelet and Prometheus ask over plain HTTP: ``/livez``, ``/readyz`` and ``/metrics``. Read-only, no names.

On threads of its own, so that it answers while the event loop is stuck, and says so.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client.exposition import choose_encoder

from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import check_listen, joined, port_of, split
from kvgrpc.observability.metrics import REGISTRY

# Of those that have not sent the head of their request; past it the oldest of the address that has most gives way.
MOST_CONNECTIONS = 32
HEAD_SECONDS = 1.0
CONNECTION_SECONDS = 10.0
# Who reads slowly keeps a place: of /metrics alone, so that probes have theirs (an answer to them fits into a socket).
MOST_SCRAPES = 8
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
    """A thread for each connection, which strangers may make too: 32 without a request at a time, for a second each.

    A newcomer always gets in: slow ones would keep probes out, and a kubelet restarts what answers no probe.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, checks: Mapping[str, Checks]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.checks = checks
        self.scrapes = threading.BoundedSemaphore(MOST_SCRAPES)
        self._lock = threading.Lock()
        # The address of each connection whose head has not come, and until when each connection may last; oldest first.
        self._headless: dict[socket.socket, str] = {}
        self._ends: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the look in DNS for this host's name, which waits for many seconds where no DNS answers."""
        TCPServer.server_bind(self)

    def process_request(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        with self._lock:
            if len(self._headless) >= MOST_CONNECTIONS:
                greedy = Counter(self._headless.values()).most_common(1)[0][0]
                self._hang_up(next(each for each, host in self._headless.items() if host == greedy))
            self._headless[request] = client_address[0]
            self._ends[request] = time.monotonic() + HEAD_SECONDS
        super().process_request(request, client_address)

    def head_came(self, request: socket.socket) -> None:
        with self._lock:
            if self._headless.pop(request, None) is not None:
                self._ends[request] = time.monotonic() + CONNECTION_SECONDS

    def service_actions(self) -> None:
        # One byte now and then would keep a connection for ever: its whole time is bounded, not only each read.
        now = time.monotonic()
        with self._lock:
            for request in [each for each, end in self._ends.items() if end <= now]:
                self._hang_up(request)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock:
            self._headless.pop(request, None)
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke off is nobody's news."""

    def _hang_up(self, request: socket.socket) -> None:
        """Its thread ends; with the lock, under which no socket is closed before it is forgotten here."""
        self._headless.pop(request, None)
        self._ends.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "kvgrpc"
    sys_version = ""
    timeout = CONNECTION_SECONDS

    def parse_request(self) -> bool:
        whole = super().parse_request()
        self.server.head_came(self.connection)
        return whole

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._scrape()
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

    def _scrape(self) -> None:
        if not self.server.scrapes.acquire(blocking=False):
            self._answer(503, "text/plain; charset=utf-8", b"%d others read /metrics\n" % MOST_SCRAPES)
            return
        try:
            encode, content_type = choose_encoder(self.headers.get("accept", ""))
            self._answer(200, content_type, encode(REGISTRY))
        finally:
            self.server.scrapes.release()

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
