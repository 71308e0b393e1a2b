"""The manager of a prefill rank: serves sessions, feeds the data plane, answers its senders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from kvgrpc.dataplane.base import DataPlane, Outcome
from kvgrpc.errors import (
    Failure,
    InvalidRequest,
    KvGrpcError,
    ParallelLayoutMismatch,
    ServerDraining,
)
from kvgrpc.model import RankRef, Role
from kvgrpc.rpc.turns import Turns
from kvgrpc.rpc.waiters import Waiters
from kvgrpc.rpc.within import within
from kvgrpc.transfer import wire
from kvgrpc.transfer.layout.plan import check_each_pool, check_pages
from kvgrpc.transfer.layout.pools import pages_of_pools
from kvgrpc.transfer.protocol.page_check import ReadPages
from kvgrpc.transfer.protocol.prefill.chunks import Chunk
from kvgrpc.transfer.protocol.prefill.core import PrefillCore, PrefillPair, PrefillRoom
from kvgrpc.transfer.protocol.prefill.room import Submission
from kvgrpc.transfer.protocol.types import Align, RoomKey, RoomState
from kvgrpc.transfer.runtime.boundary import EngineHandle, Reader, SentPages
from kvgrpc.transfer.runtime.hello import read_hello
from kvgrpc.transfer.runtime.manager import (
    Loop,
    TransferConfig,
    TransferManager,
)
from kvgrpc.transfer.runtime.sessions import PrefillSession
from kvgrpc.transfer.runtime.writing.worker import Outcomes, PeerMemory, TransferWorker
from kvgrpc.transfer.tables import PartRow, RoomRow, SessionRow
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import (
    failure_to_pb,
    pool_to_pb,
    rank_ref_to_pb,
)

logger = logging.getLogger(__name__)
_GOODBYE_WITHIN_SECONDS = 1.0
_LONGEST_TURN_TICKS = 50
MAX_SOUGHT_ROOMS = 65_536


class PrefillManager(TransferManager[PrefillRoom]):
    """See the module. What senders use (see runtime.boundary) is thread-safe; the rest runs on the loop."""

    role = "prefill"
    side = Role.PREFILL
    core: PrefillCore

    def __init__(self, config: TransferConfig, plane: DataPlane, loop: Loop) -> None:
        super().__init__(config, plane, loop)
        self.core = PrefillCore(
            config.ref,
            timing=config.timing,
            bounds=config.bounds,
            data_plane=plane.name,
            read=ReadPages(config.pool_sizes[0]) if config.check_pages else None,
        )
        self._worker = TransferWorker(self._guarded, config.pools, self._report, config.gather_bytes)
        self._turns, self._ticks_in_turn = 0, 0
        # Of a pair with an open room, and of one without.
        self._heartbeats = config.timing.heartbeat, config.timing.quiet_heartbeat
        self._sessions: dict[PrefillPair, PrefillSession] = {}
        self._sought = Waiters[RoomKey](
            MAX_SOUGHT_ROOMS, "rooms sought", draining=f"{self.ref} drains: a room without a sender gets none here"
        )

    @property
    def _hello_within(self) -> float:
        """Seconds; a decode that dialled may be silent, as one that was welcomed may (3, break and loss)."""
        return self.config.timing.silence * self.config.timing.tick_seconds

    # For senders, on any thread: appended for the loop thread.

    def claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        self.post(PrefillManager._take_claim, key, handle, decode)

    def send(
        self, handle: EngineHandle, sent: SentPages, aux: bytes | None, expectation: tuple[int | None, Align] | None
    ) -> None:
        self.post(PrefillManager._take_chunk, handle, sent, aux, expectation)

    # What they appended, on the loop thread.

    def _take_claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        if self.closed:
            self._refuse_late(handle)
            return
        try:
            record = self.core.claim(key, handle, decode)
        except Exception:
            taken = self.core.find(key)
            if taken is not None and taken.handle is handle:  # it failed after the core had it: the room is to fail too
                handle.record = taken
            raise
        handle.record = None if record is None or record.ended else record
        self._sought.wake(key)

    def _take_chunk(
        self, handle: EngineHandle, sent: SentPages, aux: bytes | None, expectation: tuple[int | None, Align] | None
    ) -> None:
        record: PrefillRoom | None = handle.record
        if record is None:
            return
        pages, others = pages_of_pools(sent.pages)
        chunk = Chunk(pages, sent.start, sent.is_last, sent.wait, others)
        try:
            check_each_pool(check_pages, pages, others, self.own_pages, self.pool_names)
        except KvGrpcError as error:
            self.core.fail(record, Failure.of(error, str(self.ref)))
            return
        self.core.send(record, chunk, aux, expectation)

    # A session, on the loop thread.

    async def serve(
        self, read: Reader, write: Callable[[pb.SessionResponse], Awaitable[None]], caller: str = ""
    ) -> None:
        """One stream from Hello to Goodbye, of ``caller`` ("host:port"). Refusals travel in Goodbye (1, opening);
        undecodable bytes end it in the library.
        """
        session = await self._greet(read, write, caller)
        if session is None:
            return
        Turns.of_this_loop().let_go()
        session.caller = caller
        reading = self._start(self._read(session, read), f"session-read {session.ref}")
        try:
            self._pump()  # 2, one stream: the older stream is told to end before the newer is welcomed
            await write(self._welcome(session))
            self._attach(session)
            await self._write(session)
        finally:
            reading.cancel()
            session.ended()
            self._sessions_drop(session)
            self.core.on_end(session, session.ref)

    async def locate(self, keys: Sequence[RoomKey], timeout: float) -> list[RoomKey]:
        """Returns which of the rooms have a sender here; waits up to ``timeout`` seconds for the first. On the loop
        thread.

        Raises TooManyRequests, and ServerDraining where no sender exists and none will be accepted.
        """
        found = self._with_sender(keys)
        if not found:
            await self._sought.wait(keys, timeout)
            found = self._with_sender(keys)
        return found

    # Life.

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Refuses new rooms, waits for running ones, then cancels them; (nothing is left, open rooms)."""
        self.draining = True
        self.core.drain()
        self._sought.drain()
        self._pump()
        await self.until(lambda: self.core.open_rooms == 0, grace)
        self._fail_all(self.core.rooms)
        await self.until(lambda: self.core.open_writes == 0, grace)
        return self.core.open_writes == 0, self.core.open_rooms

    def undrain(self) -> None:
        self.draining = False
        self.core.undrain()
        self._sought.undrain()

    def on_plane_closed(self) -> None:
        """No write of this process is left anywhere: UNKNOWN writes become STOPPED (rule 7, writes)."""
        self.core.on_engine_destroyed()
        self._pump()

    async def stop(self) -> None:
        """Ends all sessions with Goodbye, after what was still to be said."""
        self._sought.drain()
        self.closed = True
        self._fail_all(self.core.rooms)
        sessions = list(self._sessions.values())
        for session in sessions:
            session.end(self._leaving())
        if sessions:
            await asyncio.wait([session.over for session in sessions], timeout=_GOODBYE_WITHIN_SECONDS)
        await super().stop()

    def close_worker(self, deadline: float) -> bool:
        """Ends the transfer thread; False when a write is still running."""
        return self._worker.close(deadline)

    @property
    def healthy(self) -> bool:
        return super().healthy and self._worker.healthy and self._ticks_in_turn < _LONGEST_TURN_TICKS

    @property
    def has_unknown_writes(self) -> bool:
        return self.core.has_unknown_writes

    @property
    def is_writing(self) -> bool:
        """True while a write has not ended."""
        return bool(self.core.open_writes)

    @property
    def bytes_written(self) -> int:
        return self._worker.bytes_written

    def depths(self) -> Mapping[str, int]:
        core = self.core
        waiting, running = self._worker.depths
        return {
            **super().depths(),
            "writes_waiting": waiting,
            "writes_running": running,
            "unknown_writes": core.unknown_writes,
            "peers_refused": sum(pair.unknown_writes > core.bounds.unknown_writes for pair in core.pairs.values()),
        }

    # Tables.

    def sessions(self) -> Iterator[SessionRow]:
        seconds = self.config.timing.tick_seconds
        return (
            SessionRow(
                pair.ref,
                self._sessions[pair].caller if pair in self._sessions else "",
                pair.state,
                pair.number,
                pair.open_rooms,
                (self.core.now - pair.heard_at) * seconds,
                len(pair.pending_rooms),
                self._hand_offs.of_pair(pair.ref),
            )
            for pair in tuple(self.core.pairs.values())
        )

    def _keys(self) -> list[RoomKey]:
        """One of each room, to however many decode ranks it is owed."""
        rooms = self.core.rooms
        lone = {key.at(0) for key in rooms if key.place}  # of those whose first place may have ended before
        return [*(key for key in rooms if not key.place), *(key for key in lone if key not in rooms)]

    def _record(self, key: RoomKey) -> PrefillRoom | None:
        return self.core.find(key)

    def _state(self, record: PrefillRoom) -> RoomState:
        return record.state_of_all

    def _peers(self, record: PrefillRoom) -> Sequence[RankRef]:
        if record.owner is not None and len(record.siblings) == 1:
            return (record.owner.ref,)  # most rooms, without a list to be made
        return [part.owner.ref for part in record.siblings if part.owner is not None]

    def _row(self, record: PrefillRoom) -> RoomRow:
        parts = tuple(
            PartRow(part.owner.ref, part.state, part.writes, part.pages_done)
            for part in record.siblings
            if part.owner is not None
        )
        pages = next((each.page_count for each in record.siblings if each.destination is not None), 0)
        age = (self.core.now - record.created_at) * self.config.timing.tick_seconds
        return RoomRow(
            record.key.at(0),
            Role.PREFILL,
            record.state_of_all,
            parts,
            pages,
            any(each.ended and each.open_writes for each in record.siblings),
            any(each.sender_live for each in record.siblings),
            age,
            record.failure_of_all,
            record.traceparent,
        )

    # The session's two directions.

    async def _greet(
        self, read: Reader, write: Callable[[pb.SessionResponse], Awaitable[None]], caller: str
    ) -> PrefillSession | None:
        failure: Failure | None = None
        first: pb.SessionRequest | None = None
        try:
            first = await within(self._hello_within, read())
            if first is not None:
                return self._open(first, write)
        except ParallelLayoutMismatch as error:
            failure = Failure.of(error, str(self.ref))
            self.core.on_refused_hello(wire.waiting_rooms(first), wire.opener_engine(first), error)
            self._pump()
        except KvGrpcError as error:
            failure = Failure.of(error, str(self.ref))
        except asyncio.TimeoutError:
            late = InvalidRequest.of("hello", "nothing", f"the first message, within {self._hello_within:g} s")
            failure = Failure.of(late, str(self.ref))
        if failure is not None:
            self._hand_offs.refused(self.ref, caller, failure)
        await _say(write, _goodbye(failure))
        return None

    def _open(self, first: pb.SessionRequest, write: Callable[[pb.SessionResponse], Awaitable[None]]) -> PrefillSession:
        if self.closed:
            raise ServerDraining(f"{self.ref} is closing; use another prefill")
        hello = read_hello(first, self.config, self.shape, self.aux.row_bytes)
        known = self.core.pairs.get(hello.ref)
        if known is not None and isinstance(known.peer, PeerMemory) and known.peer.pools != hello.pools:
            raise InvalidRequest.of("hello.pools", "others", "those that this incarnation said before")
        if known is not None and (known.places, known.place) != (hello.places, hello.place):
            raise InvalidRequest.of("hello.layout", hello.layout, "the one that this incarnation said before")
        session = PrefillSession(hello.ref, write, [(pool.name, pool.pages) for pool in hello.pools])
        session.max_frame_bytes, session.verify = hello.max_frame_bytes, hello.verify
        memory = PeerMemory(hello.pools, hello.data_plane_address, owes=not hello.part.empty, verify=hello.verify)
        error = self.core.on_hello(session, hello.ref, hello.to, hello.stream, memory)
        if error is not None:
            raise error
        pair = self.core.pairs[hello.ref]
        pair.sends_aux, pair.verify = hello.part.aux, hello.verify
        pair.place, pair.places = hello.place, hello.places
        pair.parts, pair.pools = hello.parts, len(hello.pools)
        self._sessions[pair] = session
        return session

    def _welcome(self, session: PrefillSession) -> pb.SessionResponse:
        timing = self.config.timing
        welcome = pb.Welcome(max_frame_bytes=self.config.max_frame_bytes, data_plane_address=self.plane.address())
        welcome.rank.CopyFrom(rank_ref_to_pb(self.ref))
        if session.verify:
            welcome.verify = True
            welcome.pools.extend(pool_to_pb(pool.without_addresses()) for pool in self.config.pools)
        welcome.heartbeat.FromMilliseconds(timing.milliseconds(timing.quiet_heartbeat))
        welcome.idle_timeout.FromMilliseconds(timing.milliseconds(timing.idle_timeout))
        return pb.SessionResponse(welcome=welcome)

    async def _read(self, session: PrefillSession, read: Reader) -> None:
        core, ref, pool_pages = self.core, session.ref, session.pool_pages
        failure: Failure | None = None
        try:
            while True:
                message = await _next(read)
                if message is None:
                    break
                if message.rooms or message.forget_rooms:
                    wire.check_frame(message, self.config.max_frame_bytes)
                    self._hand_offs.heard(len(message.rooms) + len(message.forget_rooms))
                    entries = wire.parse_request(message, pool_pages, self.own_pages)
                    await self._in_turns(entries, lambda some: core.on_frame(session, ref, some))
                else:
                    core.on_heard(session, ref)
                if message.HasField("goodbye"):
                    break
        except KvGrpcError as error:
            failure = Failure.of(error, str(self.ref))
        except Exception:
            failure = self._count_error(f"a frame of {ref} failed")
        session.end(failure)

    async def _write(self, session: PrefillSession) -> None:
        while not session.closing:
            await session.news()  # of an end too: what was pending is said before goodbye
            since = session.ready_at
            pair = self.core.pairs.get(session.ref)
            entries = []
            if pair is not None and pair.stream is session:
                entries = self.core.flush(pair)
                if pair.pending_rooms:
                    session.wake()
                    session.ready_at = since
            if entries:
                for frame in wire.encode_responses(entries, session.max_frame_bytes):
                    await session.write(frame)
                    self._hand_offs.sent(len(frame.rooms))
                self._hand_offs.notified(time.monotonic() - since, len(entries))
            elif session.heartbeat_due:
                session.heartbeat_due = False
                await session.write(_HEARTBEAT)
        await _say(session.write, _goodbye(session.failure))

    def _attach(self, session: PrefillSession) -> None:
        """Now, so that no write waits for it, and not before: only a session that stands proves somebody there."""
        pair = self.core.pairs.get(session.ref)
        if pair is not None and pair.stream is session:
            self._worker.attach(pair)

    def _sessions_drop(self, session: PrefillSession) -> None:
        for pair, other in list(self._sessions.items()):
            if other is session:
                del self._sessions[pair]

    # Between the core and the rest.

    def _with_sender(self, keys: Sequence[RoomKey]) -> list[RoomKey]:
        return [key for key in keys if self.core.has_sender(key)]

    def _tick(self) -> None:
        self.core.tick()
        self._watch_worker()
        quick, quiet = (self.core.now % each == 0 for each in self._heartbeats)
        for pair, session in self._sessions.items() if quick or quiet else ():
            if quick if pair.open_rooms else quiet:
                session.beat()

    def _work_waits(self) -> bool:
        return self._worker.busy or super()._work_waits()

    def _progress(self) -> int:
        return self._worker.turns + super()._progress()

    def _watch_worker(self) -> None:
        """Notes if the transfer thread stands in one call, the plane's or a ``wait``: in ticks, so a stop of the
        process does not count.
        """
        turns = self._worker.turns
        self._ticks_in_turn = self._ticks_in_turn + 1 if turns == self._turns else 0
        self._turns = turns

    def _pump(self) -> None:
        work = self.core.take_work()
        written: Outcomes | None = []
        if work.submissions:
            self._hurry()
            written = self._worker.write_now(work.submissions)
        if written is None:
            self._worker.submit(work.submissions)
        elif written:
            self._take_outcomes(written)
        for record in work.stops:
            self._worker.stop(record)
        for pair in work.gone:
            self._worker.forget(pair)
        for stream in work.closes:
            if isinstance(stream, PrefillSession):
                stream.end(None)
        for pair in work.tell:
            session = self._sessions.get(pair)
            if session is not None:
                session.wake()
        self._observe(work)
        if written:
            self._pump()

    def _report(self, ended: Outcomes) -> None:
        self.post(PrefillManager._take_outcomes, ended)

    def _take_outcomes(self, ended: Outcomes) -> None:
        failed: list[tuple[Submission, Outcome, Failure]] = []
        for submission, result in ended:
            try:
                self.core.on_outcome(submission, result.outcome, result.detail)
            except Exception:
                failure = self._count_error("the end of a write could not be taken")
                failed.append((submission, result.outcome, failure))
        for each in failed:  # after all of them: one that cannot fail takes no other with it
            self.core.fail_write(*each)


async def _next(read: Reader) -> pb.SessionRequest | None:
    """None too for a stream that broke, or brought what is no message: the library has ended it."""
    try:
        return await read()
    except Exception as error:
        logger.debug("a session ended: %s", error)
        return None


async def _say(write: Callable[[pb.SessionResponse], Awaitable[None]], goodbye: pb.SessionResponse) -> None:
    """A peer may read nothing."""
    with contextlib.suppress(asyncio.TimeoutError):
        await within(_GOODBYE_WITHIN_SECONDS, write(goodbye))


def _goodbye(failure: Failure | None) -> pb.SessionResponse:
    goodbye = pb.Goodbye() if failure is None else pb.Goodbye(failure=failure_to_pb(failure))
    return pb.SessionResponse(goodbye=goodbye)


_HEARTBEAT = pb.SessionResponse()
