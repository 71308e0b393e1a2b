"""ServerService: what a process says about itself, and Drain."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvgrpc.observability.logging import one_line
from kvgrpc.paging import page_size, page_token, read_page_token
from kvgrpc.registry.client.registration import Registration
from kvgrpc.rpc.callers import caller
from kvgrpc.rpc.credentials.tls import certificate_end
from kvgrpc.rpc.interceptors import Admission
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import CallerRole
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, port_security, versions
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import server_service_pb2 as pb
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceServicer
from kvgrpc.wire import rank_ref_to_pb, seconds_from_pb

_DEFAULT_GRACE_SECONDS = 30.0
_LONGEST_GRACE_SECONDS = 3600.0
_CERTIFICATE_SECONDS = 1.0


class Drainable(Protocol):
    """The thing that Drain drains. Called on the event loop, again only after the call before has ended."""

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Ends within about ``grace`` seconds. Returns whether nothing is left, and how many rooms are still open."""

    async def undrain(self, end_drain: Callable[[], Awaitable[None]]) -> None:
        """Takes a drain back, and changes nothing where none began. ``end_drain`` ends one that still waits for rooms:
        it is called when nothing can fail any more.

        Raises ServerDraining where it is about to end, StaleEpoch where another incarnation has its place, and what
        else a registry refuses: it drains on then, and its rooms keep their grace.
        """


class ServerServicer(ServerServiceServicer):
    """Served by every process, on its event loop. ``draining()``: whether something else began to drain it;
    ``callers``: who calls it."""

    def __init__(
        self,
        info: ServerInfo,
        drainable: Drainable,
        draining: Callable[[], bool] = lambda: False,
        callers: CallersHere | None = None,
    ) -> None:
        self._info = info
        self._callers = callers or CallersHere(Admission())
        # Of draining and undraining one begins after the other.
        self._steering = asyncio.Lock()
        self._drainable = drainable
        self._draining_elsewhere = draining
        self._started = time.time()
        self._draining: asyncio.Task[tuple[bool, int]] | None = None
        self._certificate: asyncio.Task[float | None] | None = None
        self._read_again_at = 0.0

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: object) -> pb.GetServerInfoResponse:
        info = self._info
        response = pb.GetServerInfoResponse(
            version=info.version,
            services=info.services,
            limits=info.limits,
            draining=self._draining is not None or self._draining_elsewhere(),
            pid=os.getpid(),
            security=port_security(info.security, await self._certificate_end()),
            settings=info.settings if caller().role in (None, CallerRole.OPERATOR) else (),
            versions=versions(),
            data_plane_endpoints=info.data_plane_endpoints,
        )
        response.time.GetCurrentTime()
        registration = info.registration()
        if registration is not None:
            response.registration.CopyFrom(_registration_to_pb(registration))
        response.start_time.FromMicroseconds(int(self._started * 1e6))
        if info.rank is not None:
            response.rank.CopyFrom(rank_ref_to_pb(info.rank))
        if info.role is not None:
            response.role = common_pb2.Role.ValueType(info.role)
        return response

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainResponse:
        grace = _DEFAULT_GRACE_SECONDS
        if request.HasField("grace"):
            grace = seconds_from_pb("grace", request.grace, _LONGEST_GRACE_SECONDS)
        async with self._steering:
            draining = self._draining
            if draining is None or draining.done():
                draining = self._draining = background(self._drainable.drain(grace), "kvgrpc-drain")
        # So a caller that goes away does not undo what it began.
        await asyncio.wait([draining])
        drained, open_rooms = (False, 0) if draining.cancelled() else draining.result()
        return pb.DrainResponse(drained=drained, open_rooms=open_rooms)

    async def Undrain(self, request: pb.UndrainRequest, context: object) -> pb.UndrainResponse:
        async with self._steering:
            await self._drainable.undrain(self._end_drain)
            await self._end_drain()
        return pb.UndrainResponse()

    def taken_back(self) -> None:
        """Somebody else took its drain back, as a rank does that of its cache's own port."""
        draining, self._draining = self._draining, None
        if draining is not None:
            draining.cancel()

    async def _end_drain(self) -> None:
        draining, self._draining = self._draining, None
        if draining is not None and not draining.done():
            draining.cancel()
            await asyncio.wait([draining])

    async def ListCallers(self, request: pb.ListCallersRequest, context: object) -> pb.ListCallersResponse:
        after = read_page_token("ListCallers", request.page_token)
        page, last = await self._callers.page(after, page_size(request.page_size), self._info.security.authenticates)
        token = page_token("ListCallers", last) if last else ""
        return pb.ListCallersResponse(callers=page, next_page_token=token)

    async def _certificate_end(self) -> float | None:
        """Off the loop: the file may lie on a disk that is away. Once a second for all who ask."""
        path, now = self._info.security.cert_file, time.monotonic()
        if not path:
            return None
        if self._certificate is None or (self._certificate.done() and now >= self._read_again_at):
            self._certificate = background(asyncio.to_thread(certificate_end, path), "kvgrpc-certificate-end")
            self._read_again_at = now + _CERTIFICATE_SECONDS
        return await asyncio.shield(self._certificate)


def _registration_to_pb(registration: Registration) -> pb.RegistrationInfo:
    state = registration.state
    message = pb.RegistrationInfo(
        address=registration.address, state=pb.RegistrationState.Value(f"REGISTRATION_STATE_{state.upper()}")
    )
    if state == "retrying":
        message.away_since.FromNanoseconds(time.time_ns() - round(registration.away_seconds * 1e9))
        message.last_error = one_line(registration.last_error)
    return message
