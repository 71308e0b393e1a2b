"""The standard library's HTTP server, with bounds: how many wait for a head, and how long each connection may last.

``/metrics`` and ``kvgrpc view`` serve few and small answers: a framework would be two more packages
to lock, and an event loop that stands still with the rank's.
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

from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import check_listen, joined, port_of, split

# Of those that have not sent the head of their request; past it the oldest of the address that has most gives way.
MOST_CONNECTIONS = 32
HEAD_SECONDS = 1.0
POLL_SECONDS = 0.1


class BoundedHttpServer(ThreadingHTTPServer):
    """A thread for each connection, which strangers may make too: 32 without a request at a time, for a second each.

    A newcomer always gets in: slow ones would keep probes out, and a kubelet restarts what answers no probe.
    ``connection_seconds``: how long a connection lasts whose request came; ``let_last`` is for one that needs more.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BoundedHandler], connection_seconds: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connection_seconds = connection_seconds
        self._lock = threading.Lock()
        # The address of each connection whose head has not come, and until when each connection may last; oldest first.
        self._headless: dict[socket.socket, str] = {}
        self._ends: dict[socket.socket, float] = {}
        super().__init__((host, port), handler)

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
                self._ends[request] = time.monotonic() + self._connection_seconds

    def let_last(self, request: socket.socket, seconds: float) -> None:
        """The connection may last for ``seconds`` from now, unless it has ended."""
        with self._lock:
            if request in self._ends:
                self._ends[request] = time.monotonic() + seconds

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


class OpenHttpServer:
    """A server on a thread of its own, from construction to ``close``. All methods are thread-safe.

    ``make``: makes it for a host and a port. ``setting``: the name of ``listen``, for errors. Raises InvalidRequest for
    what is no address, AddressNotAllowed for one that is taken.
    """

    def __init__(self, listen: str, setting: str, name: str, make: Callable[[str, int], BoundedHttpServer]) -> None:
        host, port = split(check_listen(listen, setting, unix=False))
        try:
            self._server = make(host, port_of(port, lowest=0) or 0)
        except OSError as error:
            raise AddressNotAllowed(
                f"{setting}: cannot listen on {listen}: {error.strerror or error}; port 0 takes a free one",
                metadata={"address": listen, "configKey": setting.lstrip("-")},
            ) from None
        self.address = joined(host or "0.0.0.0", self._server.server_address[1])
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(POLL_SECONDS,), name=f"kvgrpc-{name}", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class BoundedHandler(BaseHTTPRequestHandler):
    """Of one request; HTTP/1.0, so the connection ends with its answer."""

    server: BoundedHttpServer
    server_version = "kvgrpc"
    sys_version = ""
    timeout = 10.0  # of one read or write

    def parse_request(self) -> bool:
        whole = super().parse_request()
        self.server.head_came(self.connection)
        return whole

    def log_message(self, format: str, *arguments: object) -> None:
        """A probe each second is no news."""

    def answer(self, code: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
