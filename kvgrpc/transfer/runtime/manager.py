"""The common part of managers: engine threads append and wake, one loop thread owns the core, ticks are its time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
import uuid
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.errors import Failure, Internal, Reason, ServerDraining, TooManyRequests
from kvgrpc.model import UNKNOWN_MODEL, Layout, ModelIdentity, Pool, RankRef, Role
from kvgrpc.observability.hand_offs import HandOff, HandOffs
from kvgrpc.observability.tracing import spans_of
from kvgrpc.rpc.turns import PIECE_SECONDS, Turns
from kvgrpc.rpc.waking import Lending, Waker
from kvgrpc.transfer.aux_rows import AuxBuffer, AuxRows
from kvgrpc.transfer.layout.topology import Shape
from kvgrpc.transfer.protocol.failures import RETRY_SECONDS
from kvgrpc.transfer.protocol.page_check import PoolSize
from kvgrpc.transfer.protocol.pairs import SilentPair
from kvgrpc.transfer.protocol.prefill.fan_out import PlaceHandle
from kvgrpc.transfer.protocol.types import (
    POLL_FAILED,
    POLL_SUCCESS,
    Bounds,
    Destination,
    Handle,
    LostPair,
    RoomKey,
    Timing,
)
from kvgrpc.transfer.runtime.boundary import EngineHandle
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from kvgrpc.transfer.runtime.room_tables import AnyRoom, Record, RoomTables
from kvgrpc.transfer.runtime.timed_handle import waiters_lock

logger = logging.getLogger(__name__)
MAX_FRAME_BYTES = 4 * 1024 * 1024
COMMANDS = 262_144
_COMMANDS_AT_ONCE = 1024
# For how long, at most, a poll gives way: with ``EVERY_SECONDS`` a quarter of a thread that does nothing but look.
_GIVE_WAY_SECONDS = 50e-6
# Up to so many open rooms of a manager: more than an engine has whose requests come one after another.
_FEW_ROOMS = 1024
ENTRIES_IN_A_TURN = 1024
_ENTRIES_AT_ONCE, _TURN_SECONDS = 64, 0.01


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The facts of its rank that a manager needs."""

    ref: RankRef
    layout: Layout
    pools: tuple[Pool, ...]
    aux: tuple[AuxBuffer, ...] = ()
    timing: Timing = field(default_factory=Timing)
    bounds: Bounds = field(default_factory=Bounds)
    max_frame_bytes: int = MAX_FRAME_BYTES
    commands: int = COMMANDS
    poll_gives_way: bool = True
    model: ModelIdentity = UNKNOWN_MODEL
    refusal_proves_death: bool = True
    verify: bool = False
    check_pages: bool = False
    gather_bytes: int = 0
    tracing: bool = False
    # Rooms are those of pulls between caches, for whoever reads traces.
    pulls: bool = False
    # Sessions are dialled over TLS, whose handshake waits for the interpreter of the side that is dialled.
    tls: bool = False
    # Of whoever opens a session; None: any, as where caches lend to each other.
    opener_role: Role | None = Role.DECODE

    @property
    def pool_sizes(self) -> list[PoolSize]:
        return [PoolSize(pool.name, pool.pages) for pool in self.pools]

    def shape(self, data_plane: str) -> Shape:
        aux = tuple(buffer.item_bytes for buffer in self.aux)
        return Shape(self.ref.rank, self.layout, self.pools, aux, data_plane, self.model)


T = TypeVar("T")
Entry = TypeVar("Entry")


class Loop(Protocol):
    """The process's one asyncio loop in its own thread (kvgrpc.rpc.loop). ``task`` supervises: a task that fails is
    logged, counted, and makes the process unhealthy."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]: ...

    @property
    def work_waits(self) -> bool:
        """True if its thread would run now if it had the interpreter; any thread may ask."""

    @property
    def turns(self) -> int:
        """A number that moves whenever its thread has the interpreter; any thread may ask."""


Ended = TypeVar("Ended", bound=AnyRoom, covariant=True)


class _Work(Protocol[Ended]):
    """The part of both cores' work that is for people."""

    @property
    def failed(self) -> Iterable[Ended]: ...

    @property
    def ended(self) -> Sequence[Ended]: ...

    @property
    def lost(self) -> Sequence[LostPair]: ...

    @property
    def silent(self) -> Sequence[SilentPair]: ...


