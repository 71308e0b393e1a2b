"""A rank's host cache as peers see it: a port, a data plane and sessions of its own, for what it lends and takes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import grpc

import kvgrpc
from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import DataPlane
from kvgrpc.errors import PeerUnreachable, ServerDraining
from kvgrpc.model import EngineLoad, ModelIdentity, RankId, RankRef
from kvgrpc.net import advertised, joined, split
from kvgrpc.pull.book import PullBook
from kvgrpc.pull.forms import page_forms
from kvgrpc.pull.heads import moves
from kvgrpc.pull.lending.lender import Lender, LentPages
from kvgrpc.pull.lending.servicer import PullServicer
from kvgrpc.pull.model import Found, Holder, Lent, PullConfig, alone
from kvgrpc.pull.staging import StagedMemory, StagedShares, Staging
from kvgrpc.pull.taking.holders import Holders
from kvgrpc.pull.taking.indexed import event_hash_of
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import Admission
from kvgrpc.rpc.loop import LoopThread, background
from kvgrpc.server.cache.landings import Landings
from kvgrpc.server.closing import ClosingTime, aside
from kvgrpc.server.config import RankConfig
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, limits_to_pb
from kvgrpc.server.port.listener import Listener
from kvgrpc.server.port.load import RankLoad
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.transfer.runtime.decode_manager import DecodeManager
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from kvgrpc.transfer.runtime.manager import TransferConfig
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.transfer.runtime.resolve import PrefillEngine
from kvgrpc.transfer.servicer import TransferServicer
from kvgrpc.v1.server_service_pb2 import ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server
from kvgrpc.v1.transfer_service_pb2_grpc import add_TransferServiceServicer_to_server

_log = logging.getLogger(__name__)
_SERVICES = ("kvgrpc.v1.TransferService", "kvgrpc.v1.ServerService")
_MARGIN_SECONDS = 0.5
_CLOSE_SECONDS = 4.0
# Of the loop: it was busy, or it ended with the process.
_LATE = (TimeoutError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError)


class CachePeer:
    """Lends pages of a rank's host cache and takes pages of others. Belongs to the process's event loop.

    Its sessions have an address of their own, because an address proves who writes (rule 4, proof of death), and a data
    plane of their own, on which nothing but staging memory is registered: a peer that writes where it should not meets
    no cache. ``servicer`` is served at the rank's own address.
    """

    def __init__(
        self,
        config: RankConfig,
        pull: PullConfig,
        ref: RankRef,
        lends: LentPages,
        backend: PeersBackend,
        rank_drains: Callable[[], bool],
        load: RankLoad,
        hands_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """Opens the data plane and takes the staging memory. Raises FeatureDisabled, MemoryError.

        ``load``: that which the engine tells; ``hands_off``: whether the rank's hand-offs are being written.
        """
        self._config, self._pull, self._ref = config, pull, ref
        self._rank_drains, self._hands_off, self._load = rank_drains, hands_off, load
        self._backend = backend
        self._loop = LoopThread.shared()
        self.plane: DataPlane = _plane_like(config)
        self._following: asyncio.Task[None] | None = None
        self._steering: ServerServicer | None = None
        self._ended = False
        self.address = ""
        with contextlib.ExitStack() as opened:
            opened.callback(self.plane.close, 1.0)
            self._put_together(lends, opened)
            opened.pop_all()

    def _put_together(self, lends: LentPages, opened: contextlib.ExitStack) -> None:
        config, pull, ref = self._config, self._pull, self._ref
        sizes = pull.staged(lends.page_bytes), lends.page_bytes, lends.page_tokens
        staging = Staging(self.plane, *sizes, lends.dtype)
        self.book = PullBook(lends.page_bytes, self._page_seconds)
        self._page_tokens, self._page_bytes = lends.page_tokens, lends.page_bytes
        self._page_forms = page_forms(lends.keys.identity, lends.shares, lends.common)
        self._staging = staging
        self._keys, identity = lends.keys, lends.keys.identity
        model = replace(config.model, name=config.model.name or identity.model)
        name, shares = config.model.name, lends.shares
        common = None if lends.common is None else (lends.common, lends.common.identity(identity))
        told_as = lends.event_hash or event_hash_of
        self._holders = Holders(
            ref, config.layout, model, identity, pull, self._open_channel, name, shares, common, told_as
        )
        self._transfer = _transfer_config(config, ref, staging, model)
        self._sending = PrefillManager(self._transfer, self.plane, self._loop)
        opened.callback(lambda: self._loop.spawn(self._sending.stop(), "pulls-undone"))
        opened.callback(self._sending.close_worker, 1.0)
        axes = None if lends.common is None else lends.common.axes
        self._landings = Landings(staging, partial(self._take_memory, lends), self._receive, self._loop, axes)
        self._lender = Lender(lends.cache, staging, self._sending, self.book, common=lends.common)
        self._taker = Taker(self._landings.of, self._lend, self.book, pull.stall_timeout, self._holders.silent)
        lent_as = None if common is None else common[1]
        mine = ref, config.layout, identity
        self.servicer = PullServicer(*mine, self._lender, staging, self.book, lent_as, self._hands_off)
        self._listener = Listener({_SERVICES[0]: lambda: self._sending.healthy}, Admission(config.call_limits))

    @property
    def healthy(self) -> bool:
        return self._sending.healthy and self._landings.healthy

    def add_load(self, said: EngineLoad) -> EngineLoad:
        """Returns what an engine said of itself, with what its cache lends and takes."""
        lent, taken = self.book.in_flight()
        return replace(
            said,
            page_tokens=self._page_tokens,
            page_bytes=self._page_bytes,
            lent_pulls=lent,
            taken_pulls=taken,
            pull_rates=self.book.rates(),
            page_forms=self._page_forms,
        )

    def _page_seconds(self) -> float:
        """Computing a page at the engine's speed; 0: not told. Other ranks than the leading one take parts of the same
        pages."""
        speed = self._load.prefill_tokens_per_second if self._ref.rank.leads else 0.0
        return self._page_tokens / speed if speed else 0.0

    async def open(self) -> None:
        """Binds and serves. Raises AddressNotAllowed."""
        self._sending.start()
        self._landings.start()
        host = split(self._config.listen)[0]
        listen = self._pull.listen or joined(host, 0)
        public = split(self._config.advertise)[0] if self._config.advertise else ""
        bound = await self._listener.start(
            self._add_servicers,
            (listen,),
            self._config.server_security,
            self._config.max_frame_bytes + 64 * 1024,
            public,
            self._config.session_pings,
        )
        self.address = advertised(bound[0], public)

    def follow(self, registry: str) -> None:
        """Finds holders at the registry from now on, and takes pages from them."""
        self._following = background(self._holders.follow(registry), "holders")
        self._backend.connect(self._keys, self._taker, self._ask_holders)

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Lends and takes nothing more; what is on its way has ``grace`` seconds."""
        self._backend.disconnect()
        self.servicer.drain()
        managers: list[PrefillManager | DecodeManager] = [self._sending, *self._landings.drain()]
        await self._listener.drain()
        drained = [await each.drain(grace / len(managers)) for each in managers]
        return all(nothing_left for nothing_left, _ in drained), sum(rooms for _, rooms in drained)

    async def undrain(self, end_drain: Callable[[], Awaitable[None]]) -> None:
        self._check_goes_on()
        await end_drain()
        self._check_goes_on()  # its rank may have begun to drain meanwhile
        self.undrain_now()

    def _check_goes_on(self) -> None:
        if self._ended:
            raise ServerDraining(f"the cache of {self._ref} is about to end")
        if self._rank_drains():
            raise ServerDraining(f"{self._ref} drains, and its cache with it: undrain the rank, at its own address")

    def undrain_now(self) -> None:
        """Lends and takes again, unless it does or has ended."""
        if self._ended or not self._listener.draining:
            return
        self._sending.undrain()
        self._landings.undrain()
        self.servicer.undrain()
        if self._following is not None:
            self._backend.connect(self._keys, self._taker, self._ask_holders)
        self._listener.undrain()
        if self._steering is not None:
            self._steering.taken_back()

    async def close(self, time: ClosingTime) -> bool:
        """Ends every room and frees the staging memory; False where a write may be left: the port stays bound then, and
        a later close looks again."""
        first, self._ended = not self._ended, True
        if first:
            await self._end_taking(time)
        written = await self._end_writes(time)
        if written:
            self._landings.forget()
        if first:
            if written:
                self._sending.on_plane_closed()
            await self._sending.stop()
            await self._listener.refuse()
            self.servicer.close()
            await self._holders.close()
        if written:
            await self._listener.stop(min(0.5, time.left()), time.left() + _MARGIN_SECONDS)
        else:
            _log.error("%s: a lent page may still be written, so %s stays bound", self._ref, self.address)
        return written

    def close_now(self) -> bool:
        """``close`` for other threads than the loop's; blocks."""
        return self._loop.run(self.close(ClosingTime(_CLOSE_SECONDS)), 2 * _CLOSE_SECONDS)

    async def _end_taking(self, time: ClosingTime) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self.drain(time.left(0.3))
        await self._landings.stop()

    async def _end_writes(self, time: ClosingTime) -> bool:
        ended = await aside(self._sending.close_worker, time.left(0.5))
        # Threads of the cache and of calls copy from and to memory that the plane's close frees.
        copied = await aside(self._landings.close_memory, time.left(0.6))
        return copied and await aside(GuardedPlane(self.plane).close, time.left(0.7)) and ended

    # On threads of the cache's controller.

    def _ask_holders(
        self,
        hashes: Sequence[str],
        timeout: float,
        without: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Found | None:
        try:
            return self._loop.run(self._holders.best(hashes, timeout, without, only), timeout + _MARGIN_SECONDS)
        except Exception as error:
            _log.warning("%s: no holder was asked: %s: %s", self._ref, type(error).__name__, error)
            return None

    def _lend(self, found: Found, prompt: Sequence[str], first: int, count: int, room: int, timeout: float) -> Lent:
        seconds, holder = max(0.0, timeout) + _MARGIN_SECONDS, found.holder
        try:
            return self._loop.run(self._holders.lend(found, prompt, first, count, room, timeout), seconds)
        except (*_LATE, RuntimeError) as error:
            text = f"{holder.engine} at {holder.address} was not asked: {error or type(error).__name__}"
            raise PeerUnreachable(text, metadata={"address": holder.address}) from None

    def _take_memory(self, lends: LentPages, holder: Holder) -> StagedShares:
        """Memory as large as the landing half of staging, for other pages. Raises ValueError, MemoryError, OSError."""
        shares = list(self._holders.shares_of(holder.tp_size, holder.common).values())
        page_bytes = max(share.page_bytes for share in shares)
        slots = max(1, self._staging.landing.size * lends.page_bytes // (len(shares) * page_bytes))
        own, axes = lends.heads, None
        if holder.common and lends.common is not None:
            own, axes = (lends.common.heads(lends.keys.identity),), lends.common.axes
        plan = moves(own, [share.parts for share in shares])
        sizes = lends.page_bytes, page_bytes, lends.page_tokens
        return StagedShares(self.plane, slots, len(shares), plan, *sizes, lends.dtype, axes)

    def _receive(self, memory: StagedMemory, most: int) -> DecodeManager:
        bounds = replace(self._transfer.bounds, held_pages=most)
        transfer = replace(self._transfer, pools=(memory.pool,), bounds=bounds)
        return DecodeManager(transfer, self.plane, self._loop, self._resolve, self._session_channel)

    async def _resolve(self, bootstrap_addr: str, decode: RankId, at_once: bool = False) -> PrefillEngine:
        return await self._holders.engine_at(bootstrap_addr)

    def _open_channel(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self._config.client_security, own_connection=True)

    def _session_channel(self, address: str) -> grpc.aio.Channel:
        pings = self._config.session_pings
        return open_channel(address, self._config.client_security, own_connection=True, pings=pings)

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        add_TransferServiceServicer_to_server(TransferServicer(self._sending), server)
        limits = ServerLimits(calls=limits_to_pb(self._config.call_limits))
        info = ServerInfo(version=kvgrpc.__version__, services=_SERVICES, rank=self._ref, limits=limits)
        callers = CallersHere(self._listener.admission)
        self._steering = ServerServicer(info, self, lambda: self._listener.draining, callers)
        add_ServerServiceServicer_to_server(self._steering, server)
        return _SERVICES


def _plane_like(config: RankConfig) -> DataPlane:
    name = config.data_plane if isinstance(config.data_plane, str) else config.data_plane.name
    return open_plane(name, host=split(config.advertise or config.listen)[0], device=config.device)


def _transfer_config(config: RankConfig, ref: RankRef, staging: Staging, model: ModelIdentity) -> TransferConfig:
    return TransferConfig(
        *alone(ref, config.layout),
        (staging.pool,),
        timing=config.session_timing,
        bounds=replace(config.bounds, held_pages=staging.landing.size),
        max_frame_bytes=config.max_frame_bytes,
        model=model,
        refusal_proves_death=config.refusal_proves_death,
        verify=config.verify,
        check_pages=config.check_pages,
        tracing=config.tracing,
        pulls=True,
        tls=config.client_security.tls,
        opener_role=None,
    )


__all__ = ["CachePeer"]
