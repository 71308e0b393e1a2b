"""A submission as a window of single writes in flight: each has an end of its own, and stopping is quick.

A batch call of Mooncake says -1 for "refused", "failed" and "still running" alike; a single submitted write keeps a
handle until it has ended (and is faster, docs/performance.md). What is in flight is bounded for each peer, not for each
submission, and small: a peer that hangs fails only four writes per time-out of the engine, and what was never submitted
needs no waiting for. It begins with as many writes as make 4 MiB: a page of all layers is no more, and each nap between
two fillings would be a good part of the 2 ms that it takes. It grows when a poll finds that most have ended, because
this process polls late (its GIL is busy): 16 writes of 32 KiB keep TCP busy for half a millisecond, 256 for longer than
the 5 ms that a thread may keep the GIL. After a failed write nothing more goes to that peer until all has ended or one
was done, and then one at a time until one is: writes to a hung peer are bytes that arrive when nobody wants them.

Engine and clock are injected; nothing here knows Mooncake.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvgrpc.dataplane.base import Outcome, Result, U64Array
from kvgrpc.dataplane.ranges import split

PIECE_BYTES = 8 << 20
STALL_SECONDS = 45.0  # longer than any time-out of the engine, which ends writes with more certainty
FEWEST = 8
_CHUNK = 1024  # descriptors that become Python integers at once
_LONGEST_TICK = 1.0
NO_HANDLE = (0, -1, 2**64 - 1)  # "refused" in different versions of Mooncake


class MooncakeEngine(Protocol):
    """The two calls of mooncake.engine.TransferEngine that move bytes."""

    def transfer_submit_write(self, session: str, source: int, destination: int, nbytes: int, /) -> int:
        """A handle, or 0 (refused)."""

    def transfer_check_status(self, handle: int, /) -> int:
        """1 done, 0 running, -1 failed; the handle is gone then. Anything else: unknown."""


class Limits(NamedTuple):
    """The writes that may be in flight to one peer: how many writes at first and at most, and how many bytes at most.

    It begins with more writes while these have at most ``first_bytes`` together. ``FEWEST`` writes are always allowed,
    however large they are.
    """

    writes: int
    most_writes: int
    nbytes: int
    first_bytes: int = 0


class PeerQueue:
    """Writes in flight to one peer, shared by all submissions to it.

    ``ready`` after first contact; ``refused``: why there was none.
    ``unsent(since)``: whether connections that the engine had closed by then, as it does with that of a failed write,
    have bytes left.
    """

    __slots__ = (
        *("__weakref__", "_contact", "active", "bytes_in_flight", "in_flight", "limit", "limits", "ready"),
        *("refused", "session", "unsent"),
    )

    def __init__(self, session: str, limits: Limits, unsent: Callable[[float], bool] = lambda since: False) -> None:
        self.session = session
        self.unsent = unsent
        self.limits = limits
        self.limit = limits.writes
        self._contact = _Contact(0.0, 0.0)
        self.ready = False
        self.refused = ""
        self.in_flight = 0
        self.bytes_in_flight = 0
        self.active = 0

    def await_answer(self, seconds: float, now: float) -> None:
        """First contact has so long from now on, as ``is_overdue`` counts.

        Any thread, beside ``is_overdue`` of another: that looks at one contact, the old or the new one, and who finds
        no refusal any more finds the new one.
        """
        self._contact = _Contact(seconds, now)
        self.refused = ""

    def is_overdue(self, now: float) -> bool:
        """True once first contact had its time. Of a pause between two looks little counts: an engine that held the
        interpreter kept our own thread from taking the answer."""
        return self._contact.is_overdue(now)

    def allowance(self, own: int) -> int:
        """Returns how many writes a submission with ``own`` in flight may start now: its fair share, as far as that is
        free."""
        share = max(1, self.limit // max(1, self.active))
        return min(share - own, self.limit - self.in_flight) if self.ready else 0

    def fits(self, nbytes: int) -> bool:
        """True if the bytes in flight leave room for a write."""
        return self.bytes_in_flight + nbytes <= self.limits.nbytes or self.in_flight < FEWEST

    def enter(self, writes: int, nbytes: int) -> None:
        """Counts one more submission. The first after a pause may use half of the writes that it needed before."""
        if self.limit > 1:
            before = self.limit // 2 if self.active == 0 else self.limit
            first = min(self.limits.first_bytes * writes // max(1, nbytes), self.limits.most_writes)
            self.limit = max(before, first, self.limits.writes)
        self.active += 1

    def grow(self) -> None:
        """Allows more writes: the peer is nearly done with those in flight, and more are waiting."""
        if self.in_flight * 4 < self.limit:
            self.limit = min(self.limit * 2, self.limits.most_writes)

    def done(self, writes: int, nbytes: int) -> None:
        """Counts writes that ended well."""
        self.in_flight -= writes
        self.bytes_in_flight -= nbytes
        self.limit = max(self.limit, self.limits.writes)

    def failed(self, writes: int, nbytes: int) -> None:
        """Counts writes that did not. After them writes go one at a time until one is done."""
        self.in_flight -= writes
        self.bytes_in_flight -= nbytes
        self.limit = 1


class _Contact:
    """The time that one first contact has left."""

    __slots__ = ("_looked_at", "_seconds_left")

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds_left, self._looked_at = seconds, now

    def is_overdue(self, now: float) -> bool:
        self._seconds_left -= min(now - self._looked_at, _LONGEST_TICK)
        self._looked_at = now
        return self._seconds_left < 0


class Submitter:
    """All submissions of one engine. Its transfers may be polled on one thread and drained on another."""

    def __init__(self, engine: MooncakeEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine: MooncakeEngine | None = engine
        self.clock = clock
        self.lock = threading.Lock()
        self.running: set[WindowTransfer] = set()
        self.lingering: deque[int] = deque()

    def submit(self, queue: PeerQueue, columns: tuple[U64Array, U64Array, U64Array]) -> WindowTransfer:
        """``columns``: source, destination, nbytes, range-checked. Nothing is sent before the first poll()."""
        with self.lock:
            transfer = WindowTransfer(self, queue, columns)
            if self.engine is None:  # closed since the caller looked: nobody would end it
                transfer.abandon(Outcome.REJECTED, "the data plane is closed")
            else:
                self.running.add(transfer)
        return transfer

    def fewest_in_flight(self) -> int:
        """Writes on their way to the peer, of those that are written to, that has the fewest."""
        with self.lock:
            return min([transfer.in_flight_of_peer for transfer in self.running], default=0)

    def drain(self, deadline: float) -> bool:
        """Stops everything and waits until ``deadline`` (of the clock) for what runs; True when nothing does."""
        while True:
            for transfer in list(self.running):
                transfer.stop()
                transfer.poll()
            self._watch_lingering()
            if not self.running and not self.lingering:
                return True
            if self.clock() >= deadline:
                return False
            time.sleep(0.001)

    def abandon(self, outcome: Outcome, detail: str) -> None:
        """Ends everything that runs with ``outcome``: the engine is gone, or nobody will ask it any more."""
        with self.lock:
            self.engine = None
            for transfer in list(self.running):
                transfer.abandon(outcome, detail)
            self.lingering.clear()

    def _watch_lingering(self) -> None:
        with self.lock:
            engine, handles = self.engine, len(self.lingering)
            for _ in range(handles if engine is not None else 0):
                handle = self.lingering.popleft()
                if engine is not None and engine.transfer_check_status(handle) not in (1, -1):
                    self.lingering.append(handle)


class WindowTransfer:
    """See Transfer."""

    __slots__ = (
        *("_destination", "_done_bytes", "_failed_at", "_failure", "_handles", "_last_poll", "_nbytes", "_next"),
        *("_owner", "_queue", "_result", "_source", "_stalled", "_stopped", "_waiting"),
    )

    def __init__(self, owner: Submitter, queue: PeerQueue, columns: tuple[U64Array, U64Array, U64Array]) -> None:
        self._owner = owner
        self._queue = queue
        self._source, self._destination, self._nbytes = split(PIECE_BYTES, *columns)
        self._next = 0
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._handles: deque[tuple[int, int]] = deque()
        self._last_poll = owner.clock()
        self._stalled = 0.0
        self._done_bytes = 0
        self._failed_at = 0.0
        self._failure: tuple[Outcome, str] | None = None
        self._stopped = False
        self._result: Result | None = None
        queue.enter(len(self._nbytes), int(self._nbytes.sum()))

    @property
    def in_flight_of_peer(self) -> int:
        return self._queue.in_flight

    def poll(self) -> Result | None:
        if self._result is None:
            with self._owner.lock:
                if self._result is None and self._owner.engine is not None:
                    self._move(self._owner.engine)
        return self._result

    def stop(self) -> None:
        self._stopped = True

    def abandon(self, outcome: Outcome, detail: str) -> None:
        """Terminal without asking the engine; the caller holds the owner's lock."""
        self._end(outcome if self._handles else Outcome.REJECTED, detail)

    def _move(self, engine: MooncakeEngine) -> None:
        self._tick()
        self._reap(engine)
        if self._failure is None:
            self._fill(engine)
        if not self._handles:
            if self._failure is not None:
                self._end_failed(*self._failure)
            elif not self._remaining():
                self._end(Outcome.DONE, "")
        elif self._stalled > STALL_SECONDS:
            self._owner.lingering.extend(handle for handle, _ in self._handles)
            what = f"{len(self._handles)} writes to {self._queue.session}"
            self._end(Outcome.FAILED_UNKNOWN, f"{what} had not ended after {STALL_SECONDS:.0f} s")

    def _tick(self) -> None:
        """Time counts only while we ran and something was in flight: after our own sleep nothing is overdue."""
        now = self._owner.clock()
        self._stalled += min(now - self._last_poll, _LONGEST_TICK) if self._handles else 0.0
        self._last_poll = now

    def _reap(self, engine: MooncakeEngine) -> None:
        """In order: writes end nearly in order, and each question costs."""
        check, handles = engine.transfer_check_status, self._handles
        if not handles:
            return
        while handles:
            status, done, nbytes = 1, 0, 0
            while handles and (status := check(handles[0][0])) == 1:
                nbytes += handles.popleft()[1]
                done += 1
            if done:
                self._queue.done(done, nbytes)
                self._done_bytes += nbytes
                self._stalled = 0.0
            if status == 0:
                return
            if status != 1:
                self._reap_failed(*handles.popleft(), status)
        if self._failure is None and self._remaining():
            self._queue.grow()

    def _reap_failed(self, handle: int, nbytes: int, status: int) -> None:
        self._queue.failed(1, nbytes)
        self._failed_at = time.monotonic()
        self._stalled = 0.0
        if status == -1:
            self._fail(Outcome.FAILED_SRC_FREE, f"a write of {nbytes} bytes to {self._queue.session} failed")
        else:
            self._owner.lingering.append(handle)
            self._fail(Outcome.FAILED_UNKNOWN, f"a write to {self._queue.session} has status {status}")

    def _fill(self, engine: MooncakeEngine) -> None:
        queue, waiting, handles, submit = self._queue, self._waiting, self._handles, engine.transfer_submit_write
        if not self._remaining():
            return
        if refusal := self._refusal():
            self._fail(Outcome.REJECTED, refusal)
            return
        session = queue.session
        for _ in range(queue.allowance(len(handles))):
            if not waiting and not self._take():
                return
            source, destination, nbytes = waiting[0]
            if not queue.fits(nbytes):
                return
            handle = submit(session, source, destination, nbytes)
            if handle in NO_HANDLE:
                self._fail(Outcome.REJECTED, f"the engine refused a write of {nbytes} bytes to {session}")
                return
            waiting.popleft()
            handles.append((handle, nbytes))
            queue.in_flight += 1
            queue.bytes_in_flight += nbytes

    def _refusal(self) -> str:
        """Why nothing more may be submitted; empty when it may, or when first contact is still open."""
        queue = self._queue
        if self._stopped:
            return "stopped"
        if not queue.ready and not queue.refused and queue.is_overdue(self._owner.clock()):
            return f"{queue.session} did not answer"
        return queue.refused

    def _take(self) -> bool:
        chunk = slice(self._next, self._next + _CHUNK)
        self._next = min(chunk.stop, len(self._nbytes))
        columns = (self._source[chunk], self._destination[chunk], self._nbytes[chunk])
        self._waiting.extend(zip(*(column.tolist() for column in columns), strict=True))
        return bool(self._waiting)

    def _remaining(self) -> bool:
        return bool(self._waiting) or self._next < len(self._nbytes)

    def _fail(self, outcome: Outcome, detail: str) -> None:
        """The worst counts, and of equals the first."""
        if self._failure is None or outcome < self._failure[0]:
            self._failure = outcome, detail

    def _end_failed(self, outcome: Outcome, detail: str) -> None:
        """Bytes of a failed write must have left this host: from then on a bounded time is enough for the peer."""
        if outcome is not Outcome.FAILED_SRC_FREE or not self._queue.unsent(self._failed_at):
            self._end(outcome, detail)

    def _end(self, outcome: Outcome, detail: str) -> None:
        self._result = Result(outcome, detail, self._done_bytes)
        self._queue.active -= 1
        if self._handles:
            self._queue.failed(len(self._handles), sum(nbytes for _, nbytes in self._handles))
        self._handles.clear()
        self._waiting.clear()
        self._owner.running.discard(self)
