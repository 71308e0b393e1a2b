"""Prefill's half of a session as a state machine: one record per (room, attempt), and the pairs that own them.

Sans I/O, as decode_core.py: the shell calls ``on_*`` and ``tick``, and does what the core asks: ``take_submissions``
(writes for the data plane), ``take_stops`` (rooms whose writes shall start no more), ``take_closes`` (streams to end),
``take_gone`` (pairs to forget) and ``flush`` for every pair in ``take_dirty``. All calls come from one thread. Numbers
in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError, StaleEpoch
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.dirty import take
from kvgrpc.transfer.protocol.prefill_memory import StreamNumbers
from kvgrpc.transfer.protocol.prefill_pair import PrefillPair
from kvgrpc.transfer.protocol.prefill_records import PrefillRecords
from kvgrpc.transfer.protocol.prefill_room import Chunk, PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import (
    STATE_FAILED,
    STATE_SUCCESS,
    WANT_FORGET,
    WANT_STOP,
    WRITES_UNKNOWN,
    Align,
    Bounds,
    DecodeEntry,
    Handle,
    KVPoll,
    LostPair,
    PrefillEntry,
    RoomKey,
    Timing,
)

__all__ = ["Chunk", "PrefillCore", "PrefillPair", "PrefillRoom", "Submission"]


class PrefillCore:
    """See the module."""

    def __init__(self, me: RankRef, *, timing: Timing | None = None, bounds: Bounds | None = None) -> None:
        self.me = me
        self.timing = timing or Timing()
        self.bounds = bounds or Bounds()
        self.draining = False
        self.pairs: dict[RankRef, PrefillPair] = {}
        self.ignored_entries = 0
        self._records = PrefillRecords(me, self.timing, self.bounds)
        self.rooms = self._records.rooms
        self._numbers = StreamNumbers(self.bounds.known_streams)
        self._closes: list[object] = []
        self._gone: list[PrefillPair] = []
        self._lost: list[LostPair] = []

    @property
    def now(self) -> int:
        return self._records.now

    @property
    def open_writes(self) -> int:
        """Submissions without an outcome."""
        return self._records.open_writes

    @property
    def open_rooms(self) -> int:
        return sum(not record.ended for record in self.rooms.values())

    # What the engine asks for.

    def claim(self, key: RoomKey, handle: Handle) -> PrefillRoom | None:
        """A local sender takes the room; a second one for a known key fails alone (10). None: the handle has failed."""
        record = self.rooms.get(key)
        if record is None and len(self.rooms) >= self.bounds.rooms:
            self._refuse(handle, failures.too_many("rooms", self.bounds.rooms, len(self.rooms)))
            return None
        if record is not None and record.claimed:
            self._refuse(handle, failures.conflict(key, f"a local sender of {self.me}"))
            return None
        if record is None:
            record = self._records.make(key)
        self._records.claim(record, handle)
        if self.draining:
            self._records.refuse(record, failures.draining(self.me))
        return record

    def expect(self, record: PrefillRoom, pages: int | None, align: Align = Align.HEAD) -> None:
        """The engine's ``init``: how many pages it will send in all (None: ``is_last`` says it)."""
        if record.ended:
            return
        record.expected_pages = pages
        record.align = align
        if record.handle is not None and record.handle.poll is KVPoll.Bootstrapping:
            record.handle.poll = KVPoll.WaitingForInput  # 12: never Bootstrapping after init

    def send(self, record: PrefillRoom, chunk: Chunk, aux: bytes | None = None) -> None:
        """Takes pages that are computed; they wait for the destination if it is not known yet (12, 13)."""
        self._records.send(record, chunk, aux)

    def fail(self, record: PrefillRoom, failure: Failure) -> None:
        """Abort or cancel: Failed at once, and no further write starts."""
        if self.rooms.get(record.key) is record:
            self._records.fail(record, failure)

    def drain(self) -> None:
        """Refuses new rooms; those that have a local sender go on (4)."""
        self.draining = True
        for record in list(self.rooms.values()):
            if not record.claimed:
                self._records.refuse(record, failures.draining(self.me))

    # What the shell does for the core.

    def take_submissions(self) -> list[Submission]:
        """Writes to start."""
        return self._records.take_submissions()

    def take_stops(self) -> list[PrefillRoom]:
        """Rooms that ended while writes were open: no further one shall start."""
        stops, self._records.stops = self._records.stops, []
        return stops

    def take_closes(self) -> list[object]:
        closes, self._closes = self._closes, []
        return closes

    def take_gone(self) -> list[PrefillPair]:
        """Pairs that were dropped: the data plane may forget their memory."""
        gone, self._gone = self._gone, []
        return gone

    def take_ended(self) -> list[PrefillRoom]:
        """Rooms that got their terminal state."""
        ended, self._records.ended = self._records.ended, []
        return ended

    def take_lost(self) -> list[LostPair]:
        """Pairs that were given up."""
        lost, self._lost = self._lost, []
        return lost

    def take_past_failures(self) -> list[PrefillRoom]:
        """Failed rooms that were dropped: people may still ask why."""
        past = list(self._records.past_failures)
        self._records.past_failures.clear()
        return past

    def take_dirty(self) -> Iterable[PrefillPair]:
        """Pairs with something to say and a stream to say it on."""
        if not self._records.dirty:
            return ()
        dirty, self._records.dirty = self._records.dirty, {}
        return [pair for pair in dirty if pair.stream is not None]

    def flush(self, pair: PrefillPair) -> list[PrefillEntry]:
        """The latest state of the rooms of the pair that changed, a frame's worth; ``pair.dirty`` keeps the others.

        Only rooms that this pair named (11).
        """
        entries = []
        for key in take(pair.dirty):
            answer = pair.answers.get(key)
            if answer is not None:
                entries.append(PrefillEntry(key, STATE_FAILED, answer[1], failure=answer[0]))
                continue
            record = self.rooms.get(key)
            if record is not None and record.owner is pair:
                aux = record.aux if record.state is STATE_SUCCESS else b""
                entries.append(PrefillEntry(key, record.state, record.writes, record.done.prefix, aux, record.failure))
        return entries

    # What happened.

    def on_hello(
        self, stream: object, ref: RankRef, to: RankRef, number: int, peer: object = None
    ) -> KvGrpcError | None:
        """A decode opened a stream. None: welcome it; else say goodbye with the error. ``peer``: its memory, opaque."""
        if to != self.me:
            metadata = {"requestEpoch": to.epoch, "currentEpoch": self.me.epoch, "rank": self.me.rank}
            return StaleEpoch(f"{to} was meant, {self.me} is here; resolve again", metadata=metadata)
        known = self._numbers.largest(ref)
        if number <= known and self._counts():
            text = f"stream: must be above {known}, the newest of {ref}"
            return InvalidRequest(text, metadata={"field": "stream", "value": number, "rule": f"above {known}"})
        self._numbers.note(ref, number)
        pair = self.pairs.get(ref)
        if pair is None:
            pair = self.pairs[ref] = PrefillPair(ref, peer, self.now)
        older = pair.welcome(stream, number, self.now)
        if older is not None:
            self._closes.append(older)  # 2: a larger stream ends the older before welcome is sent
        for key in pair.rooms:  # 3: every unsettled room, that is all of resumption
            if not self.rooms[key].forgotten:
                pair.dirty[key] = None
        pair.dirty.update(dict.fromkeys(pair.answers))
        self._records.dirty[pair] = None
        return None

    def on_heard(self, stream: object, ref: RankRef) -> None:
        """Anything arrived on the stream."""
        pair = self.pairs.get(ref)
        if pair is not None and pair.stream is stream:
            pair.heard_at = self.now

    def on_frame(self, stream: object, ref: RankRef, entries: Iterable[DecodeEntry]) -> None:
        pair = self.pairs.get(ref)
        if pair is None or not self._current(pair, stream):
            return
        pair.heard_at = self.now
        for entry in entries:
            self._apply(pair, entry)
            if pair.lost:
                break
        if pair.dirty:
            self._records.dirty[pair] = None

    def on_end(self, stream: object, ref: RankRef) -> None:
        """The stream ended, with Goodbye or without: prefill cannot dial, so it waits for decode to (3)."""
        pair = self.pairs.get(ref)
        if pair is not None and pair.stream is stream:
            pair.end_stream(self.now)

    def on_outcome(self, submission: Submission, outcome: Outcome, detail: str = "") -> None:
        """The data plane ended one submission (7)."""
        self._records.outcome(submission, outcome, detail)

    def on_engine_destroyed(self) -> None:
        """All outcomes were reported, and no write of ours is left anywhere: UNKNOWN becomes STOPPED (7)."""
        self._records.engine_destroyed()
        for pair in self.pairs.values():
            for key, (failure, writes) in pair.answers.items():
                if writes is WRITES_UNKNOWN:
                    self._answer(pair, key, failure)

    def tick(self) -> None:
        self._records.tick()
        for pair in self._records.overdue:
            self._end_stream(pair)
        self._records.overdue.clear()
        for pair in list(self.pairs.values()):
            how = pair.given_up(self.now, self.timing)
            if how:
                self._lose(pair, how)
            if pair.lost and pair.stream is None and not pair.rooms:
                del self.pairs[pair.ref]
                self._gone.append(pair)

    # One entry of a frame.

    def _apply(self, pair: PrefillPair, entry: DecodeEntry) -> None:
        key, want = entry.key, entry.want
        record = self.rooms.get(key)
        if want is WANT_FORGET:
            self._forget(pair, key, record)
        elif key in pair.answers:
            pair.dirty[key] = None
        elif record is None:
            error = self._records.full(pair)
            if error is None:
                self._own(pair, self._records.make(key), entry)
            else:
                self._answer(pair, key, self._failure(error))
        elif record.owner is pair:
            self._want(pair, record, entry)
        elif record.owner is None:
            self._own(pair, record, entry)
        else:
            self._answer(pair, key, self._failure(failures.conflict(key, record.owner.ref)))

    def _own(self, pair: PrefillPair, record: PrefillRoom, entry: DecodeEntry) -> None:
        self._records.own(record, pair, entry)
        if self.draining and not record.claimed:
            self._records.refuse(record, failures.draining(self.me))
        self._want(pair, record, entry)

    def _want(self, pair: PrefillPair, record: PrefillRoom, entry: DecodeEntry) -> None:
        want = entry.want
        if want < record.want:
            self.ignored_entries += 1  # 5: nothing goes back
        elif not record.ended:
            record.want = want
            if entry.error is not None:
                self._records.refuse(record, entry.error)
            elif want is WANT_STOP:
                self._records.fail(record, entry.failure or self._failure(failures.stopped(record.key, pair.ref)))
            elif entry.destination is not None:
                self._records.direct(record, entry.destination, entry.traceparent)
        if record.ended:
            pair.dirty[record.key] = None  # it is answered from the record, also a second time (11)

    def _forget(self, pair: PrefillPair, key: RoomKey, record: PrefillRoom | None) -> None:
        pair.dirty.pop(key, None)
        known = pair.answers.pop(key, None) is not None
        if not known and record is not None and record.owner is pair and not self._records.forget(record):
            self.ignored_entries += 1

    def _answer(self, pair: PrefillPair, key: RoomKey, failure: Failure) -> None:
        """An answer that is no record: the asker keeps it until its FORGET and disturbs nobody (10)."""
        if key not in pair.answers and len(pair.answers) >= self.bounds.unclaimed:
            self._lose(pair, f"{len(pair.answers)} rooms were refused and not forgotten")
            return
        pair.answers[key] = (failure, self._records.unknown.without_record(pair.ref))
        pair.dirty[key] = None
        self._records.dirty[pair] = None

    def _lose(self, pair: PrefillPair, how: str) -> None:
        """The pair is given up: its rooms fail, and no further write for them starts (3)."""
        if not pair.lost:
            self._lost.append(LostPair(pair.ref, how, pair.open_rooms))
        pair.lost = True
        self._end_stream(pair)
        failure = self._failure(failures.peer_lost(pair.ref, f"decode {pair.ref}", how))
        for key in list(pair.rooms):
            self._records.fail(self.rooms[key], failure)

    def _end_stream(self, pair: PrefillPair) -> None:
        stream = pair.end_stream(self.now)
        if stream is not None:
            self._closes.append(stream)

    # Who is current: methods of their own, so that the simulation can switch the rules off.

    def _counts(self) -> bool:
        """A smaller stream number is refused (2)."""
        return True

    def _current(self, pair: PrefillPair, stream: object) -> bool:
        """No frame of an older stream is applied (2)."""
        return pair.stream is stream

    # Failures.

    def _refuse(self, handle: Handle, error: KvGrpcError) -> None:
        handle.release_safe = True
        handle.fail(self._failure(error))

    def _failure(self, error: KvGrpcError) -> Failure:
        return Failure.of(error, str(self.me))
