"""A gRPC server's life: bind, health, reflection, drain, stop. Everything runs on the process's one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvgrpc import forks
from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import advertised, split_with_port
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.interceptors import Admission, interceptors_of
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES, Pings, server_options
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.server import add_absent, new_server
from kvgrpc.server.port import health
from kvgrpc.server.port.binding import bind

_log = logging.getLogger(__name__)

# True while a service is well; else False, or why it is not.
Check = Callable[[], "bool | str"]

_LOOK_SECONDS = 0.5
# A look that comes so late finds what lay still with it, in a process that was stopped or starved.
_LATE_SECONDS = 2.0
_HARD_STOP_SECONDS = 3.0


class Listener:
    """One server with its health and reflection, for one start and one stop.

    ``health_checks``, by the full name of a service, say what it stands on besides the port: its threads and tasks.
    They are asked twice a second on the event loop, so they only read. A service is SERVING while its check holds and
    no drain began; the server (the empty name) while all of its services are. A process that was stopped has not
    failed: the first look after that takes nothing for failed that was well before.
    """

    def __init__(self, health_checks: Mapping[str, Check] | None = None, admission: Admission | None = None) -> None:
        self._checks = dict(health_checks or {})
        self._admission = admission or Admission()
        self._refused = RateLimited(_log)
        self._health = health.HealthServicer()
        self._services: tuple[str, ...] = ()
        # Those that have been SERVING once: what is not ready yet has not failed.
        self._served: set[str] = set()
        # Since when, by service.
        self._failing: dict[str, float] = {}
        self._looked_at, self._late = time.monotonic(), False
        self._server: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        self._draining = False

    @property
    def draining(self) -> bool:
        """True once ``drain`` or ``stop`` was called."""
        return self._draining

    @property
    def admission(self) -> Admission:
        """The bounds of its calls, and which are open."""
        return self._admission

    def serving(self) -> dict[str, bool]:
        """Returns for each service, by its full name, if it is SERVING; on any thread."""
        return {name: self._health.serving(name) for name in self._services}

    async def start(
        self,
        add_servicers: Callable[[grpc.aio.Server], Sequence[str]],
        addresses: Sequence[str],
        security: ServerSecurity | None = None,
        largest_request: int = LARGEST_REQUEST_BYTES,
        advertise: str = "",
        pings: Pings | None = None,
    ) -> list[str]:
        """Binds all addresses and serves; returns them as bound. ``add_servicers`` returns the services' full names; it
        registers their methods, as generated code does. ``largest_request``: bytes; above it a call is refused unread.
        ``advertise``: the host, or "host:port", by which others dial the first address; tokens may name it.
        ``pings``: of connections, quicker than usual.

        The file of a Unix socket is for its owner only. Raises AddressNotAllowed for an address that nothing protects,
        and for one that is taken or not of this host (then nothing stays bound); InvalidRequest for a file of
        ``security`` that cannot be used.
        """
        security = security or ServerSecurity()
        for address in addresses:
            security.check(address)
        audiences = Audiences(security.audience)
        interceptors = interceptors_of(security, self._admission, self._refused, audiences)
        server = new_server(interceptors, server_options(largest_request, pings))
        self._services = tuple(add_servicers(server))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_absent(server, server.paths)
        reflection.enable_server_reflection((*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        credentials = security.credentials()
        try:
            bound = [bind(server, address, credentials) for address in addresses]
        except AddressNotAllowed:
            # Only a server that ran lets go of what it bound before.
            await server.start()
            await server.stop(0)
            raise
        for address in (*bound, *([advertised(bound[0], advertise)] if advertise else ())):
            audiences.add(address)
        if security.tokens or security.token_file:
            _log.info("%s takes tokens for %s", bound[0], audiences)
        forks.listens(self, (int(port) for _, port in map(split_with_port, bound) if port.isdigit()))
        self._looked_at = time.monotonic()
        self._look()
        await server.start()
        self._server = server
        self._looking = background(self._look_for_ever(), "kvgrpc-health")
        return bound

    async def drain(self) -> None:
        """Health says NOT_SERVING from now on; calls are still served."""
        self._draining = True
        self._look()

    def undrain(self) -> None:
        """Health says how it is again. Not after ``refuse`` or ``stop``."""
        self._draining = False
        self._look()

    async def refuse(self) -> None:
        """Keeps its addresses, and answers calls with SERVER_DRAINING; ServerService and health checks go on."""
        await self.drain()
        self._admission.refuse()

    async def stop(self, grace: float, deadline: float | None = None) -> bool:
        """Ends streams with SERVER_DRAINING, refuses new calls, gives unary ones ``grace`` seconds to end.

        Nobody listens at the addresses from the start of it on. Returns within ``deadline`` seconds (None: ``grace``
        and 3 s more), whatever servicers do; False if some did not end even when they were cancelled, and are left
        behind.
        """
        await self.drain()
        if self._looking is not None:
            self._looking.cancel()
        server, self._server = self._server, None
        if server is None:
            return True
        self._admission.end_streams()
        stopping = background(server.stop(grace), "kvgrpc-stop")
        seconds = grace + _HARD_STOP_SECONDS if deadline is None else deadline
        done, _ = await asyncio.wait([stopping], timeout=seconds)
        if not done:
            _log.error("calls did not end within %.1f s of the server's stop; left behind", seconds)
        return bool(done)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        was_late, self._late = self._late, now - self._looked_at > _LATE_SECONDS
        excused, self._looked_at = self._late and not was_late, now
        well = not self._draining
        for service in self._services:
            serving = not self._draining and self._holds(service, excused)
            well = well and serving
            self._health.set(service, serving)
        self._health.set("", well)

    def _holds(self, service: str, excused: bool) -> bool:
        check, why, error = self._checks.get(service), "a thread or task of it has ended or hangs", None
        try:
            answer = check is None or check()
        except Exception as raised:
            answer, error = f"{type(raised).__name__}: {one_line(str(raised))}", raised
        holds = answer is True
        if holds:
            self._served.add(service)
        since = self._failing.get(service)
        if holds and since is not None:
            del self._failing[service]
            _log.info("the health check of %s holds again after %.1f s", service, self._looked_at - since)
        elif not holds and since is None:
            if excused and error is None:
                return True
            self._failing[service] = self._looked_at
            if answer and service not in self._served and error is None:
                _log.info("%s is not ready yet: %s", service, answer)
            else:
                _log.error("the health check of %s fails: %s", service, answer or why, exc_info=error)
        return holds
