"""The records of a prefill rank, from the first mention of a room until it is remembered no more. Pure.

Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections import deque

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, KvGrpcError
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.prefill_memory import EndedRecords, UnknownWrites
from kvgrpc.transfer.protocol.prefill_pair import PrefillPair
from kvgrpc.transfer.protocol.prefill_room import Chunk, PrefillRoom, Submission
from kvgrpc.transfer.protocol.timers import Deadlines
from kvgrpc.transfer.protocol.types import (
    PAST_FAILURES,
    STATE_FAILED,
    STATE_SUCCESS,
    STATE_TRANSFERRING,
    STATE_WAITING_FOR_INPUT,
    WRITES_OPEN,
    WRITES_STOPPED,
    WRITES_UNKNOWN,
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    RoomKey,
    RoomState,
    Timing,
    Writes,
)


class PrefillRecords:
    """What the core does with one record. ``dirty``: pairs with something to say; ``submissions`` are to be started,
    the writes of ``stops`` to be stopped; ``open_writes``: submissions without an outcome; ``overdue``: pairs that did
    not forget an ended room in time, whose stream is to be ended.
    """

    def __init__(self, me: RankRef, timing: Timing, bounds: Bounds) -> None:
        self.rooms: dict[RoomKey, PrefillRoom] = {}
        self.now = 0
        self.open_writes = 0
        self.submissions: list[Submission] = []
        self.stops: list[PrefillRoom] = []
        self.ended: list[PrefillRoom] = []
        self.past_failures: deque[PrefillRoom] = deque(maxlen=PAST_FAILURES)
        self.dirty: dict[PrefillPair, None] = {}
        self.overdue: dict[PrefillPair, None] = {}
        self.unknown = UnknownWrites(bounds.known_streams)
        self._me = me
        self._timing = timing
        self._bounds = bounds
        self._unclaimed = 0
        self._ended = EndedRecords(timing.ended_record, bounds.ended_records)
        self._due: Deadlines[RoomKey] = Deadlines()
        self._moving: dict[RoomKey, PrefillRoom] = {}

    # From first mention to the writes.

    def make(self, key: RoomKey) -> PrefillRoom:
        record = self.rooms[key] = PrefillRoom(key, self.now)
        return record

    def claim(self, record: PrefillRoom, handle: Handle) -> None:
        """The local sender came, in time or not."""
        record.handle = handle
        record.claimed = True
        if record.ended:  # 11: a sender that finds a record fails at once with its cause
            handle.release_safe = True
            if record.failure is not None:
                handle.fail(record.failure)
            if record.forgotten:
                self._drop(record)
            return
        self._wait_no_more(record)
        self._due.set(record.key, self.now + self._timing.room_deadline)
        self._meet(record)

    def full(self, pair: PrefillPair) -> KvGrpcError | None:
        """Why decode may not name one more room before a local sender does (11)."""
        bounds = self._bounds
        if pair.unclaimed >= bounds.unclaimed_per_session:
            return failures.too_many("unclaimed rooms of one session", bounds.unclaimed_per_session, pair.unclaimed)
        if self._unclaimed >= bounds.unclaimed:
            return failures.too_many("unclaimed rooms", bounds.unclaimed, self._unclaimed)
        if len(self.rooms) >= bounds.rooms:
            return failures.too_many("rooms", bounds.rooms, len(self.rooms))
        return None

    def own(self, record: PrefillRoom, pair: PrefillPair, entry: DecodeEntry) -> None:
        """The first decode incarnation that names a room owns it (10)."""
        record.owner = pair
        pair.rooms.add(record.key)
        if record.claimed:
            return
        record.unclaimed = True
        pair.unclaimed += 1
        self._unclaimed += 1
        left = self._timing.ticks(entry.time_left_ms) if entry.time_left_ms else self._timing.unclaimed
        # A second early, so that decode hears the reason before its own deadline ends the room.
        ticks = min(left - self._timing.welcome_within, self._timing.unclaimed)
        self._due.set(record.key, self.now + max(1, ticks))

    def direct(self, record: PrefillRoom, destination: Destination, traceparent: str) -> None:
        """Decode said where to; saying something else later fails the room (5)."""
        if record.destination is None:
            record.destination = destination
            record.traceparent = traceparent
            self._meet(record)
        elif record.owner is not None and not record.destination.same(destination):
            self.refuse(record, failures.pages_changed(record.key, record.owner.ref))

    def send(self, record: PrefillRoom, chunk: Chunk, aux: bytes | None) -> None:
        """Pages that are computed; they wait for the destination if it is not known yet (12, 13)."""
        if record.ended:
            return
        if aux is not None:
            record.aux = aux
        error = record.take(chunk, self._bounds.chunks_per_room)
        if error is not None:
            self.refuse(record, error)
        else:
            self._advance(record)

    def take_submissions(self) -> list[Submission]:
        """Writes to start; those of rooms that ended meanwhile never do."""
        taken, self.submissions = self.submissions, []
        submissions = [submission for submission in taken if not submission.record.ended]
        if len(submissions) < len(taken):
            for submission in taken:
                if submission.record.ended:
                    self.outcome(submission, Outcome.REJECTED, "")
        return submissions

    def outcome(self, submission: Submission, outcome: Outcome, detail: str) -> None:
        """One write ended (7)."""
        record = submission.record
        self.open_writes -= 1
        record.outcome(submission, outcome)
        if record.ended:
            self._settle(record)
        elif outcome is not Outcome.DONE:
            self.refuse(record, failures.not_written(record.key, outcome.name, detail))
        elif record.complete:
            self._end(record, STATE_SUCCESS)
        else:
            self._moving[record.key] = record

    # From the end to oblivion.

    def refuse(self, record: PrefillRoom, error: KvGrpcError) -> None:
        self.fail(record, Failure.of(error, str(self._me)))

    def fail(self, record: PrefillRoom, failure: Failure) -> None:
        """Failed at once, with the first cause; no further write starts."""
        if not record.ended:
            record.failure = failure
            self._end(record, STATE_FAILED)

    def forget(self, record: PrefillRoom) -> bool:
        """Decode has what it needs (11). False: it forgets what is not settled (6)."""
        if not record.ended and not record.claimed:
            self._drop(record)  # nothing was ever written for it, and decode does not know it
        elif record.writes is WRITES_OPEN:
            return False
        elif record.writes is not WRITES_UNKNOWN:
            if record.claimed:
                self._drop(record)
            elif record.owner is not None and not record.forgotten:
                record.forgotten = True  # a sender may still come, and fails with the record's cause
                record.owner.forgotten += 1
        return True

    def engine_destroyed(self) -> None:
        """UNKNOWN becomes STOPPED (7)."""
        self.unknown.clear()
        for record in self.rooms.values():
            record.worst = max(record.worst, WRITES_STOPPED)
            if record.writes is WRITES_UNKNOWN:
                self._set_writes(record, WRITES_STOPPED)

    def tick(self) -> None:
        self.now += 1
        for key in self._due.due(self.now):
            self._run_out(self.rooms[key])
        for key, aged in self._ended.take_over(self.now):
            self._expire(self.rooms[key], aged)
        if self._moving:
            self._tell_progress()

    # One step.

    def _meet(self, record: PrefillRoom) -> None:
        """Both sides are there once the destination is known and a sender claimed the room."""
        destination, handle = record.destination, record.handle
        if destination is None or handle is None:
            return
        self._due.clear(record.key)
        record.state = STATE_WAITING_FOR_INPUT
        handle.prefix_pages = destination.first_page
        handle.poll = KVPoll.WaitingForInput
        if record.chunks or record.last_seen:
            self._advance(record)

    def _advance(self, record: PrefillRoom) -> None:
        """Submits what can be: chunks whose destination is known."""
        error = record.missing()
        if error is not None:
            self.refuse(record, error)
            return
        submissions = record.place()
        if submissions:
            self.submissions += submissions
            self.open_writes += len(submissions)
            if record.state is not STATE_TRANSFERRING:
                record.state = STATE_TRANSFERRING
                if record.handle is not None:
                    record.handle.poll = KVPoll.Transferring
                self._moving[record.key] = record
        elif record.complete:
            self._end(record, STATE_SUCCESS)

    def _end(self, record: PrefillRoom, state: RoomState) -> None:
        """One terminal state; the handle hears it last, when all else is known (6)."""
        record.state = state
        record.ended = True
        record.chunks = []
        self._due.clear(record.key)
        self._wait_no_more(record)
        if record.pending:
            self.stops.append(record)
        self._settle(record)
        self._mark(record)
        self.ended.append(record)
        handle = record.handle
        if handle is not None:
            if record.failure is not None:
                handle.fail(record.failure)
            else:
                handle.poll = KVPoll.Success

    def _settle(self, record: PrefillRoom) -> None:
        """Writes advance from OPEN once the state is terminal and nothing is pending (7)."""
        if record.pending or record.writes is not WRITES_OPEN:
            return
        writes = record.worst
        if not record.claimed and record.owner is not None:
            writes = min(writes, self.unknown.without_record(record.owner.ref))  # 11: an older record may have expired
        self._set_writes(record, writes)

    def _tell_progress(self) -> None:
        """Once a tick is enough: decode needs the end, and most rooms reach it sooner."""
        moving, self._moving = self._moving, {}
        for record in moving.values():
            if not record.ended:
                self._mark(record)

    def _set_writes(self, record: PrefillRoom, writes: Writes) -> None:
        record.writes = writes
        if record.handle is not None and writes is not WRITES_UNKNOWN:
            record.handle.release_safe = True  # of the source: nothing reads it any more
        self._ended.keep(record.key, self.now)
        self._mark(record)

    def _mark(self, record: PrefillRoom) -> None:
        pair = record.owner
        if pair is not None and not record.forgotten:
            pair.dirty[record.key] = None
            self.dirty[pair] = None

    def _run_out(self, record: PrefillRoom) -> None:
        """No local sender, or no decode, came in time (6, 11)."""
        waited = self._timing.milliseconds(self.now - record.created_at)
        if record.claimed:
            self.refuse(record, failures.out_of_time(record.key, record.state.name, waited, "prefill"))
        else:
            self.refuse(record, failures.nobody_came(record.key, waited))

    def _expire(self, record: PrefillRoom, aged: bool) -> None:
        """An ended record is remembered no more, but not before its decode forgot it: a WRITE may be on its way on the
        same stream, said before decode heard the end, and would open the room once more (11)."""
        owner, unknown = record.owner, record.writes is WRITES_UNKNOWN
        if owner is not None and owner.stream is not None and not record.forgotten:
            if unknown or not aged:
                self._ended.keep(record.key, self.now)
                return
            self.overdue[owner] = None
        if owner is not None and unknown:
            self.unknown.add(owner.ref)
        self._drop(record)

    def _wait_no_more(self, record: PrefillRoom) -> None:
        """The room counts as one without a local sender no more."""
        if record.unclaimed and record.owner is not None:
            record.unclaimed = False
            record.owner.unclaimed -= 1
            self._unclaimed -= 1

    def _drop(self, record: PrefillRoom) -> None:
        del self.rooms[record.key]
        if record.failure is not None:
            self.past_failures.append(record)
        self._ended.drop(record.key)
        self._due.clear(record.key)
        self._wait_no_more(record)
        if record.owner is not None:
            record.owner.rooms.discard(record.key)
            record.owner.forgotten -= record.forgotten
            record.owner.dirty.pop(record.key, None)
