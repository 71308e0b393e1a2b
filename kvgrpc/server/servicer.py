"""ServerService: what a process says about itself, and Drain."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from kvgrpc.dataplane.base import Bounded, DataPlane
from kvgrpc.model import RankRef, Role
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.loop import background
from kvgrpc.transfer.protocol.types import Bounds
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import server_service_pb2 as pb
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceServicer
from kvgrpc.wire import rank_ref_to_pb, seconds_from_pb

_DEFAULT_GRACE_SECONDS = 30.0
_LONGEST_GRACE_SECONDS = 3600.0


class Drainable(Protocol):
    """What Drain drains. Called on the event loop, again only after the call before has ended."""

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Ends within about ``grace`` seconds. Returns whether nothing is left, and how many rooms are still open."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What GetServerInfo says."""

    version: str
    services: Sequence[str]
    rank: RankRef | None = None
    role: Role | None = None
    limits: pb.ServerLimits = field(default_factory=pb.ServerLimits)


def rank_limits(max_frame_bytes: int, bounds: Bounds, plane: DataPlane) -> pb.RankLimits:
    """The bounds of a rank, and of what is on its way to one peer."""
    message = pb.RankLimits(max_frame_bytes=max_frame_bytes)
    for each in fields(Bounds):
        setattr(message, f"max_{each.name}", min(getattr(bounds, each.name), 2**32 - 1))
    if isinstance(plane, Bounded):
        writes, nbytes = plane.limits_of_a_peer
        message.max_peer_writes_in_flight, message.max_peer_bytes_in_flight = writes, min(nbytes, 2**32 - 1)
    return message


def limits_to_pb(limits: CallLimits) -> pb.CallLimits:
    """The bounds of a server's calls."""
    return pb.CallLimits(**{each.name: min(getattr(limits, each.name), 2**32 - 1) for each in fields(CallLimits)})


class ServerServicer(ServerServiceServicer):
    """Served by every process, on its event loop. ``draining()``: whether something else began to drain it."""

    def __init__(self, info: ServerInfo, drainable: Drainable, draining: Callable[[], bool] = lambda: False) -> None:
        self._info = info
        self._drainable = drainable
        self._draining_elsewhere = draining
        self._started = time.time()
        self._draining: asyncio.Task[tuple[bool, int]] | None = None

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: object) -> pb.GetServerInfoResponse:
        info = self._info
        response = pb.GetServerInfoResponse(
            version=info.version,
            services=info.services,
            limits=info.limits,
            draining=self._draining is not None or self._draining_elsewhere(),
            pid=os.getpid(),
        )
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
        if self._draining is None or self._draining.done():
            self._draining = background(self._drainable.drain(grace), "kvgrpc-drain")
        # Shielded: a caller that goes away does not undo what it began.
        drained, open_rooms = await asyncio.shield(self._draining)
        return pb.DrainResponse(drained=drained, open_rooms=open_rooms)
