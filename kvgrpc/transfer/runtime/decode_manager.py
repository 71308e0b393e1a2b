"""The manager of a decode rank: resolves, dials prefill ranks, and keeps its receivers' rooms in step with them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace

import grpc

from kvgrpc.dataplane.base import MAX_ADDRESS_BYTES, DataPlane
from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError, Reason
from kvgrpc.model import Attention, RankRef, Role, check_pools
from kvgrpc.rpc.status import error_from
from kvgrpc.transfer import wire
from kvgrpc.transfer.layout import topology
from kvgrpc.transfer.layout.plan import check_destination, check_each_pool, check_first_page
from kvgrpc.transfer.layout.pools import CopiedPages, destination_of
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodePair, DecodeRoom, Stream
from kvgrpc.transfer.protocol.page_check import WrittenPages
from kvgrpc.transfer.protocol.types import POLL_WAITING_FOR_INPUT, DecodeEntry
from kvgrpc.transfer.runtime.boundary import EngineHandle, RoomRequest
from kvgrpc.transfer.runtime.dead_peers import DeadPeers
from kvgrpc.transfer.runtime.death_proofs import DeathProofs
from kvgrpc.transfer.runtime.hello import check_pool_sizes
from kvgrpc.transfer.runtime.manager import (
    Loop,
    TransferConfig,
    TransferManager,
)
from kvgrpc.transfer.runtime.resolve import Changes, PrefillResolver, ReceiverRoom, Resolve
from kvgrpc.transfer.runtime.sessions import DecodeSession, SessionCall
from kvgrpc.transfer.runtime.timed_handle import TimedHandle
from kvgrpc.transfer.runtime.writing.checksums import PeerPages
from kvgrpc.transfer.tables import PartRow, RoomRow, SessionRow
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from kvgrpc.wire import (
    failure_from_pb,
    layout_to_pb,
    model_to_pb,
    pool_from_pb,
    pool_to_pb,
    rank_ref_from_pb,
    rank_ref_to_pb,
)

logger = logging.getLogger(__name__)
# A peer that asks for a longer idle timeout than ours gets this much: past it a hung one would hold rooms too long.
LONGEST_IDLE_TIMEOUT_MS = 60_000


class DecodeManager(TransferManager[DecodeRoom]):
    """See the module. What receivers use (see runtime.boundary) is thread-safe; the rest runs on the loop."""

    role = "decode"
    side = Role.DECODE
    core: DecodeCore

    def __init__(
        self,
        config: TransferConfig,
        plane: DataPlane,
        loop: Loop,
        resolve: Resolve,
        open_channel: Callable[[str], grpc.aio.Channel],
        changes: Changes | None = None,
    ) -> None:
        super().__init__(config, plane, loop)
        self.core = DecodeCore(
            config.ref,
            timing=config.timing,
            bounds=config.bounds,
            connections=self._connections,
            deliver_aux=self._deliver_aux,
            written=WrittenPages(config.pool_sizes) if config.check_pages else None,
        )
        self._resolver = PrefillResolver(self.core, self.shape, resolve, open_channel, self._begin, self._pump, changes)
        self.stands = self._resolver.stands
        self._open_channel = open_channel
        self._dead_peers = DeadPeers(self._guarded, self._begin)
        self._sessions: dict[Stream, DecodeSession] = {}
        self._data_addresses: dict[RankRef, bytes] = {}
        self._peer_pages: dict[RankRef, PeerPages] = {}
        self._comparing: set[asyncio.Future[Failure | None]] = set()
        self._death_proofs = DeathProofs(config.refusal_proves_death)
        self._tasks: set[asyncio.Task[None]] = set()

    # For receivers, on any thread: appended for the loop thread.

    def open(self, handle: EngineHandle, request: RoomRequest) -> None:
        """Opens a room. Where its sessions stand (its handle says so), its pages tell prefill of it, or a tick does."""
        post = self.post_later if handle.poll is POLL_WAITING_FOR_INPUT else self.post
        post(DecodeManager._take_room, handle, request)

    def write(self, handle: EngineHandle, pages: CopiedPages, first_page: int, aux_index: int | None) -> None:
        self.post(DecodeManager._take_destination, handle, pages, first_page, aux_index)

    # What they appended, on the loop thread.

    def _take_room(self, handle: EngineHandle, request: RoomRequest) -> None:
        if self.draining or self.closed:
            self._refuse_late(handle)
            return
        room = handle.record = ReceiverRoom.of(handle, request)
        if self._spans is not None:  # prefill's spans are below ours
            room.span, room.traceparent = self._spans.begin(room.traceparent, handle.began)
        if self.core.open(room) or room.refused:
            self._resolver.find(room)

    def _take_destination(
        self, handle: EngineHandle, copied: CopiedPages, first_page: int, aux_index: int | None
    ) -> None:
        room: ReceiverRoom | None = handle.record
        if room is None:
            return
        try:
            check_first_page(first_page)
            destination = destination_of(copied, first_page)
            self.aux.check(aux_index)
            answer = wire.answer_bytes(destination, self.aux.row_bytes) if self.config.verify else 0
            wire.check_size(destination, self.config.max_frame_bytes, answer)  # bounds what is looked at next
            check_each_pool(check_destination, destination, destination.others, self.own_pages, self.pool_names)
        except KvGrpcError as error:
            self.core.fail(room, Failure.of(error, str(self.ref)))
            return
        self.core.write(room, destination, aux_index)

    # Life.

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Refuses new rooms, waits for open ones, then stops them; (nothing is left, open rooms)."""
        self._take_all()
        self.draining = True
        await self.until(lambda: self.open_rooms() == 0, grace)
        self._fail_all(self.core.rooms)
        await self.until(lambda: self.core.held_pages == 0, grace)
        return not self.core.held_pages, self.open_rooms()

    def undrain(self) -> None:
        self.draining = False

    async def stop(self) -> None:
        self.closed = True
        self._fail_all(self.core.rooms)
        await self._resolver.close()
        for session in list(self._sessions.values()):
            session.close()
        if self._comparing:  # each ends with its page: the memory is not to go under its thread
            await asyncio.wait(self._comparing)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=0.5)
            for task in late:
                task.cancel()
        self._death_proofs.close()
        await super().stop()

    @property
    def healthy(self) -> bool:
        """False too while every new room is refused, because too many pages are held."""
        return super().healthy and not self.core.refuses_all

    @property
    def held_pages(self) -> int:
        return self.core.held_pages

    # Tables.

    def sessions(self) -> Iterator[SessionRow]:
        seconds = self.config.timing.tick_seconds
        return (
            SessionRow(
                pair.ref,
                pair.address,
                pair.state,
                pair.stream.number if pair.stream is not None else 0,
                len(pair.rooms),
                (self.core.now - (pair.heard_or_reached_at or pair.heard_at)) * seconds,
                len(pair.pending_rooms),
                self._hand_offs.of_pair(pair.ref),
            )
            for pair in tuple(self.core.pairs.values())
        )

    def _peers(self, room: DecodeRoom) -> Sequence[RankRef]:
        if len(room.parts) == 1:
            return (room.parts[0].pair.ref,)  # most rooms, without a list to be made
        return [part.pair.ref for part in room.parts]

    def _row(self, room: DecodeRoom) -> RoomRow:
        parts = tuple(PartRow(part.pair.ref, part.state, part.writes, part.pages_done) for part in room.parts)
        held = room.ended and not room.handle.release_safe
        age = (self.core.now - room.created_at) * self.config.timing.tick_seconds
        return RoomRow(
            room.key,
            Role.DECODE,
            room.state,
            parts,
            room.page_count,
            held,
            isinstance(room.handle, EngineHandle) and not room.handle.closed,
            age,
            room.failure,
            room.traceparent,
        )

    # Dialling.

    async def _dial(self, stream: Stream) -> None:
        """One stream from dial to end; the core hears how it went."""
        session = self._sessions[stream]
        channel: grpc.aio.Channel | None = None
        try:
            session.resolved = await self._death_proofs.behind(stream.pair.address)
            if session.closing:  # the lookup took so long that another dial replaced this one: nobody would end it
                return
            channel = session.channel = self._open_channel(stream.pair.address)
            if self.config.tls and not stream.pair.welcomed:
                self._begin(self._look_whether_taken(session, stream), f"look at {stream.pair.ref}")
            session.call = TransferServiceStub(channel).Session()
            await session.call.write(self._hello(stream))
            await self._read(session, stream, session.call)
        except grpc.aio.AioRpcError as error:
            await self._not_welcome(stream, error)
        except asyncio.InvalidStateError:  # grpc.aio: the call ended before the hello was written
            await self._not_welcome(stream, None)
        except KvGrpcError as error:
            self.core.on_goodbye(stream, Failure.of(error, str(self.ref)))
        except asyncio.CancelledError:
            self.core.on_end(stream)
        except Exception as error:
            failure = self._count_error(f"{stream.pair.ref} cannot be dialled: {type(error).__name__}")
            if stream.pair.welcomed:
                self.core.on_end(stream)
            else:  # nothing says that the next dial would get further
                self.core.on_goodbye(stream, failure)
        finally:
            del self._sessions[stream]
            session.end()
            self._pump()
            if channel is not None:
                await channel.close()

    async def _look_whether_taken(self, session: DecodeSession, stream: Stream) -> None:
        """A first dial over TLS gets no answer while that interpreter is held, so a listening process has to do (3,
        break and loss)."""
        session.is_taken = await self._death_proofs.is_taken(stream.pair.address)

    async def _not_welcome(self, stream: Stream, error: grpc.aio.AioRpcError | None) -> None:
        """The call failed: proof of death, an answer of the server's front (credentials, roles), or just a break."""
        known = error_from(error) if error is not None else None
        ours = known is not None and known.reason != Reason.UNSPECIFIED and known.code != "UNAVAILABLE"
        if known is not None and ours and not stream.pair.welcomed:
            self.core.on_goodbye(stream, Failure.of(known, stream.pair.address))
            return
        pair = stream.pair
        if pair.up:  # the next dial, at once, will show whether somebody listens; after a cut a look takes a second
            self.core.on_end(stream)
        elif await self._death_proofs.is_proof(pair.ref, pair.address, was_welcomed=pair.welcomed):
            self.core.on_refused(stream)
        else:
            self.core.on_end(stream)

    async def _read(self, session: DecodeSession, stream: Stream, call: SessionCall) -> None:
        core = self.core
        while True:
            message = await call.read()
            if not isinstance(message, pb.SessionResponse):
                core.on_end(stream)
                return
            if message.rooms:
                if session.writer is None:
                    raise InvalidRequest.of("rooms", len(message.rooms), "empty before welcome")
                wire.check_frame(message, self.config.max_frame_bytes)
                self._hand_offs.heard(len(message.rooms))
                self._hurry()
                await self._in_turns(wire.parse_response(message), lambda some: core.on_frame(stream, some))
            elif message.HasField("welcome"):
                self._welcome(session, stream, message.welcome)
            elif message.HasField("goodbye"):
                goodbye = message.goodbye
                core.on_goodbye(stream, failure_from_pb(goodbye.failure) if goodbye.HasField("failure") else None)
                return
            else:
                core.on_heard(stream)

    def _welcome(self, session: DecodeSession, stream: Stream, welcome: pb.Welcome) -> None:
        answered = rank_ref_from_pb(welcome.rank)
        if session.writer is not None:
            raise InvalidRequest.of("welcome", "another", "said once")
        if answered != stream.pair.ref:
            raise InvalidRequest.of("welcome.rank", answered, f"{stream.pair.ref}, which was dialled")
        size = len(welcome.data_plane_address)
        if size > MAX_ADDRESS_BYTES:
            raise InvalidRequest.of("welcome.data_plane_address", f"{size} bytes", f"at most {MAX_ADDRESS_BYTES}")
        self._data_addresses[stream.pair.ref] = welcome.data_plane_address
        self._death_proofs.welcomed(stream.pair.ref, session.resolved)
        session.max_frame_bytes = min(self.config.max_frame_bytes, welcome.max_frame_bytes or 2**63)
        session.heartbeat, session.quiet_heartbeat, idle_timeout = self._pace_of(welcome)
        self._agree_on_checksums(stream.pair, welcome)
        self.core.on_welcome(stream, idle_timeout)
        session.writer = self._start(self._write(session, stream), f"session-write {stream.pair.ref}")
        self._pump()

    def _agree_on_checksums(self, pair: DecodePair, welcome: pb.Welcome) -> None:
        """Compared where both sides want it (14, aux and checksums)."""
        if not self.config.verify:
            return
        if not welcome.verify:
            logger.warning("%s does not verify: the pages that it sends are not compared", pair.ref)
            return
        check_pool_sizes(welcome.pools, "welcome.pools")
        pools = tuple(pool_from_pb(pool, f"welcome.pools[{index}]") for index, pool in enumerate(welcome.pools))
        check_pools(pools, "welcome.pools", addresses=False)
        # Prefill has compared the models, and may be the only one that knows of which attention they are.
        model = replace(self.shape.model, attention=self.shape.model.attention or Attention.MLA)
        layout = pair.layout or self.shape.layout
        theirs = replace(self.shape, rank=pair.ref.rank, layout=layout, pools=pools, model=model)
        owed = topology.owed_part(theirs, self.shape)
        self._peer_pages[pair.ref] = PeerPages([] if owed.empty else pools, self.config.pools)
        pair.verify = True

    async def _compare(self, room: DecodeRoom) -> None:
        """On a thread of its own: a gigabyte takes about a second."""
        try:
            comparing = asyncio.get_running_loop().run_in_executor(None, self._differences, room)
            self._comparing.add(comparing)
            comparing.add_done_callback(self._comparing.discard)
            failure = await comparing
        except Exception:  # also where the system has no thread left
            failure = self._count_error(f"comparing room {room.key.room} failed")
        if not self.closed:
            self.core.on_compared(room, failure)
            self._pump()

    def _differences(self, room: DecodeRoom) -> Failure | None:
        destination = room.destination
        for part in room.to_compare:
            assert destination is not None
            pages, peer = self._peer_pages[part.pair.ref], part.pair.ref
            failure = pages.compare(destination, part.checksums, peer, self.ref, lambda: self.closed or room.ended)
            if failure is not None:
                return failure
        return None

    def _pace_of(self, welcome: pb.Welcome) -> tuple[int, int, int]:
        """Ticks between our heartbeats, with rooms and without, and after how many without a word the peer is given up:
        as it asks, within reason, and never sooner than after our own idle timeout."""
        timing = self.config.timing
        heartbeat, quiet, idle_timeout = timing.heartbeat, timing.quiet_heartbeat, timing.idle_timeout
        if welcome.HasField("heartbeat"):
            asked = timing.ticks(max(1, welcome.heartbeat.ToMilliseconds()))
            heartbeat, quiet = min(heartbeat, asked), min(quiet, asked)
        if welcome.HasField("idle_timeout"):
            asked = min(welcome.idle_timeout.ToMilliseconds(), LONGEST_IDLE_TIMEOUT_MS)
            idle_timeout = max(idle_timeout, timing.ticks(asked))
        return heartbeat, quiet, idle_timeout

    async def _write(self, session: DecodeSession, stream: Stream) -> None:
        core, call = self.core, session.call
        assert call is not None
        try:
            while not session.closing:
                await session.news()
                since = session.ready_at
                entries = []
                if stream.pair.stream is stream:
                    entries = core.flush(stream.pair)
                    if stream.pair.pending_rooms:
                        session.wake()
                        session.ready_at = since
                if entries:
                    too_large: list[DecodeEntry] = []
                    for frame in wire.encode_requests(entries, session.max_frame_bytes, too_large):
                        await call.write(frame)
                        self._hand_offs.sent(len(frame.rooms) + len(frame.forget_rooms))
                    self._hand_offs.notified(time.monotonic() - since, len(entries))
                    self._fail_too_large(too_large, session.max_frame_bytes)
                elif session.heartbeat_due:
                    session.heartbeat_due = False
                    await call.write(_HEARTBEAT)
            await call.write(pb.SessionRequest(goodbye=pb.Goodbye()))
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, and says why
        except Exception:
            self._count_error(f"writing to {stream.pair.ref} failed")
            call.cancel()

    def _fail_too_large(self, entries: Sequence[DecodeEntry], limit: int) -> None:
        """Rooms whose pages the peer's frames cannot carry; nothing of them was said, the others go on."""
        for entry in entries:
            room = self.core.rooms.get(entry.key)
            if room is not None and entry.destination is not None:
                error = wire.too_large(entry.destination, limit)
                self.core.fail(room, Failure.of(error, str(self.ref)))
        if entries:
            self._pump()

    def _hello(self, stream: Stream) -> pb.SessionRequest:
        shape = self.shape
        hello = pb.Hello(
            to=rank_ref_to_pb(stream.pair.ref),
            stream=stream.number,
            layout=layout_to_pb(shape.layout),
            pools=[pool_to_pb(pool) for pool in shape.pools],
            aux_item_bytes=shape.aux_item_bytes,
            data_plane=shape.data_plane,
            data_plane_address=self.plane.address(),
            max_frame_bytes=self.config.max_frame_bytes,
            expected=wire.part_to_pb(
                topology.wanted_part(shape, stream.pair.ref.rank[1:], stream.pair.layout, stream.pair.layers)
            ),
            model=model_to_pb(shape.model),
            verify=self.config.verify,
        )
        hello.opener.CopyFrom(rank_ref_to_pb(self.ref))
        if not stream.pair.welcomed:
            waiting = itertools.islice(stream.pair.rooms, wire.MOST_WAITING_ROOMS)
            hello.waiting_rooms.extend(wire.room_keys_to_pb(waiting))
        return pb.SessionRequest(hello=hello)

    # Between the core and the rest.

    def _tick(self) -> None:
        for stream, session in self._sessions.items():
            if session.writer is None and session.is_connected:
                self.core.on_connected(stream)
        self.core.tick()
        if len(self._data_addresses) > len(self.core.pairs):
            self._forget_addresses()
        for stream, session in self._sessions.items():
            if self.core.now % (session.heartbeat if stream.pair.rooms else session.quiet_heartbeat) == 0:
                session.beat()

    def _pump(self) -> None:
        work = self.core.take_work()
        for dead in work.dead if self.config.refusal_proves_death else ():
            self._resolver.note_death(dead)
        for room in work.resolves:
            if isinstance(room, ReceiverRoom):
                self._resolver.find_anew(room)
        for lost in work.lost_peers:
            self._resolver.await_restart(lost)
        for stream in () if self.closed else work.dials:  # a goodbye that answers ours is a break to the core
            self._sessions[stream] = DecodeSession()
            self._begin(self._dial(stream), f"session {stream.pair.ref}")
        for stream in work.closes:
            session = self._sessions.get(stream)
            if session is not None:
                session.cancel()
        for pair in work.tell:
            if pair.stream is not None:
                session = self._sessions.get(pair.stream)
                if session is not None:
                    session.wake()
        for room in work.compares:
            self._begin(self._compare(room), f"compare room {room.key.room}")
        self._observe(work)

    def _begin(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """A task that ``stop`` ends."""
        task = self._start(coroutine, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _connections(self, pair: DecodePair) -> frozenset[str] | None:
        """Over which that peer's bytes could still arrive (rule 8, pages by evidence); None: not known yet."""
        address = self._data_addresses.get(pair.ref)
        return frozenset() if not address else self._dead_peers.connections(pair, address)

    def _forget_addresses(self) -> None:
        for ref in [ref for ref in self._data_addresses if ref not in self.core.pairs]:
            del self._data_addresses[ref]
            self._peer_pages.pop(ref, None)
        self._dead_peers.forget(lambda pair: self.core.pairs.get(pair.ref) is pair)
        self._death_proofs.forget_all_but(self.core.pairs)

    def _deliver_aux(self, room: DecodeRoom) -> Failure | None:
        index, row = room.aux_index, room.aux or b""
        if not self.config.aux or index is None:
            return None
        if len(row) != self.aux.row_bytes:
            return Failure.of(InvalidRequest.of("aux", len(row), f"{self.aux.row_bytes} bytes"), str(self.ref))
        handle = room.handle
        assert isinstance(handle, TimedHandle)
        if handle.claim():  # after its abort a row is the engine's again
            self.aux.write(index, row)
            handle.yield_claim()
        return None


_HEARTBEAT = pb.SessionRequest()
