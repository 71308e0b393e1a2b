"""PrefetchService of a cache that an engine keeps itself, beside whatever else the engine's process does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

import kvgrpc
from kvgrpc.errors import InvalidRequest, KvGrpcError, ServerDraining
from kvgrpc.model import RankRef, Role, new_epoch
from kvgrpc.net import advertised, replicas
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.served import ServedCache
from kvgrpc.prefetch.servicer import PrefetchServicer
from kvgrpc.pull.lending.lender import LentPages
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.registry.client.registration import Registration, newer_epoch
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import Admission
from kvgrpc.rpc.loop import LoopThread, background
from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES
from kvgrpc.server.cache.peer import CachePeer
from kvgrpc.server.check import check
from kvgrpc.server.closing import ClosingTime, opened_aside
from kvgrpc.server.config import RankConfig
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, limits_to_pb
from kvgrpc.server.port.listener import Listener
from kvgrpc.server.port.load import load_of
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.v1.prefetch_service_pb2_grpc import add_PrefetchServiceServicer_to_server
from kvgrpc.v1.pull_service_pb2_grpc import add_PullServiceServicer_to_server
from kvgrpc.v1.server_service_pb2 import ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server

Pulls = tuple[LentPages, PeersBackend]

_SERVICES = ("kvgrpc.v1.PrefetchService", "kvgrpc.v1.ServerService")
_PULLS = "kvgrpc.v1.PullService"
_STOP_SECONDS = 10.0
_AGAIN_SECONDS = 5.0
_GRACE_SECONDS = 0.5

logger = logging.getLogger(__name__)


class CacheServer:
    """A port with PrefetchService, and a row of role UNIFIED at the registry. ``close`` blocks.

    A registry that is away does not keep an engine from starting: the row comes when the registry does.
    """

    def __init__(self, config: RankConfig, rank: RankRef, cache: ServedCache | None, pulls: Pulls | None) -> None:
        """``cache``: None at a rank that takes no orders, since the leading one passes them on: it serves pulls
        alone."""
        self.config = config
        self.rank = rank
        self.cache = cache
        self.address = ""
        self._loop = LoopThread.shared()
        self._servicer = None if cache is None else PrefetchServicer(cache)
        served = _PULLS if cache is None else _SERVICES[0]
        self._listener = Listener({served: self._is_well}, Admission(config.call_limits))
        self._registration: Registration | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._registering: asyncio.Task[None] | None = None
        self._pulls = pulls
        self._peer: CachePeer | None = None
        # Told beside the engine's events, which another server of this process serves.
        self._load = load_of(rank.rank)
        if config.prefill_tokens_per_second:
            self._load.say(prefill_tokens_per_second=config.prefill_tokens_per_second)
        self._lines = RateLimited(logger)
        self._closing = False

    @property
    def registered(self) -> bool:
        return self._registration is not None and self._registration.state == "registered"

    def close(self, deadline: float = 2.0) -> bool:
        """Leaves the registry and stops; operations are the engine's to end. False where its memory may still be copied
        from or to: it is to stay then."""
        return self._loop.run(self._close(deadline), deadline + _STOP_SECONDS)

    async def drain(self, grace: float) -> tuple[bool, int]:
        """On the loop: leaves the registry and begins nothing new."""
        await self._listener.drain()
        await self._leave_registry()
        if self._servicer is not None:
            self._servicer.drain()
        if self._peer is not None:
            await self._peer.drain(grace)
        return self.cache is None or not self.cache.book.open(), 0

    async def undrain(self, end_drain: Callable[[], Awaitable[None]]) -> None:
        """Its row comes when the registry takes it, as at the start."""
        if self._closing:
            raise ServerDraining(f"the cache of {self.rank} is about to end")
        await end_drain()
        if not self._listener.draining:
            return
        if self._leaving is not None:
            await asyncio.shield(self._leaving)  # its Deregister would take the new row
        if self._servicer is not None:
            self._servicer.undrain()
        if self._peer is not None:
            self._peer.undrain_now()
        self._begin_to_register()
        self._listener.undrain()

    async def _open(self) -> None:
        config = self.config
        if self._pulls is not None and config.pull is not None:
            lends, backend = self._pulls
            mine = config, config.pull, self.rank, lends, backend, lambda: self._listener.draining, self._load
            self._peer = await opened_aside(CachePeer, *mine, close=CachePeer.close_now)
            await self._peer.open()
            if self.rank.rank.leads:
                self._load.add_pulls(self._peer.add_load)
        bound = await self._listener.start(
            self._add_servicers,
            (config.listen, *config.admin_listen),
            config.server_security,
            LARGEST_REQUEST_BYTES,
            config.advertise,
        )
        self.address = advertised(bound[0], config.advertise)
        logger.info(
            "kvgrpc: the cache of %s is served at %s, registry %s",
            self.rank,
            self.address,
            config.registry or "none",
        )
        self._begin_to_register()
        if config.registry and self._peer is not None:
            self._peer.follow(",".join(replicas(config.registry)))

    def _begin_to_register(self) -> None:
        if self.config.registry:
            self._registering = background(self._register(), "cache-registration")

    async def _register(self) -> None:
        """Until the registry has the row; a refusal that would be repeated is only said again."""
        counts_on = False
        while True:
            row = self._row()
            registration = Registration(self._channel, ",".join(replicas(self.config.registry)), [row])
            try:
                await registration.start(self.config.start_timeout)
            except KvGrpcError as error:
                self._lines.warning("registry", f"{row.ref} is not registered: {one_line(str(error))}")
                epoch = newer_epoch(error)
                if epoch is not None:  # our clock is behind an earlier incarnation's
                    self._begin_as(RankRef(row.ref.rank, epoch + 1))
                if epoch is None or counts_on:
                    await asyncio.sleep(_AGAIN_SECONDS)
                counts_on = epoch is not None
            else:
                self._registration = registration
                return

    def _begin_as(self, rank: RankRef) -> None:
        self.rank = rank
        if self.cache is not None:
            self.cache.rank = rank

    def _is_well(self) -> bool:
        if self.cache is None:
            return self._peer is not None and self._peer.healthy
        return self.cache.healthy

    def _row(self) -> RankRow:
        config = self.config
        lends = self._peer is not None and self._pulls is not None and self._pulls[0].fills
        endpoints = Endpoints(self.address, cache=self._peer.address if self._peer is not None and lends else "")
        return RankRow(self.rank, Role.UNIFIED, endpoints, config.layout, model=config.model)

    def _channel(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self.config.client_security, own_connection=True)

    async def _leave_registry(self) -> None:
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait([self._registering])
        registration, self._registration = self._registration, None
        if registration is not None:
            self._leaving = background(registration.close(), "cache-leaves-registry")
        if self._leaving is not None:
            await asyncio.shield(self._leaving)  # an Undrain cancels the drain

    async def _close(self, deadline: float) -> bool:
        self._closing, copied = True, True
        await self.drain(0.0)
        if self._peer is not None:
            if self.rank.rank.leads:
                self._load.add_pulls(None)
            copied = await self._peer.close(ClosingTime(deadline))
        await self._listener.stop(min(_GRACE_SECONDS, deadline), deadline)
        if self._servicer is not None:
            self._servicer.close()
        return copied

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        names: tuple[str, ...] = _SERVICES if self._servicer is not None else _SERVICES[1:]
        if self._servicer is not None:
            add_PrefetchServiceServicer_to_server(self._servicer, server)
        if self._peer is not None:
            add_PullServiceServicer_to_server(self._peer.servicer, server)
            names = (*names, _PULLS)
        limits = ServerLimits(calls=limits_to_pb(self.config.call_limits))
        info = ServerInfo(
            version=kvgrpc.__version__,
            services=names,
            rank=self.rank,
            role=Role.UNIFIED,
            limits=limits,
            security=self.config.server_security,
        )
        callers = CallersHere(self._listener.admission)
        add_ServerServiceServicer_to_server(
            ServerServicer(info, self, lambda: self._listener.draining, callers), server
        )
        return names


def open_cache(
    config: RankConfig, make: Callable[[RankRef], ServedCache] | None, pulls: Pulls | None = None
) -> CacheServer:
    """Serves the cache that ``make`` gives for the name and incarnation of this engine; blocks until the port is bound.

    ``config`` has the role UNIFIED and no pools. ``make``: None at a rank that is given orders by way of the
    leading one: it lends and takes pages. ``pulls``, where ``config`` has a ``pull``: the pages that are lent to other
    engines, and the storage backend by which the engine asks for theirs. Raises InvalidRequest, AddressNotAllowed, and
    FeatureDisabled for a data plane that is not there. For the process that has the cache: what a fork inherits refuses
    to work.
    """
    if config.role is not Role.UNIFIED or config.registry == "embedded":
        given = config.role.name if config.role is not Role.UNIFIED else "registry embedded"
        raise InvalidRequest.of("role", given, "Role.UNIFIED, with the address of a registry or none")
    check(config)
    rank = RankRef(config.rank, new_epoch())
    server = CacheServer(config, rank, None if make is None else make(rank), pulls)
    try:
        LoopThread.shared().run(server._open(), config.start_timeout)
    except BaseException:
        server.close()
        raise
    return server


__all__ = ["CacheServer", "open_cache"]