class TransferManager(RoomTables[Record]):
    """The rank's side of all hand-offs. Engine threads call ``post`` (through senders and receivers); everything else
    happens on the loop thread. Subclasses own the core: PrefillManager and DecodeManager.
    """

    role = ""

    def __init__(self, config: TransferConfig, plane: DataPlane, loop: Loop) -> None:
        super().__init__(HandOffs(self.role, logger))
        self.config = config
        self.plane = plane
        self._guarded = GuardedPlane(plane)
        self.shape = config.shape(plane.name)
        self.pool_names = tuple(pool.name for pool in config.pools)
        self.own_pages = tuple(pool.pages for pool in config.pools)
        self.closed = False
        self.draining = False
        self.errors = 0
        self.aux = AuxRows(config.aux)
        self._pid = os.getpid()
        self._forks = _forks
        self._loop_thread = loop
        self._loop = loop.loop
        self._start = loop.task
        self._waker = Waker(self._loop, self._run)
        self._lending = Lending(config.poll_gives_way)
        self._most_commands = config.commands
        self._commands: deque[tuple[Any, ...]] = deque()
        self._waking = False
        # Called where a hand-off goes on, so that what strangers ask waits a little.
        self._hurry: Callable[[], None] = lambda: None
        self._ticker: asyncio.Task[None] | None = None
        self._conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        # What the handles of rooms call; None, which costs a room nothing, until an engine asked for ``fileno``.
        self.on_change: _Changes | None = None
        self._spans = spans_of(self.role, config.ref, pulls=config.pulls) if config.tracing else None
        # Of each pool, and of them all: one list of pages addresses every pool.
        self._pool_page_bytes = tuple(pool.page_bytes for pool in config.pools)
        self._page_bytes = sum(self._pool_page_bytes)

    # For senders and receivers, on any thread.

    @property
    def ref(self) -> RankRef:
        return self.config.ref

    def refusal(self, key: RoomKey) -> Failure | None:
        """Why no handle can be made now: closed, draining, forked, or the command queue is full. Never raises."""
        if self.closed or self.draining:
            return self._leaving()
        if self._forks != _forks:
            text = f"the manager of {self.ref} belongs to process {self._pid}; start workers with spawn, not fork"
            return Failure(Reason.FEATURE_DISABLED, text, {"feature": "fork", "howToEnable": "spawn"}, str(self.ref))
        return self.overflow(key) if len(self._commands) >= self._most_commands else None

    @property
    def queue_full(self) -> bool:
        """True if the command queue is full, so that the loop thread can take no further call now."""
        return len(self._commands) >= self._most_commands

    def overflow(self, key: RoomKey) -> Failure:
        """The failure of a room whose call the full command queue could not take."""
        waiting, limit = len(self._commands), self._most_commands
        error = TooManyRequests(
            f"room {key.room}: {waiting} calls wait for the loop thread",
            metadata={"limit": limit, "value": waiting, "scope": "command_queue"},
            retry_after=RETRY_SECONDS,
        )
        return Failure.of(error, str(self.ref))

    def post(self, action: Callable[..., None], *arguments: Any) -> None:
        """Appends a call for the loop thread, and wakes the loop, at most once for all that waits. ``action``: a method
        of the class, not of this object, so that a call is one tuple: thousands wait, and the garbage collector looks
        at each.
        """
        self._commands.append((action, *arguments))
        if not self._waking:
            self._wake()

    def post_later(self, action: Callable[..., None], *arguments: Any) -> None:
        """``post`` for what nobody waits for: the loop takes it with the next call that wakes it, at the latest with
        the next tick. A wake is an interrupt to another core, and its thread wants the interpreter at once.
        """
        self._commands.append((action, *arguments))
        if not self._waking and (self.closed or len(self._commands) >= _COMMANDS_AT_ONCE):
            self._wake()

    def _wake(self) -> None:
        self._waking = True
        self._lending.work_was_given()
        try:
            self._waker.wake()
            if self.closed:  # nobody may hear the waker any more
                self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop has ended with its process
            self.closed = True

    def fail(self, handle: EngineHandle, failure: Failure) -> None:
        """The engine ends a room; appended for the loop thread."""
        self.post(TransferManager._take_failure, handle, failure)

    def give_way(self) -> None:
        """Lends the interpreter to the threads that move rooms on, if one of them waits for it and the engine lets none
        in by itself: for some microseconds, and once in a while only, however often an engine looks. For a thread that
        just looked at an open room. With many rooms at once it lends nothing: turns of the loop that come sooner take
        fewer rooms each, and those cost more.
        """
        now, lending = time.monotonic(), self._lending
        if now >= lending.next_at:
            waits = self.core.open_rooms <= _FEW_ROOMS and self._work_waits()
            if lending.look(now, waits, self._progress()):
                time.sleep(_GIVE_WAY_SECONDS)

    def fileno(self) -> int:
        """A file descriptor for an event loop of the engine's own (epoll, asyncio ``add_reader``): readable when a room
        of this manager changed its poll or gave its pages back. Read 8 bytes of it (``os.eventfd_read``), then look at
        the rooms. Ask for it before the first room: of rooms that were made before it tells nothing. Linux; it is the
        manager's and ends with it.
        """
        with waiters_lock:
            if self.on_change is None:
                self.on_change = _Changes()
        return self.on_change.fd

    # Life, on the loop thread.

    def start(self) -> None:
        self._hurry = Turns.of_this_loop().hurry
        self._ticker = self._start(self._tick_for_ever(), "transfer-ticks")

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until the condition holds, looking once a tick; False when it did not within ``seconds``."""
        if condition():
            return True
        done = asyncio.get_running_loop().create_future()
        self._conditions.append((condition, done))
        await asyncio.wait([done], timeout=seconds)
        done.cancel()
        return condition()

    async def stop(self) -> None:
        self.closed = True
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._hand_offs.sort_in(within=0.0)
        self._waker.close()

    @property
    def healthy(self) -> bool:
        """False once the ticks stopped; before ``start`` and after ``stop`` too."""
        return self._ticker is not None and not self._ticker.done()

    # For people, on the loop thread; their tables are in RoomTables.

    def cancel(self, key: RoomKey, failure: Failure) -> bool:
        """Fails the room; False when there is none."""
        record = self._record(key)
        if record is None:
            return False
        self.core.fail(record, failure)
        self._pump()
        return True

    @property
    def held_pages(self) -> int:
        return 0

    @property
    def held_pages_limit(self) -> int:
        return self.config.bounds.held_pages

    def open_rooms(self) -> int:
        """Returns how many rooms have not ended. Any thread may call it; it does not wait."""
        return self.core.open_rooms

    def depths(self) -> Mapping[str, int]:
        writes, nbytes = self._guarded.in_flight()
        return {
            "commands_waiting": len(self._commands),
            "data_plane_writes_in_flight": writes,
            "data_plane_bytes_in_flight": nbytes,
        }

    # For subclasses.

    def _leaving(self) -> Failure:
        """Why there can be no new room any more."""
        what = "is closed" if self.closed else "drains"
        return Failure(Reason.SERVER_DRAINING, f"the manager of {self.ref} {what}", {}, str(self.ref))

    def _refuse_late(self, handle: Handle) -> None:
        """It was made while the manager was being closed."""
        handle.release_safe = True
        handle.fail(self._leaving())

    def _fail_all(self, rooms: Mapping[RoomKey, Record]) -> None:
        """Before the ticks end, so that no handle waits for ever."""
        failure = Failure.of(ServerDraining(f"{self.ref} drained before the room ended"))
        for record in list(rooms.values()):
            self.core.fail(record, failure)
        self._pump()

    def _work_waits(self) -> bool:
        """True if a thread of ours would run now if it had the interpreter."""
        return self._loop_thread.work_waits

    def _progress(self) -> int:
        """Returns a number that moves whenever a thread of ours has the interpreter."""
        return self._loop_thread.turns

    @abstractmethod
    def _tick(self) -> None: ...

    async def _in_turns(self, entries: Iterable[Entry], apply: Callable[[Sequence[Entry]], None]) -> None:
        """Applies the entries of one frame, at most some hundred a turn of the loop that all sessions share, fewer
        where they take long: those that fail rooms cost many times the ordinary ones. What is behind its first turn
        waits as calls do: a frame of tens of thousands is no hand-off that goes on.
        """
        rest, applied, end = iter(entries), 0, time.monotonic() + _TURN_SECONDS
        turns = Turns.of_this_loop()
        some = list(itertools.islice(rest, _ENTRIES_AT_ONCE))
        while some:
            apply(some)
            applied += len(some)
            some = list(itertools.islice(rest, _ENTRIES_AT_ONCE))
            if some and (applied >= ENTRIES_IN_A_TURN or time.monotonic() > end):
                self._pump()
                await asyncio.sleep(0)
                await turns.take_as_a_call()
                applied, end = 0, time.monotonic() + (PIECE_SECONDS if turns.hurries else _TURN_SECONDS)
        if applied:
            self._pump()

    def _run(self) -> None:
        self._waking = False
        commands = self._commands
        try:
            for _ in range(min(len(commands), _COMMANDS_AT_ONCE)):
                command = commands.popleft()
                try:
                    command[0](self, *command[1:])
                except Exception:
                    self._fail_room_of(command, self._count_error(f"{command[0].__name__} failed"))
            self._pump()
        finally:  # without memory even counting an error fails, and those behind it wait
            if commands and not self._waking:
                self._waking = True
                self._loop.call_soon(self._run)

    def _take_all(self) -> None:
        """Takes all that engines asked for until now."""
        for _ in range(0, len(self._commands), _COMMANDS_AT_ONCE):
            self._run()

    def _fail_room_of(self, command: tuple[Any, ...], failure: Failure) -> None:
        """It is an engine's call, which failed: its room would wait for its deadline. Next, before what the engine said
        later of that room."""
        for handle in command:
            if isinstance(handle, EngineHandle) and command[0] is not TransferManager._take_failure:
                self._commands.appendleft((TransferManager._take_failure, handle, failure))

    def _take_failure(self, handle: EngineHandle, failure: Failure) -> None:
        if handle.record is not None:
            self.core.fail(handle.record, failure)
        if handle.poll is not POLL_FAILED and handle.poll is not POLL_SUCCESS:  # the core never had the room
            handle.record = None
            handle.release_safe = True
            handle.fail(failure)

    async def _tick_for_ever(self) -> None:
        """One tick a period of our own running time: after a stop there is one, not hundreds (3, break and loss)."""
        period = self.config.timing.tick_seconds
        while True:
            await asyncio.sleep(period)
            try:
                self._hand_offs.sort_in()
                if self._commands:
                    self._run()
                self._tick()
                self._pump()
                self._look_at_conditions()
            except Exception:
                self._count_error("tick failed")

    def _observe(self, work: _Work[Record]) -> None:
        """Counts what ended, says what failed, and keeps the last of both: people may still ask."""
        for record in work.failed:
            self._keep_failed(record)
        now = time.monotonic() if work.ended else 0.0
        for room in work.ended:
            handle = room.handle
            if isinstance(handle, PlaceHandle):
                handle = handle.sender
            hand_off = self._hand_off(room, handle, now)
            if room.failure is None:
                self._hurry()
                self._hand_offs.succeeded(hand_off)
            else:
                self._hand_offs.failed(hand_off)
            if self._spans is not None:
                self._spans.end(getattr(room, "span", None), self._begun(hand_off, room))
            if isinstance(handle, EngineHandle):  # else each keeps the other until a full garbage collection
                handle.record = None
        for peer, how, rooms in work.lost:
            self._hand_offs.lost(self.ref, peer, how, rooms)
        for pair in work.silent:
            self._hand_offs.silent(self.ref, *pair)

    def _hand_off(self, room: Record, handle: Handle | None, now: float) -> HandOff:
        began = ready = moving = 0.0
        if isinstance(handle, EngineHandle):
            began, ready, moving = handle.began, handle.ready_at, handle.moving_at
        elif handle is not None:
            began = handle.began
        key, count = room.key, room.page_count
        nbytes = 0 if room.destination is None else self._bytes_of(count, room.destination)
        peers, traceparent, failure = self._peers(room), room.traceparent, room.failure
        return HandOff(key.room, key.attempt, peers, began, ready, moving, now, count, nbytes, traceparent, failure)

    def _begun(self, hand_off: HandOff, room: Record) -> HandOff:
        """A span needs a beginning: of a room for which no engine made a handle, when a peer named it."""
        return hand_off if hand_off.began else hand_off._replace(began=hand_off.ended - self._row(room).age_seconds)

    def _bytes_of(self, count: int, pages: Destination) -> int:
        """Of all of a room's pages, in all pools of this rank; ``count``: of the first."""
        if pages.others is None:
            return count * self._page_bytes
        counts = count, *(other.count for other in pages.others)
        return sum(count * nbytes for count, nbytes in zip(counts, self._pool_page_bytes, strict=False))

    def _look_at_conditions(self) -> None:
        for condition, done in self._conditions:
            if not done.done() and condition():
                done.set_result(None)
        self._conditions = [waiting for waiting in self._conditions if not waiting[1].done()]

    def _count_error(self, what: str) -> Failure:
        """Of the exception that is being handled; what may be said of it to others."""
        self.errors += 1
        request_id = uuid.uuid4().hex
        logger.exception("%s: %s, request id %s", self.ref, what, request_id)
        return Failure.of(Internal.of(what, request_id), str(self.ref))


class _Changes:
    """Something of a room changed that its engine may wait for; a burst of changes is one event. Handles keep it, and
    with it the descriptor, which must not be another's while one of them may write.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False  # as that of a Waker

    def __call__(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: nobody looked for 2^64 changes
            os.eventfd_write(self.fd, 1)


# How many forks lie behind this process: cheaper to compare than a process id is to ask for.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
