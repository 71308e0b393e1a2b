"""Follows engines at registries, for whoever waits for one of them to change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import grpc

from kvgrpc.errors import KvGrpcError, PeerUnreachable
from kvgrpc.model import Role
from kvgrpc.observability.logging import one_line
from kvgrpc.registry.calls import domain_errors, pause_before, unreachable
from kvgrpc.rpc.dialing.channels import ChannelPool
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.within import within
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

# A registry says something each 5 s.
IDLE_TIMEOUT_SECONDS = 15.0
# A stream that nobody waits on any more.
LINGER_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0

_log = logging.getLogger(__name__)


class _Followed(NamedTuple):
    address: str
    engine: str
    role: Role


class Following:
    """One stream (WatchEngines) for all who follow the same engine at the same registry. Belongs to one event loop."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._channels = ChannelPool(open_channel)
        self._streams: dict[_Followed, _Stream] = {}
        # Of all streams: one that begins again goes on behind every number that its engine's waiters know.
        self._newest = 0

    async def change(self, address: str, engine: str, role: Role, since: int, timeout: float) -> int:
        """The number of the newest change of the engine, once it is above ``since``, or after ``timeout`` seconds.

        ``since``: what an earlier call returned, 0 at first. Numbers never go back, and some are left out; a full state
        counts as a change, also that of a stream that begins again. ``engine`` empty: any of the role. Never raises for
        a registry that is away: then nothing changes.
        """
        followed = _Followed(address, engine, role)
        stream = self._streams.get(followed)
        if stream is None:
            stream = self._streams[followed] = _Stream(self._newest)
            stream.task = background(self._follow_stream(followed, stream), f"follow {engine} at {address}")
        return await stream.change(since, timeout)

    async def close(self) -> None:
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._channels.close()

    async def _follow_stream(self, followed: _Followed, stream: _Stream) -> None:
        attempt, loop = 0, asyncio.get_running_loop()
        try:
            while stream.wanted:
                began = loop.time()
                try:
                    with domain_errors(followed.address):
                        await self._read(followed, stream)
                except KvGrpcError as error:
                    if loop.time() - began > LONGEST_PAUSE_SECONDS:  # it stood: whoever ended it does not always
                        attempt = 0
                    name, why = followed.engine or followed.role.name, one_line(str(error))
                    _log.info("following %s at %s: %s", name, followed.address, why)
                    if isinstance(error, PeerUnreachable) and not self._is_read(followed.address):
                        self._channels.redial(followed.address)
                    await asyncio.sleep(pause_before(attempt, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, error))
                    attempt += 1
        finally:
            del self._streams[followed]
            stream.end()
        if not self._is_read(followed.address):
            self._channels.hang_up(followed.address)

    def _is_read(self, address: str) -> bool:
        """True if another stream goes over the same channel: it would end, and miss what changes meanwhile."""
        return any(stream.reads for followed, stream in self._streams.items() if followed.address == address)

    async def _read(self, followed: _Followed, stream: _Stream) -> None:
        """Until nobody wants it any more. Raises PeerUnreachable where the stream ends."""
        request = pb.WatchEnginesRequest(
            engine=followed.engine, role=common_pb2.Role.ValueType(followed.role), without_pools=True
        )
        call = RegistryServiceStub(self._channels.get(followed.address)).WatchEngines(request)
        stream.reads = True
        try:
            while stream.wanted:
                message = await within(IDLE_TIMEOUT_SECONDS, call.read())
                if not isinstance(message, pb.WatchEnginesResponse):
                    # A registry never ends one by itself: whoever does is not to be asked again without a pause.
                    raise unreachable(followed.address, "it ended the stream")
                if message.changes or message.state_complete:
                    self._newest += 1
                    stream.changed(self._newest)
        finally:
            stream.reads = False
            call.cancel()


class _Stream:
    """The number of an engine's newest change, and who waits for the next one. ``reads``: it has a call open."""

    def __init__(self, number: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self.reads = False
        self._loop = asyncio.get_running_loop()
        self._number = number
        self._news: asyncio.Future[None] = self._loop.create_future()
        self._waiting = 0
        self._wanted_until = 0.0

    @property
    def wanted(self) -> bool:
        return self._waiting > 0 or self._loop.time() < self._wanted_until

    async def change(self, since: int, timeout: float) -> int:
        self._waiting += 1
        try:
            if self._number <= since:
                await asyncio.wait([self._news], timeout=timeout)
        finally:
            self._waiting -= 1
            self._wanted_until = self._loop.time() + LINGER_SECONDS
        return self._number

    def changed(self, number: int) -> None:
        self._number = number
        self.end()

    def end(self) -> None:
        news, self._news = self._news, self._loop.create_future()
        news.set_result(None)
