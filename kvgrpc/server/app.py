"""The only wiring: opens a rank or a registry out of the capabilities, and closes it in the right order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

import grpc

import kvgrpc
from kvgrpc.dataplane.base import DataPlane, DialledByPeers
from kvgrpc.errors import CredentialsInvalid, EngineNotFound, InvalidRequest, ServerDraining, StaleEpoch
from kvgrpc.events import EventPublisher, NullEventPublisher
from kvgrpc.events.base import SHUTDOWN_SECONDS
from kvgrpc.events.servicer import EventServicer
from kvgrpc.model import RankId, RankRef, Role, new_epoch
from kvgrpc.net import AddressPolicy, advertised, parse_bootstrap_addr, replicas
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.served import ServedCache
from kvgrpc.prefetch.servicer import PrefetchServicer
from kvgrpc.pull.peers import PeersBackend
from kvgrpc.registry.client.following import Following
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.client.resolver import Resolver
from kvgrpc.registry.model import Endpoints, RankRow, RankSelector
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.memory import MemoryStore
from kvgrpc.rpc.channel import open_channel
from kvgrpc.rpc.interceptors import Admission
from kvgrpc.rpc.loop import LoopThread, background
from kvgrpc.rpc.within import check_seconds, within
from kvgrpc.server.cache_peer import CachePeer, lent_of
from kvgrpc.server.callers import CallersHere
from kvgrpc.server.check import check
from kvgrpc.server.closing import ClosingTime, aside, close_at_exit, forget
from kvgrpc.server.config import RankConfig
from kvgrpc.server.description import ServerInfo, limits_to_pb, rank_limits, settings_in_force
from kvgrpc.server.listener import Check, Listener
from kvgrpc.server.load import RankLoad
from kvgrpc.server.opening import cache_of, dialled_endpoint, peers_of, plane_of, publisher_of, watch_limit
from kvgrpc.server.servicer import ServerServicer
from kvgrpc.server.status import RankStatus
from kvgrpc.transfer.layout.topology import layers_of_pools, stages_of
from kvgrpc.transfer.protocol.types import Target
from kvgrpc.transfer.runtime.boundary import DecodeRuntime, PrefillRuntime, Runtime, prefill_of
from kvgrpc.transfer.runtime.decode_manager import DecodeManager
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from kvgrpc.transfer.runtime.manager import TransferConfig
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.transfer.runtime.resolve import PrefillEngine
from kvgrpc.transfer.servicer import TransferServicer
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from kvgrpc.v1.prefetch_service_pb2_grpc import add_PrefetchServiceServicer_to_server
from kvgrpc.v1.pull_service_pb2_grpc import add_PullServiceServicer_to_server
from kvgrpc.v1.server_service_pb2 import ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server
from kvgrpc.v1.transfer_service_pb2_grpc import add_TransferServiceServicer_to_server

logger = logging.getLogger(__name__)

_EPOCH_TRIES = 3
_STOP_GRACE_SECONDS = 1.0
# The largest requests of a rank are frames: one entry may take a little more than the sender counted.
_BESIDES_A_FRAME_BYTES = 64 * 1024
# For the writes of rooms that a drain cancelled: their pages come back after the settle time of 2 s.
_CANCELLED_WRITES_SECONDS = 5.0
# For a registry to take the row of a rank that drains no more.
_UNDRAIN_SECONDS = 10.0
_ABANDON_SECONDS = 4.0
_DROPPED_SECONDS = 10.0
# For a registry to name the successor of a rank that is dead; it may have died with it.
_AT_ONCE_SECONDS = 1.0
# A stop that takes longer is the library's fault, and is left behind.
_LEAST_STOP_SECONDS = 0.5
# How much later than its own end a close may be before the loop is taken for stuck.
_STUCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Closed:
    """What ``Rank.close`` found.

    ``drained``: nothing was left. ``open_rooms`` had not ended. ``held_pages``: nobody may reuse them until the process
    ends. ``listening``: a write may be left, so the address stays bound and answers SERVER_DRAINING (a refused dial
    would prove the opposite), until a later ``close`` finds none or the process ends.
    """

    drained: bool
    open_rooms: int
    held_pages: int
    listening: bool = False


Transfer = TypeVar("Transfer", bound=Runtime)


class Rank(Generic[Transfer]):
    """One opened rank, a context manager that closes it: ``with open_prefill(...)``; ``async with`` closes it beside
    the caller's loop. One that is dropped is closed at once, and one that is open yet at the end of the process then,
    both with a ResourceWarning.

    ``transfer`` (what senders or receivers are made of), ``events``, ``prefetch`` (None where the configuration has
    none), ``load`` (what the engine has to do, for plans) and the properties are for engine threads; ``close`` blocks.
    """

    transfer: Transfer

    def __init__(self, config: RankConfig, ref: RankRef, plane: DataPlane, loop: LoopThread) -> None:
        self.config = config
        self.ref = ref
        self.plane = plane
        self.address = ""
        self.events: EventPublisher = NullEventPublisher(ref.rank.dp)
        self.load = RankLoad()
        self._loop = loop
        self._registry = RegistryServicer(MemoryStore(ttl=config.lease_ttl)) if config.registry == "embedded" else None
        self._resolver = Resolver(self._channel_to_a_registry)
        self._following = Following(self._channel_to_a_registry)
        self._policy = AddressPolicy(config.bootstrap_allow, _configured(config.registry))
        self._registration: Registration | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._bound = ""
        self._listener: Listener | None = None
        self._event_servicer: EventServicer | None = None
        self.prefetch: PrefetchManager | None = None
        self._served: ServedCache | None = None
        self._prefetch_servicer: PrefetchServicer | None = None
        self._peers: PeersBackend | None = None
        self._cache_peer: CachePeer | None = None
        self._superseded_by: int | None = None
        self._closed: Closed | None = None
        self._closing_task: asyncio.Task[Closed] | None = None
        held_pages = min(config.bounds.held_pages, _quarter_of_the_pool(config))
        self._bounds = replace(config.bounds, held_pages=held_pages)
        transfer = TransferConfig(
            ref,
            config.layout,
            config.pools,
            config.aux,
            config.session_timing,
            self._bounds,
            config.max_frame_bytes,
            model=config.model,
            refusal_proves_death=config.refusal_proves_death,
            verify=config.verify,
            check_pages=config.check_pages,
            gather_bytes=config.gather_bytes,
            tracing=config.tracing,
            poll_gives_way=config.poll_gives_way,
            tls=config.client_security.tls,
        )
        manager: Runtime
        if config.role is Role.PREFILL:
            manager = PrefillManager(transfer, plane, loop)
        else:
            manager = DecodeManager(transfer, plane, loop, self._resolve, self._session_channel, self._changes)
        self.transfer = cast(Transfer, manager)
        self._status = RankStatus(config.metrics_listen, loop, self.transfer, lambda: self.registration_state)
        self._closing = False
        self._owns_plane = plane is not config.data_plane

    def __enter__(self) -> Rank[Transfer]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Rank[Transfer]:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        state = "closed" if self._closed is not None else "healthy" if self.healthy else "not healthy"
        return f"<Rank {self.ref} {self.config.role.name.lower()} at {self.address} over {self.plane.name}: {state}>"

    @property
    def registration_state(self) -> str:
        """ "registered", "retrying", "superseded"; "none" without a registry."""
        return "none" if self._registration is None else self._registration.state

    @property
    def healthy(self) -> bool:
        """All of its threads and tasks run, and no newer incarnation took its place."""
        return self._closed is None and all(check() is True for check in self._health_checks().values())

    @property
    def metrics_address(self) -> str:
        """Where ``/metrics``, ``/livez`` and ``/readyz`` are, "host:port"; empty without ``metrics_listen``."""
        return self._status.address

    def close(self, deadline: float = 10.0) -> Closed:
        """Drains and closes: leaves the registry, ends its rooms, keeps its port until no write is left, then stops.

        Blocks for about ``deadline`` seconds at most; repeating it is harmless, and looks again where a write may have
        been left. Pages that are still held then are reported: the engine must not free that memory while the process
        lives. A data plane that the caller opened stays open, with the memory that it gave: the caller may open another
        rank on it, and closes it in the end. Where a write of it may be left (``Closed.listening``), peers get their
        pages back once the caller has closed the plane and then the rank again. Raises InvalidRequest for a deadline
        that never comes.
        """
        check_seconds("deadline", max(deadline, 0.0))
        closed = self._closed
        if closed is None or closed.listening:
            closed = self._loop.run(self._close_once(ClosingTime(deadline)), deadline + _STUCK_SECONDS)
        return closed

    async def drain(self, grace: float) -> tuple[bool, int]:
        """On the loop: refuses new work, waits ``grace`` seconds for what runs, and 5 s for the writes of the rest."""
        return await self._drain(grace, grace + _CANCELLED_WRITES_SECONDS)

    async def undrain(self) -> None:
        """On the loop: takes new work and registers again, as the same incarnation; health says so in the end."""
        if self._closing:
            raise ServerDraining(f"{self.ref} is about to end")
        if self._listener is None or not self._listener.draining:
            return
        if self._superseded_by is not None:
            raise StaleEpoch(
                f"incarnation {self._superseded_by} took the place of {self.ref}: open it anew",
                metadata={
                    "rank": self.ref.rank,
                    "requestEpoch": self.ref.epoch,
                    "currentEpoch": self._superseded_by,
                },
            )
        await self._serve_again()
        try:
            await self._register(min(self.config.start_timeout, _UNDRAIN_SECONDS))
            if self._closing:
                raise ServerDraining(f"{self.ref} is about to end")
        except BaseException:
            await self._drain(0.0, _CANCELLED_WRITES_SECONDS)
            raise
        self._listener.undrain()
        logger.info("%s drains no more", self.ref)

    async def _serve_again(self) -> None:
        if self._leaving is not None:  # else it would take the new row away
            await asyncio.wait([self._leaving])
        self.transfer.undrain()
        if self._event_servicer is not None:
            self._event_servicer.undrain()
        if self._prefetch_servicer is not None:
            self._prefetch_servicer.undrain()
        if self._cache_peer is not None:
            await self._cache_peer.undrain()

    async def _open(self, deadline: float) -> None:
        config = self.config
        self.events = await asyncio.to_thread(publisher_of, config, self.ref)
        self._peers = await asyncio.to_thread(peers_of, config)
        self.prefetch = await asyncio.to_thread(cache_of, config, self.ref, self.events, self._peers)
        self._served = self.prefetch if config.cache is None else config.cache(self.ref)
        self.transfer.start()
        if self.prefetch is not None and self._peers is not None and config.pull is not None:
            self._cache_peer = await asyncio.to_thread(
                CachePeer, config, config.pull, self.ref, lent_of(self.prefetch), self._peers
            )
            await self._cache_peer.open()
            self.load.add_pulls(self._cache_peer.add_load)
        if self._registry is not None:
            await self._registry.start()
        self._listener = Listener(self._health_checks(), Admission(config.call_limits))
        bound = await self._listener.start(
            self._add_servicers,
            (config.listen, *config.admin_listen),
            config.server_security,
            config.max_frame_bytes + _BESIDES_A_FRAME_BYTES,
            config.advertise,
            config.session_pings,
        )
        self.address = advertised(bound[0], config.advertise)
        self._status.open(self._live, self._ready)
        self._bound = bound[0]
        await self._register(deadline)
        if config.registry and self._cache_peer is not None:
            own = config.registry == "embedded"
            self._cache_peer.follow(self.address if own else ",".join(replicas(config.registry)))
        self._join_replica()
        self._say_where_it_is()

    async def _register(self, deadline: float) -> None:
        """Where there is a registry."""
        if self.config.registry:
            embedded = self.config.registry == "embedded"
            registry = self._bound if embedded else ",".join(replicas(self.config.registry))
            channel = self._channel_to_ourselves if embedded else self._own_channel
            self._registration = Registration(channel, registry, [self._row()], on_superseded=self._on_superseded)
            await self._registration.start(deadline)

    def _join_replica(self) -> None:
        """Ranks of one replica agree on what they prefetch; the one with pp = cp = tp = 0 leads."""
        if self.prefetch is not None:
            self.prefetch.connect(self._find_cache_leader, self._own_channel, self._loop.spawn)

    async def _find_cache_leader(self) -> str:
        config = self.config
        assert config.prefetch is not None and self.prefetch is not None
        if config.prefetch.leader:
            return config.prefetch.leader
        if not config.registry:
            raise EngineNotFound(
                "a replica of several ranks needs prefetch.leader, or a registry to find it",
                metadata={"engine": config.engine, "role": config.role.name, "missingRanks": ""},
            )
        if config.registry == "embedded":
            registry = self.address
        elif self._registration is not None:
            registry = self._registration.address  # of several replicas the one that answered last
        else:
            registry = replicas(config.registry)[0]
        target = parse_bootstrap_addr(registry).target
        engine = await self._resolver.resolve(
            target, config.engine, config.role, [RankSelector(pp=0, tp=0)], config.resolve_timeout
        )
        own = self.ref.rank
        leader = next((row for row in engine.rows if row.ref.rank == RankId(own.engine, own.dp)), None)
        if leader is None:
            raise EngineNotFound(
                f"the registry has no rank pp0/cp0/tp0 of {own.engine}/dp{own.dp}",
                metadata={"engine": config.engine, "role": config.role.name, "missingRanks": str(own)},
            )
        self.prefetch.leader_address = leader.endpoints.grpc
        return leader.endpoints.grpc

    def _say_where_it_is(self) -> None:
        """Decode ranks of some engines register nowhere: this line is how they are found."""
        logger.info(
            "kvgrpc: %s rank %s listens on %s, registry %s, data plane %s, metrics %s",
            self.config.role.name.lower(),
            self.ref,
            self.address,
            self.config.registry or "none",
            self.plane.name,
            self.metrics_address or "none",
        )

    async def _drain(self, grace: float, seconds: float) -> tuple[bool, int]:
        time = ClosingTime(seconds)
        logger.info("%s drains: %d rooms are open, and have %.1f s", self.ref, self.transfer.open_rooms(), grace)
        if self._listener is not None:
            await self._listener.drain()
        if self._registration is not None:
            self._leaving = background(self._registration.close(), "registration-close")
            self._registration = None
            await asyncio.wait([self._leaving], timeout=time.left())
        left = time.left()
        try:
            drained, open_rooms = await within(left, self.transfer.drain(min(grace, left * 0.8)))
        except asyncio.TimeoutError:
            drained, open_rooms = False, self.transfer.open_rooms()
        if self._event_servicer is not None:
            self._event_servicer.drain()
        if self._prefetch_servicer is not None:
            self._prefetch_servicer.drain()
        if self._cache_peer is not None:
            await self._cache_peer.drain(time.left(0.1))
        left_over = "nothing is left" if drained else f"{open_rooms} rooms and {self.transfer.held_pages} held pages"
        logger.log(logging.INFO if drained else logging.WARNING, "%s drained: %s", self.ref, left_over)
        return drained, open_rooms

    def _close_at_exit(self, seconds: float) -> concurrent.futures.Future[Closed]:
        return self._loop.spawn(self._close_once(ClosingTime(seconds)), "close at exit")

    async def _close_once(self, time: ClosingTime) -> Closed:
        """A second caller, a signal handler perhaps that came in the middle, waits for the close that runs."""
        if self._closing_task is None:
            before = self._closed
            step = self._close(time) if before is None else self._close_again(before, time)
            self._closing_task = asyncio.create_task(step, name="rank-close")
        task = self._closing_task
        try:
            self._closed = await asyncio.shield(task)
            if not self._closed.listening:
                forget(self)
        finally:
            if task.done() and self._closing_task is task:
                self._closing_task = None
        return self._closed

    async def _close(self, time: ClosingTime) -> Closed:
        drained, open_rooms, lent = False, 0, False
        self._closing = True
        try:
            drained, open_rooms = await self._drain(time.seconds * 0.5, time.seconds * 0.8)
        finally:
            await aside(self.events.shutdown, min(SHUTDOWN_SECONDS, time.left(0.85)))
            lent = await self._close_cache(time.left(0.85))
            prefill = prefill_of(self.transfer)
            if prefill is None:
                await self.transfer.stop()
            written = await self._end_writes(time)
            if prefill is not None:
                # After its data plane: its sessions still say which writes are over for certain.
                if written and (self._owns_plane or GuardedPlane(self.plane).closed):
                    prefill.on_plane_closed()
                await prefill.stop()
            if self._listener is not None:
                await self._listener.refuse()
            await self._let_go(written, time)
        written = written and lent
        return Closed(drained and written, open_rooms, self.transfer.held_pages, listening=not written)

    async def _close_again(self, before: Closed, time: ClosingTime) -> Closed:
        lent = await self._end_lending(time.left(0.5))
        written = await self._end_writes(time)
        await self._let_go(written, time)
        return replace(before, listening=not (written and lent))

    async def _end_lending(self, seconds: float) -> bool:
        return self._cache_peer is None or await self._cache_peer.close(ClosingTime(seconds))

    async def _close_cache(self, seconds: float) -> bool:
        """False where a page that is lent or taken may still be written; the cache itself says in the log what is left
        of it."""
        if self._prefetch_servicer is not None:
            self._prefetch_servicer.close()
        lent = await self._end_lending(seconds * 0.5)
        if self.prefetch is not None and not await aside(self.prefetch.close, seconds):
            logger.error("%s: a page of the cache may still move, so its memory stays; end the process", self.ref)
        elif self._peers is not None:
            await aside(self._peers.close, seconds)
        return lent

    async def _end_writes(self, time: ClosingTime) -> bool:
        """False where a write may be left. Who opened the data plane closes it: memory that it gave is theirs."""
        ended = await self._end_worker(time.left(0.9))
        if not self._owns_plane:
            if ended and GuardedPlane(self.plane).closed:
                return True
            prefill = prefill_of(self.transfer)
            return ended and not (prefill is not None and prefill.has_unknown_writes)
        closed = await aside(GuardedPlane(self.plane).close, time.left())
        # A thread that waited for the plane ends with it.
        return closed and (ended or await self._end_worker(time.left()))

    async def _end_worker(self, seconds: float) -> bool:
        prefill = prefill_of(self.transfer)
        return prefill is None or await aside(prefill.close_worker, seconds)

    async def _let_go(self, written: bool, time: ClosingTime) -> None:
        """Keeps the address bound until every write has ended: a refused dial tells a peer that nobody writes any more
        (rule 4, proof of death)."""
        if not written:
            logger.error("%s: a write may be left, so %s stays bound; end the process", self.ref, self.address)
        else:
            await aside(self._status.close)
            if self._listener is not None:
                await self._listener.stop(min(_STOP_GRACE_SECONDS, time.left()), time.left() + _LEAST_STOP_SECONDS)
        if self._registry is not None:
            await self._registry.close()
        await self._following.close()
        await self._resolver.close()

    async def _abandon(self) -> None:
        """Undoes an opening that failed, except the data plane, which the next try uses."""
        time = ClosingTime(_ABANDON_SECONDS)
        if self._registration is not None:
            await self._registration.close()
        await self.transfer.stop()
        if self._listener is not None:
            await self._listener.refuse()
        await aside(self.events.shutdown)
        await self._close_cache(time.left(0.5))
        await self._let_go(await self._end_worker(time.left(0.5)), time)

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        add_TransferServiceServicer_to_server(TransferServicer(self.transfer), server)
        stream = self.events.stream
        self._event_servicer = EventServicer(
            [] if stream is None else [stream], max_watches=watch_limit(self.config), load=self.load.now
        )
        add_EventServiceServicer_to_server(self._event_servicer, server)
        names = ["kvgrpc.v1.TransferService", "kvgrpc.v1.EventService", "kvgrpc.v1.ServerService"]
        if self._served is not None:
            self._prefetch_servicer = PrefetchServicer(self._served)
            add_PrefetchServiceServicer_to_server(self._prefetch_servicer, server)
            names.append("kvgrpc.v1.PrefetchService")
        if self._cache_peer is not None:
            add_PullServiceServicer_to_server(self._cache_peer.servicer, server)
            names.append("kvgrpc.v1.PullService")
        if self._registry is not None:
            add_registry_to_server(self._registry, server)
            names.append("kvgrpc.v1.RegistryService")
        info = ServerInfo(
            version=kvgrpc.__version__,
            services=tuple(names),
            rank=self.ref,
            role=self.config.role,
            limits=ServerLimits(
                calls=limits_to_pb(self.config.call_limits),
                rank=rank_limits(self.config.max_frame_bytes, self._bounds, self.plane),
                registry=None if self._registry is None else self._registry.limits,
            ),
            security=self.config.server_security,
            settings=settings_in_force(self.config),
            data_plane_endpoints=self.plane.endpoints if isinstance(self.plane, DialledByPeers) else (),
            registration=lambda: self._registration,
        )

        def draining() -> bool:
            return self._listener is not None and self._listener.draining

        add_ServerServiceServicer_to_server(ServerServicer(info, self, draining, self._callers()), server)
        return names

    def _callers(self) -> CallersHere:
        assert self._listener is not None and self._event_servicer is not None  # it is the listener's start that asks
        if self._registry is None:
            return CallersHere(self._listener.admission, [self._event_servicer.readers])
        readers = [self._event_servicer.readers, self._registry.readers]
        return CallersHere(self._listener.admission, readers, self._registry.store.rows_by_owner)

    def _row(self) -> RankRow:
        config = self.config
        stream = self.events.stream
        return RankRow(
            self.ref,
            config.role,
            Endpoints(
                self.address,
                "" if stream is None else dialled_endpoint(stream.state().pub_endpoint, self.address),
                "" if self._cache_peer is None else self._cache_peer.address,
            ),
            config.layout,
            tuple(pool.without_addresses() for pool in config.pools),
            self.plane.name,
            config.engine_selects_dp,
            config.model,
            stream is not None,
        )

    def _unless_superseded(self, healthy: bool) -> bool | str:
        epoch = self._superseded_by
        return healthy if epoch is None else f"incarnation {epoch} took its place"

    def _health_checks(self) -> Mapping[str, Check]:
        """Returns what each service stands on: its threads and tasks, not only the port."""
        checks: dict[str, Check] = {
            "kvgrpc.v1.TransferService": lambda: self._unless_superseded(self.transfer.healthy),
            "kvgrpc.v1.EventService": lambda: self._unless_superseded(self.events.healthy),
            "kvgrpc.v1.ServerService": lambda: self._loop.trouble or True,
        }
        if self._served is not None:
            served = self._served
            checks["kvgrpc.v1.PrefetchService"] = lambda: served.healthy
        if self._cache_peer is not None:
            peer = self._cache_peer
            checks["kvgrpc.v1.PullService"] = lambda: peer.healthy
        if self._registry is not None:
            registry = self._registry
            checks["kvgrpc.v1.RegistryService"] = lambda: registry.healthy
        return checks

    def _live(self) -> Mapping[str, bool]:
        """Returns what a restart would mend. Neither a drain nor a newer incarnation is."""
        return {
            "loop": self._loop.healthy,
            "transfer": self._closing or self.transfer.healthy,
            "events": self._closing or self._superseded_by is not None or self.events.healthy,
        }

    def _ready(self) -> Mapping[str, bool]:
        return {"loop": self._loop.healthy, **(self._listener.serving() if self._listener is not None else {})}

    def _on_superseded(self, epoch: int) -> None:
        logger.error("%s was replaced by incarnation %d: close this rank", self.ref, epoch)
        self._superseded_by = epoch
        # At once: two streams of one cache would be two truths.
        self.events.fence()

    async def _resolve(self, bootstrap_addr: str, decode: RankId, at_once: bool = False) -> PrefillEngine:
        """The registry behind a request's address, if this rank may dial it (contract section 4)."""
        address = parse_bootstrap_addr(bootstrap_addr)
        self._policy.check(address)
        resolve = partial(self._resolver.resolve, address.target, address.engine, Role.PREFILL, wait_ready=not at_once)
        timeout = min(_AT_ONCE_SECONDS, self.config.resolve_timeout) if at_once else self.config.resolve_timeout
        try:
            engine = await resolve([RankSelector(pp=decode.pp)], timeout)
        except CredentialsInvalid as error:
            if self._trusts(address.target):
                raise
            raise CredentialsInvalid(
                f"{error.message}; nothing was sent, because only a request named {address.target}: list its host in "
                "bootstrap_allow (KVGRPC_BOOTSTRAP_ALLOW) if it is to be trusted",
                metadata=error.metadata,
            ) from None
        mine, theirs = self.config.layout.pp, engine.layout.pp
        if mine != theirs and not (mine % theirs and theirs % mine):
            stages = stages_of(decode.pp, mine, theirs)
            selectors = [RankSelector(pp=pp) for pp in stages]
            engine = await resolve(selectors, timeout, with_pools=True)
        targets = {
            row.ref.rank[1:]: Target(
                row.ref, row.endpoints.grpc, engine.layout, layers_of_pools(row.pools) if row.pools else None
            )
            for row in engine.rows
        }
        engine_selects_dp = any(row.engine_selects_dp for row in engine.rows)
        return PrefillEngine(engine.name, engine.layout, targets, engine_selects_dp)

    async def _changes(self, bootstrap_addr: str, since: int, timeout: float) -> int:
        """Changes of the prefill engine behind a request's address, which ``_resolve`` was allowed to dial."""
        address = parse_bootstrap_addr(bootstrap_addr)
        return await self._following.change(address.target, address.engine, Role.PREFILL, since, timeout)

    def _own_channel(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self.config.client_security, own_connection=True)

    def _channel_to_ourselves(self, address: str) -> grpc.aio.Channel:
        """It may be a wildcard, which is nobody's name."""
        security = replace(self.config.client_security, audience=self.address)
        return open_channel(address, security, own_connection=True)

    def _channel_to_a_registry(self, address: str) -> grpc.aio.Channel:
        """Nothing that a secret made goes where only a request said to go."""
        security = self.config.client_security
        if not self._trusts(address):
            security = replace(security, token="", token_file="")
        return open_channel(address, security, own_connection=True)

    def _trusts(self, registry: str) -> bool:
        return registry == self.address or self._policy.trusts(registry)

    def _session_channel(self, address: str) -> grpc.aio.Channel:
        """To a rank, which bears quicker pings than a registry does."""
        return open_channel(address, self.config.client_security, own_connection=True, pings=self.config.session_pings)


