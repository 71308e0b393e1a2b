"""Answers a kubelet and Prometheus over plain HTTP: ``/livez``, ``/readyz`` and ``/metrics``. Read-only, no names.

On threads of its own, so that it answers while the event loop is stuck, and says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from prometheus_client.exposition import choose_encoder

from kvgrpc.observability.bounded_http import BoundedHandler, BoundedHttpServer, OpenHttpServer
from kvgrpc.observability.metrics import REGISTRY

CONNECTION_SECONDS = 10.0
# Who reads slowly keeps a place: of /metrics alone, so that probes have theirs (an answer to them fits into a socket).
MOST_SCRAPES = 8

Checks = Callable[[], Mapping[str, bool]]


class StatusServer(OpenHttpServer):
    """Serves from construction to ``close``. All methods are thread-safe.

    ``live``: what a restart of the process would mend, by name; one that does not hold answers ``/livez`` with 503. A
    drain is not among them. ``ready``: the same for ``/readyz``, whether new work may come. Both are called on threads
    of this server, so they only read. Raises InvalidRequest for what is no address, AddressNotAllowed for one that is
    taken; both name ``metrics_listen``.
    """

    def __init__(self, listen: str, live: Checks, ready: Checks) -> None:
        checks = {"/livez": live, "/readyz": ready}
        super().__init__(listen, "metrics_listen", "status", lambda host, port: _Server(host, port, checks))


class _Server(BoundedHttpServer):
    def __init__(self, host: str, port: int, checks: Mapping[str, Checks]) -> None:
        self.checks = checks
        self.scrapes = threading.BoundedSemaphore(MOST_SCRAPES)
        super().__init__(host, port, _Handler, CONNECTION_SECONDS)


class _Handler(BoundedHandler):
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._scrape()
        elif path in self.server.checks:
            states = self.server.checks[path]()
            lines = [f"[{'+' if holds else '-'}] {name}\n" for name, holds in states.items()]
            code = 200 if all(states.values()) else 503
            self.answer(code, "text/plain; charset=utf-8", "".join(lines).encode())
        else:
            self.answer(404, "text/plain; charset=utf-8", b"/livez, /readyz and /metrics are here\n")

    do_HEAD = do_GET

    def _scrape(self) -> None:
        if not self.server.scrapes.acquire(blocking=False):
            self.answer(503, "text/plain; charset=utf-8", b"%d others read /metrics\n" % MOST_SCRAPES)
            return
        try:
            encode, content_type = choose_encoder(self.headers.get("accept", ""))
            self.answer(200, content_type, encode(REGISTRY))
        finally:
            self.server.scrapes.release()
