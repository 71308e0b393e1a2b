"""The end of a rank: it drains, sees its writes to their end, and gives its port back last of all."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.events import EventPublisher
from kvgrpc.events.base import SHUTDOWN_SECONDS
from kvgrpc.events.servicer import EventServicer
from kvgrpc.model import RankRef
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.servicer import PrefetchServicer
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.registry.client.following import Following
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.client.resolver import Resolver
from kvgrpc.registry.servicer import RegistryServicer
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.within import within
from kvgrpc.server.cache.peer import CachePeer
from kvgrpc.server.closing import ClosingTime, aside
from kvgrpc.server.port.listener import Listener
from kvgrpc.server.rank.status import RankStatus
from kvgrpc.transfer.runtime.boundary import Runtime, prefill_of
from kvgrpc.transfer.runtime.guarded import GuardedPlane

logger = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 1.0
_ABANDON_SECONDS = 4.0
# A stop that takes longer is the library's fault, and is left behind.
_LEAST_STOP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Closed:
    """The result of ``Rank.close``.

    ``drained``: nothing was left. ``open_rooms`` had not ended. ``held_pages``: nobody may reuse them until the process
    ends. ``listening``: a write may be left, so the address stays bound and answers SERVER_DRAINING (a refused dial
    would prove the opposite), until a later ``close`` finds none or the process ends.
    """

    drained: bool
    open_rooms: int
    held_pages: int
    listening: bool = False


@dataclass(eq=False)
class RankParts:
    """All that a rank has opened so far, and has to close; None is what its configuration has not, or not yet."""

    ref: RankRef
    transfer: Runtime
    plane: DataPlane
    owns_plane: bool
    """Whoever opened the data plane closes it."""
    events: EventPublisher
    status: RankStatus
    resolver: Resolver
    following: Following
    registry: RegistryServicer | None
    """The registry that the rank serves itself."""
    address: str = ""
    listener: Listener | None = None
    registration: Registration | None = None
    event_servicer: EventServicer | None = None
    prefetch: PrefetchManager | None = None
    prefetch_servicer: PrefetchServicer | None = None
    peers: PeersBackend | None = None
    cache_peer: CachePeer | None = None


class RankEnd:
    """Closes what a rank has opened, in the right order; all of it on the loop.

    ``closed``: what the last close found. ``begun``: a close has begun (a drain is none).
    """

    def __init__(self, parts: RankParts) -> None:
        self.parts = parts
        self.closed: Closed | None = None
        self.begun = False
        self._task: asyncio.Task[Closed] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def close(self, time: ClosingTime) -> Closed:
        """A second caller, a signal handler perhaps that came in the middle, waits for the close that runs."""
        if self._task is None:
            before = self.closed
            step = self._close(time) if before is None else self._close_again(before, time)
            self._task = asyncio.create_task(step, name="rank-close")
        task = self._task
        try:
            self.closed = await asyncio.shield(task)
        finally:
            if task.done() and self._task is task:
                self._task = None
        return self.closed

    async def drain(self, grace: float, seconds: float) -> tuple[bool, int]:
        """Refuses new work and waits ``grace`` seconds for rooms that run, ``seconds`` in all. True where nothing is
        left, and how many rooms are."""
        parts, time = self.parts, ClosingTime(seconds)
        logger.info("%s drains: %d rooms are open, and have %.1f s", parts.ref, parts.transfer.open_rooms(), grace)
        if parts.listener is not None:
            await parts.listener.drain()
        if parts.registration is not None:
            self._leaving = background(parts.registration.close(), "registration-close")
            parts.registration = None
            await asyncio.wait([self._leaving], timeout=time.left())
        left = time.left()
        try:
            drained, open_rooms = await within(left, parts.transfer.drain(min(grace, left * 0.8)))
        except asyncio.TimeoutError:
            drained, open_rooms = False, parts.transfer.open_rooms()
        if parts.event_servicer is not None:
            parts.event_servicer.drain()
        if parts.prefetch_servicer is not None:
            parts.prefetch_servicer.drain()
        if parts.cache_peer is not None:
            await parts.cache_peer.drain(time.left(0.1))
        left_over = "nothing is left" if drained else f"{open_rooms} rooms and {parts.transfer.held_pages} held pages"
        logger.log(logging.INFO if drained else logging.WARNING, "%s drained: %s", parts.ref, left_over)
        return drained, open_rooms

    async def left(self) -> None:
        """Waits until a drain has left the registry: it would take away a row that is registered before that."""
        if self._leaving is not None:
            await asyncio.wait([self._leaving])

    def serve_again(self) -> None:
        """Takes back a drain, but for the registry, which comes before, and the listener."""
        parts = self.parts
        parts.transfer.undrain()
        if parts.event_servicer is not None:
            parts.event_servicer.undrain()
        if parts.prefetch_servicer is not None:
            parts.prefetch_servicer.undrain()
        if parts.cache_peer is not None:
            parts.cache_peer.undrain_now()

    async def abandon(self) -> None:
        """Undoes an opening that failed, except the data plane, which the next try uses."""
        parts, time = self.parts, ClosingTime(_ABANDON_SECONDS)
        if parts.registration is not None:
            await parts.registration.close()
        await parts.transfer.stop()
        if parts.listener is not None:
            await parts.listener.refuse()
        await aside(parts.events.shutdown)
        await self._close_cache(time.left(0.5))
        await self._let_go(await self._end_worker(time.left(0.5)), time)

    async def _close(self, time: ClosingTime) -> Closed:
        parts = self.parts
        drained, open_rooms, lent = False, 0, False
        self.begun = True
        try:
            drained, open_rooms = await self.drain(time.seconds * 0.5, time.seconds * 0.8)
        finally:
            await aside(parts.events.shutdown, min(SHUTDOWN_SECONDS, time.left(0.85)))
            lent = await self._close_cache(time.left(0.85))
            prefill = prefill_of(parts.transfer)
            if prefill is None:
                await parts.transfer.stop()
            written = await self._end_writes(time)
            if prefill is not None:
                # After its data plane: its sessions still say which writes are over for certain.
                if written and (parts.owns_plane or GuardedPlane(parts.plane).closed):
                    prefill.on_plane_closed()
                await prefill.stop()
            if parts.listener is not None:
                await parts.listener.refuse()
            await self._let_go(written, time)
        written = written and lent
        return Closed(drained and written, open_rooms, parts.transfer.held_pages, listening=not written)

    async def _close_again(self, before: Closed, time: ClosingTime) -> Closed:
        lent = await self._end_lending(time.left(0.5))
        written = await self._end_writes(time)
        await self._let_go(written, time)
        return replace(before, listening=not (written and lent))

    async def _end_lending(self, seconds: float) -> bool:
        peer = self.parts.cache_peer
        return peer is None or await peer.close(ClosingTime(seconds))

    async def _close_cache(self, seconds: float) -> bool:
        """False where a page that is lent or taken may still be written; the cache itself says in the log what is left
        of it."""
        parts = self.parts
        if parts.prefetch_servicer is not None:
            parts.prefetch_servicer.close()
        lent = await self._end_lending(seconds * 0.5)
        if parts.prefetch is not None and not await aside(parts.prefetch.close, seconds):
            logger.error("%s: a page of the cache may still move, so its memory stays; end the process", parts.ref)
        elif parts.peers is not None:
            await aside(parts.peers.close, seconds)
        return lent

    async def _end_writes(self, time: ClosingTime) -> bool:
        """False where a write may be left. Who opened the data plane closes it: memory that it gave is theirs."""
        parts = self.parts
        ended = await self._end_worker(time.left(0.9))
        if not parts.owns_plane:
            if ended and GuardedPlane(parts.plane).closed:
                return True
            prefill = prefill_of(parts.transfer)
            return ended and not (prefill is not None and prefill.has_unknown_writes)
        closed = await aside(GuardedPlane(parts.plane).close, time.left())
        # A thread that waited for the plane ends with it.
        return closed and (ended or await self._end_worker(time.left()))

    async def _end_worker(self, seconds: float) -> bool:
        prefill = prefill_of(self.parts.transfer)
        return prefill is None or await aside(prefill.close_worker, seconds)

    async def _let_go(self, written: bool, time: ClosingTime) -> None:
        """Keeps the address bound until every write has ended: a refused dial tells a peer that nobody writes any more
        (rule 4, proof of death)."""
        parts = self.parts
        if not written:
            logger.error("%s: a write may be left, so %s stays bound; end the process", parts.ref, parts.address)
        else:
            await aside(parts.status.close)
            if parts.listener is not None:
                await parts.listener.stop(min(_STOP_GRACE_SECONDS, time.left()), time.left() + _LEAST_STOP_SECONDS)
        if parts.registry is not None:
            await parts.registry.close()
        await parts.following.close()
        await parts.resolver.close()