class _Handed(Rank[Transfer]):
    """What an engine has of a rank. All of the rank's is here, and the rank itself, which its loop holds, knows nothing
    of this: so it goes when the engine lets it go."""

    __slots__ = ("_process", "_rank")

    def __init__(self, rank: Rank[Transfer]) -> None:
        self.__dict__ = rank.__dict__
        self._rank, self._process = rank, os.getpid()

    async def _close_once(self, time: ClosingTime) -> Closed:
        return await self._rank._close_once(time)

    def __del__(self) -> None:
        # Wherever the garbage collector runs, under any lock: so it appends for the loop, and takes no lock itself.
        if self._closing or sys.is_finalizing() or os.getpid() != self._process:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nothing can be closed any more
            self._loop.spawn(_close_dropped(self._rank), "close of a dropped rank")
        # Last: where warnings are errors it raises.
        text = f"rank {self.ref} was dropped, and not closed"
        warnings.warn(text, ResourceWarning, source=self, stacklevel=2)


async def _close_dropped(rank: Rank[Any]) -> None:
    logger.warning("%s was dropped, and is closed: keep what open_rank returns for as long as it serves", rank.ref)
    await rank._close_once(ClosingTime(_DROPPED_SECONDS))


def open_prefill(config: RankConfig) -> Rank[PrefillRuntime]:
    """``open_rank`` of a prefill rank: ``KVSender(rank.transfer, …)`` type-checks. Another role is InvalidRequest."""
    return _open(config, Role.PREFILL)


