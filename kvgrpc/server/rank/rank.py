"""The only wiring: opens a rank out of the capabilities. How it ends is in ``end.py``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import grpc

import kvgrpc
from kvgrpc.dataplane.base import DataPlane, DialledByPeers
from kvgrpc.errors import EngineNotFound, InvalidRequest, ServerDraining, StaleEpoch
from kvgrpc.events import EventPublisher, NullEventPublisher
from kvgrpc.events.servicer import EventServicer
from kvgrpc.model import RankId, RankRef, Role, new_epoch
from kvgrpc.net import advertised, parse_bootstrap_addr, replicas
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.served import ServedCache
from kvgrpc.prefetch.servicer import PrefetchServicer
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.registry.client.registration import Registration, newer_epoch
from kvgrpc.registry.model import Endpoints, RankRow, RankSelector, labels_of
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.memory import MemoryStore
from kvgrpc.rpc.interceptors import Admission
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.within import check_seconds
from kvgrpc.server.cache.lent import lent_of
from kvgrpc.server.cache.peer import CachePeer
from kvgrpc.server.check import check
from kvgrpc.server.closing import ClosingTime, close_at_exit, forget, opened_aside
from kvgrpc.server.config import RankConfig
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, limits_to_pb, rank_limits, settings_in_force
from kvgrpc.server.port.listener import Check, Listener
from kvgrpc.server.port.load import RankLoad
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.server.rank.calls import RankCalls
from kvgrpc.server.rank.end import Closed, RankEnd, RankParts
from kvgrpc.server.rank.opening import cache_of, dialled_endpoint, peers_of, plane_of, publisher_of, watch_limit
from kvgrpc.server.rank.status import RankStatus
from kvgrpc.transfer.runtime.boundary import DecodeRuntime, PrefillRuntime, Runtime
from kvgrpc.transfer.runtime.decode_manager import DecodeManager
from kvgrpc.transfer.runtime.manager import TransferConfig
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.transfer.servicer import TransferServicer
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from kvgrpc.v1.prefetch_service_pb2_grpc import add_PrefetchServiceServicer_to_server
from kvgrpc.v1.pull_service_pb2_grpc import add_PullServiceServicer_to_server
from kvgrpc.v1.server_service_pb2 import ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server
from kvgrpc.v1.transfer_service_pb2_grpc import add_TransferServiceServicer_to_server

logger = logging.getLogger(__name__)

_EPOCH_TRIES = 3
# The largest requests of a rank are frames: one entry may take a little more than the sender counted.
_BESIDES_A_FRAME_BYTES = 64 * 1024
# For the writes of rooms that a drain cancelled: their pages come back after the settle time of 2 s.
_CANCELLED_WRITES_SECONDS = 5.0
# For a registry to take the row of a rank that drains no more.
_UNDRAIN_SECONDS = 10.0
_DROPPED_SECONDS = 10.0
# How much later than its own end a close may be before the loop is taken for stuck.
_STUCK_SECONDS = 10.0
# For the end of a part that was open when its rank's opening was over.
_LATE_PART_SECONDS = 4.0

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
        self.load = RankLoad()
        if config.prefill_tokens_per_second:
            self.load.say(prefill_tokens_per_second=config.prefill_tokens_per_second)
        self._loop = loop
        self._calls = RankCalls(config, lambda: self.address)
        self._served: ServedCache | None = None
        self._superseded_by: int | None = None
        self._bound = ""
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
        calls = self._calls
        if config.role is Role.PREFILL:
            manager = PrefillManager(transfer, plane, loop)
        else:
            manager = DecodeManager(transfer, plane, loop, calls.resolve, calls.to_a_rank, calls.changes)
        self.transfer = cast(Transfer, manager)
        self._parts = RankParts(
            ref,
            manager,
            plane,
            owns_plane=plane is not config.data_plane,
            events=NullEventPublisher(ref.rank.dp),
            status=RankStatus(config.metrics_listen, loop, manager, lambda: self.registration_state),
            resolver=calls.resolver,
            following=calls.following,
            registry=RegistryServicer(MemoryStore(ttl=config.lease_ttl)) if config.registry == "embedded" else None,
        )
        self._end = RankEnd(self._parts)

    def __enter__(self) -> Rank[Transfer]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Rank[Transfer]:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        state = "closed" if self._end.closed is not None else "healthy" if self.healthy else "not healthy"
        return f"<Rank {self.ref} {self.config.role.name.lower()} at {self.address} over {self.plane.name}: {state}>"

    @property
    def address(self) -> str:
        """The address that peers dial, "host:port"; empty until the rank is open."""
        return self._parts.address

    @property
    def events(self) -> EventPublisher:
        """Tells readers what the engine's cache holds."""
        return self._parts.events

    @property
    def prefetch(self) -> PrefetchManager | None:
        """The hierarchical cache."""
        return self._parts.prefetch

    @property
    def registration_state(self) -> str:
        """ "registered", "retrying", "superseded"; "none" without a registry."""
        registration = self._parts.registration
        return "none" if registration is None else registration.state

    @property
    def healthy(self) -> bool:
        """All of its threads and tasks run, and no newer incarnation took its place."""
        return self._end.closed is None and all(check() is True for check in self._health_checks().values())

    @property
    def metrics_address(self) -> str:
        """The address of ``/metrics``, ``/livez`` and ``/readyz``, "host:port"; empty without ``metrics_listen``."""
        return self._parts.status.address

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
        closed = self._end.closed
        if closed is None or closed.listening:
            closed = self._loop.run(self._close_once(ClosingTime(deadline)), deadline + _STUCK_SECONDS)
        return closed

    async def drain(self, grace: float) -> tuple[bool, int]:
        """On the loop: refuses new work, waits ``grace`` seconds for what runs, and 5 s for the writes of the rest."""
        return await self._end.drain(grace, grace + _CANCELLED_WRITES_SECONDS)

    async def undrain(self, end_drain: Callable[[], Awaitable[None]]) -> None:
        """On the loop: registers again, as the same incarnation, and takes new work; health says so in the end."""
        if self._end.begun:
            raise ServerDraining(f"{self.ref} is about to end")
        listener = self._parts.listener
        if listener is None or not listener.draining:
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
        # What can fail comes first: until then the drain goes on as it is.
        await self._end.left()
        registration = self._new_registration()
        if registration is not None:
            await registration.start(min(self.config.start_timeout, _UNDRAIN_SECONDS))
        try:
            await end_drain()
            if self._end.begun:
                raise ServerDraining(f"{self.ref} is about to end")
        except BaseException:  # cancelled too: nobody else knows of the registration yet
            if registration is not None:
                await registration.close()
            raise
        self._parts.registration = registration
        self._end.serve_again()
        listener.undrain()
        logger.info("%s drains no more", self.ref)

    async def _open(self, deadline: float) -> None:
        config, parts = self.config, self._parts
        parts.events = await opened_aside(publisher_of, config, self.ref, close=lambda late: late.shutdown())
        parts.peers = await opened_aside(peers_of, config, close=_close_late)
        parts.prefetch = await opened_aside(cache_of, config, self.ref, self.events, parts.peers, close=_close_late)
        self._served = self.prefetch if config.cache is None else config.cache(self.ref)
        self.transfer.start()
        if self.prefetch is not None and parts.peers is not None and config.pull is not None:
            mine = config, config.pull, self.ref, lent_of(self.prefetch), parts.peers
            beside = self._drains, self.load, self._hands_off
            parts.cache_peer = await opened_aside(CachePeer, *mine, *beside, close=CachePeer.close_now)
            await parts.cache_peer.open()
            self.load.add_pulls(parts.cache_peer.add_load)
        if parts.registry is not None:
            await parts.registry.start()
        parts.listener = Listener(self._health_checks(), Admission(config.call_limits))
        bound = await parts.listener.start(
            self._add_servicers,
            (config.listen, *config.admin_listen),
            config.server_security,
            config.max_frame_bytes + _BESIDES_A_FRAME_BYTES,
            config.advertise,
            config.session_pings,
        )
        parts.address = advertised(bound[0], config.advertise)
        parts.status.open(self._live, self._ready)
        self._bound = bound[0]
        parts.registration = self._new_registration()
        if parts.registration is not None:
            await parts.registration.start(deadline)
        if config.registry and parts.cache_peer is not None:
            own = config.registry == "embedded"
            parts.cache_peer.follow(self.address if own else ",".join(replicas(config.registry)))
        self._join_replica()
        self._say_where_it_is()

    def _new_registration(self) -> Registration | None:
        """Of its row, to be started; None: there is no registry."""
        if not self.config.registry:
            return None
        embedded = self.config.registry == "embedded"
        registry = self._bound if embedded else ",".join(replicas(self.config.registry))
        channel = self._calls.to_ourselves if embedded else self._calls.to_anybody
        return Registration(channel, registry, [self._row()], on_superseded=self._on_superseded)

    def _join_replica(self) -> None:
        """Ranks of one replica agree on what they prefetch; the one with pp = cp = tp = 0 leads."""
        if self.prefetch is not None:
            self.prefetch.connect(self._find_cache_leader, self._calls.to_anybody, self._loop.spawn)

    async def _find_cache_leader(self) -> str:
        config, parts = self.config, self._parts
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
        elif parts.registration is not None:
            registry = parts.registration.address  # of several replicas the one that answered last
        else:
            registry = replicas(config.registry)[0]
        target = parse_bootstrap_addr(registry).target
        engine = await parts.resolver.resolve(
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

    def _close_at_exit(self, seconds: float) -> concurrent.futures.Future[Closed]:
        return self._loop.spawn(self._close_once(ClosingTime(seconds)), "close at exit")

    async def _close_once(self, time: ClosingTime) -> Closed:
        closed = await self._end.close(time)
        if not closed.listening:
            forget(self)
        return closed

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        parts = self._parts
        add_TransferServiceServicer_to_server(TransferServicer(self.transfer), server)
        stream = self.events.stream
        parts.event_servicer = EventServicer(
            [] if stream is None else [stream], max_watches=watch_limit(self.config), load=self.load.now
        )
        add_EventServiceServicer_to_server(parts.event_servicer, server)
        names = ["kvgrpc.v1.TransferService", "kvgrpc.v1.EventService", "kvgrpc.v1.ServerService"]
        if self._served is not None:
            parts.prefetch_servicer = PrefetchServicer(self._served)
            add_PrefetchServiceServicer_to_server(parts.prefetch_servicer, server)
            names.append("kvgrpc.v1.PrefetchService")
        if parts.cache_peer is not None:
            add_PullServiceServicer_to_server(parts.cache_peer.servicer, server)
            names.append("kvgrpc.v1.PullService")
        if parts.registry is not None:
            add_registry_to_server(parts.registry, server)
            names.append("kvgrpc.v1.RegistryService")
        info = ServerInfo(
            version=kvgrpc.__version__,
            services=tuple(names),
            rank=self.ref,
            role=self.config.role,
            limits=ServerLimits(
                calls=limits_to_pb(self.config.call_limits),
                rank=rank_limits(self.config.max_frame_bytes, self._bounds, self.plane),
                registry=None if parts.registry is None else parts.registry.limits,
            ),
            security=self.config.server_security,
            settings=settings_in_force(self.config),
            data_plane_endpoints=self.plane.endpoints if isinstance(self.plane, DialledByPeers) else (),
            registration=lambda: parts.registration,
        )

        add_ServerServiceServicer_to_server(ServerServicer(info, self, self._drains, self._callers()), server)
        return names

    def _drains(self) -> bool:
        listener = self._parts.listener
        return listener is not None and listener.draining

    def _hands_off(self) -> bool:
        return isinstance(self.transfer, PrefillManager) and self.transfer.is_writing

    def _callers(self) -> CallersHere:
        listener, events, registry = self._parts.listener, self._parts.event_servicer, self._parts.registry
        assert listener is not None and events is not None  # it is the listener's start that asks
        if registry is None:
            return CallersHere(listener.admission, [events.readers])
        return CallersHere(listener.admission, [events.readers, registry.readers], registry.store.rows_by_owner)

    def _row(self) -> RankRow:
        config, peer = self.config, self._parts.cache_peer
        stream = self.events.stream
        return RankRow(
            self.ref,
            config.role,
            Endpoints(
                self.address,
                "" if stream is None else dialled_endpoint(stream.state().pub_endpoint, self.address),
                "" if peer is None else peer.address,
            ),
            config.layout,
            tuple(pool.without_addresses() for pool in config.pools),
            self.plane.name,
            config.engine_selects_dp,
            config.model,
            stream is not None,
            labels_of(config.labels),
        )

    def _unless_superseded(self, healthy: bool) -> bool | str:
        epoch = self._superseded_by
        return healthy if epoch is None else f"incarnation {epoch} took its place"

    def _health_checks(self) -> Mapping[str, Check]:
        """The check of each service: that its threads and tasks live, not only the port."""
        parts = self._parts
        checks: dict[str, Check] = {
            "kvgrpc.v1.TransferService": lambda: self._unless_superseded(self.transfer.healthy),
            "kvgrpc.v1.EventService": lambda: self._unless_superseded(self.events.healthy),
            "kvgrpc.v1.ServerService": lambda: self._loop.trouble or True,
        }
        if self._served is not None:
            served = self._served
            checks["kvgrpc.v1.PrefetchService"] = lambda: served.healthy
        if parts.cache_peer is not None:
            peer = parts.cache_peer
            checks["kvgrpc.v1.PullService"] = lambda: peer.healthy
        if parts.registry is not None:
            registry = parts.registry
            checks["kvgrpc.v1.RegistryService"] = lambda: registry.healthy
        return checks

    def _live(self) -> Mapping[str, bool]:
        """False for a part that a restart would mend. Neither a drain nor a newer incarnation is a failure."""
        return {
            "loop": self._loop.healthy,
            "transfer": self._end.begun or self.transfer.healthy,
            "events": self._end.begun or self._superseded_by is not None or self.events.healthy,
        }

    def _ready(self) -> Mapping[str, bool]:
        listener = self._parts.listener
        return {"loop": self._loop.healthy, **({} if listener is None else listener.serving())}

    def _on_superseded(self, epoch: int) -> None:
        logger.error("%s was replaced by incarnation %d: close this rank", self.ref, epoch)
        self._superseded_by = epoch
        # At once: two streams of one cache would be two truths.
        self.events.fence()


class _Handed(Rank[Transfer]):
    """The part of a rank that an engine has. All of the rank's is here, and the rank itself, which its loop holds,
    knows nothing of this: so it goes when the engine lets it go."""

    __slots__ = ("_process", "_rank")

    def __init__(self, rank: Rank[Transfer]) -> None:
        self.__dict__ = rank.__dict__
        self._rank, self._process = rank, os.getpid()

    async def _close_once(self, time: ClosingTime) -> Closed:
        return await self._rank._close_once(time)

    def __del__(self) -> None:
        # Wherever the garbage collector runs, under any lock: so it appends for the loop, and takes no lock itself.
        if self._end.begun or sys.is_finalizing() or os.getpid() != self._process:
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
            loop.run(rank._end.abandon(), 10.0)
            tries += 1
            newer = newer_epoch(error) if isinstance(error, StaleEpoch) else None
            if newer is None or tries == _EPOCH_TRIES:
                raise
            epoch = newer + 1  # our clock is behind an earlier incarnation's
        else:
            close_at_exit(rank)
            return _Handed(rank)


def _close_late(part: PeersBackend | PrefetchManager) -> None:
    part.close(_LATE_PART_SECONDS)


def _quarter_of_the_pool(config: RankConfig) -> int:
    return max(1, config.pools[0].pages // 4)


__all__ = ["Closed", "Rank", "open_decode", "open_prefill", "open_rank"]