def open_decode(config: RankConfig) -> Rank[DecodeRuntime]:
    """``open_rank`` of a decode rank: ``KVReceiver(rank.transfer, …)`` type-checks. Another role is InvalidRequest."""
    return _open(config, Role.DECODE)


def open_rank(config: RankConfig) -> Rank[Any]:
    """Opens a rank: memory is registered, the port is bound, the row is READY at the registry. Blocks until then.

    Raises InvalidRequest (which names the field, its value and the rule) and AddressNotAllowed before anything is
    opened; FeatureDisabled (a data plane that cannot load, with the remedy),
    RegistrationShapeConflict, PeerUnreachable (no registry within ``start_timeout``), AddressNotAllowed (a taken port,
    plaintext that others reach).
    Call it in the process that will use it: what a fork inherits refuses to work.
    """
    return _open(config, None)


def _open(config: RankConfig, role: Role | None) -> Rank[Any]:
    check(config)
    if config.role is Role.UNIFIED:
        raise InvalidRequest.of("role", config.role.name, "Role.PREFILL or Role.DECODE; a cache opens with open_cache")
    if role is not None and config.role is not role:
        raise InvalidRequest.of("role", config.role.name, f"Role.{role.name}, or open the rank with open_rank")
    loop = LoopThread.shared()
    if config.switch_interval:
        sys.setswitchinterval(config.switch_interval)
    plane = plane_of(config)
    try:
        return _open_on(plane, config, loop)
    except BaseException:
        if plane is not config.data_plane:
            plane.close(1.0)
        raise


def _open_on(plane: DataPlane, config: RankConfig, loop: LoopThread) -> Rank[Any]:
    epoch, tries = new_epoch(), 0
    while True:
        rank: Rank[Any] = Rank(config, RankRef(config.rank, epoch), plane, loop)
        try:
            loop.run(rank._open(config.start_timeout), config.start_timeout + 5.0)
        except BaseException as error:
            loop.run(rank._abandon(), 10.0)
            tries += 1
            if not isinstance(error, StaleEpoch) or tries == _EPOCH_TRIES:
                raise
            # Our clock is behind an earlier incarnation's: count on from it.
            epoch = int(error.metadata.get("currentEpoch", epoch)) + 1
        else:
            close_at_exit(rank)
            return _Handed(rank)


def _quarter_of_the_pool(config: RankConfig) -> int:
    return max(1, config.pools[0].pages // 4)


def _configured(registry: str) -> tuple[str, ...]:
    return () if registry in ("", "embedded") else tuple(replicas(registry))


__all__ = ["Closed", "Rank", "open_decode", "open_prefill", "open_rank"]
