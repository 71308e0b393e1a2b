"""Prefill's half of a session as a state machine: its pairs, and what each of them may say of which room.

Each room has a record (``records``), made when a decode or a local sender first names it: what follows there is theirs.

Sans I/O, as decode/core.py. The shell (runtime/prefill_manager.py in the product, a world in tests/simulation) calls
``on_*`` when something happened and ``tick`` every ``Timing.tick_seconds`` of its own running time; then it takes the
``PrefillWork`` and does it. All calls come from one thread. Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError, StaleEpoch
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.page_check import ReadPages
from kvgrpc.transfer.protocol.pairs import note_silence, take_keys
from kvgrpc.transfer.protocol.prefill.chunks import Chunk
from kvgrpc.transfer.protocol.prefill.fan_out import FanOut
from kvgrpc.transfer.protocol.prefill.memory import StreamNumbers
from kvgrpc.transfer.protocol.prefill.pair import PrefillPair
from kvgrpc.transfer.protocol.prefill.records import PrefillWork, RoomRecords
from kvgrpc.transfer.protocol.prefill.room import PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import (
    HARDLY_GUESSED,
    STATE_FAILED,
    WANT_ANNOUNCE,
    WANT_FORGET,
    WANT_STOP,
    WRITES_OPEN,
    WRITES_UNKNOWN,
    Align,
    Bounds,
    DecodeEntry,
    Handle,
    LostPair,
    PrefillEntry,
    RoomKey,
    Timing,
    Writes,
)

_UNKNOWN: Final = Outcome.FAILED_UNKNOWN  # reading it off its class costs more than the comparison
__all__ = ["Chunk", "PrefillCore", "PrefillPair", "PrefillRoom", "PrefillWork", "Submission"]


class PrefillCore:
    """See the module. ``rooms``: every record; ``open_writes``: submissions without an outcome; ``open_rooms``: rooms
    that have not ended; ``unknown_writes``: submissions of which nobody knows whether they ended.
    """

    def __init__(
        self,
        me: RankRef,
        *,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        data_plane: str = "",
        read: ReadPages | None = None,
    ) -> None:
        """``data_plane``: the name of the data plane, for the texts of failures. ``read``: where given, a page that a
        room reads is another room's only at the same place of its prompt (16, page check)."""
        self.me = me
        self._data_plane = data_plane
        self.timing = timing or Timing()
        self.bounds = bounds or Bounds()
        self.pairs: dict[RankRef, PrefillPair] = {}
        self.unknown_writes = 0
        self.ignored_entries = 0
        self._records = RoomRecords(me, self.timing, self.bounds, read)
        self.rooms: Mapping[RoomKey, PrefillRoom] = self._records.by_key
        self._numbers = StreamNumbers(self.bounds.known_streams)
        self._last_refusal: tuple[tuple[int, str, int, int], Failure] | None = None
        self._last_answer: tuple[Failure, Writes] | None = None

    @property
    def now(self) -> int:
        return self._records.now

    @property
    def open_rooms(self) -> int:
        return self._records.open

    @property
    def open_writes(self) -> int:
        return self._records.open_writes

    @property
    def draining(self) -> bool:
        return self._records.draining

    # What the engine asks for.

    def claim(self, key: RoomKey, handle: Handle, decode: str = "") -> PrefillRoom | None:
        """A local sender takes the room, for whichever decode names it, or for the engine ``decode`` alone. None: its
        handle has failed, because the room has a sender already or cannot be taken; a sender that came first is not
        disturbed (10, ownership)."""
        records = self._records
        if decode and not records.has_sender(key):
            self._take_back(key, decode)
        room = self.rooms.get(key)
        error: KvGrpcError | None = None
        if room is None and len(self.rooms) >= self.bounds.rooms:
            error = failures.too_many("rooms", self.bounds.rooms, len(self.rooms))
        elif records.has_sender(key):
            error = failures.conflict(key, f"a local sender of {self.me}")
        if error is not None:
            handle.release_safe = True
            handle.fail(self._failure(error))
            return None
        if room is None:
            room = records.make(key)
        if decode:
            records.owners.named[key] = decode
        if room.owner is None and not room.ended:
            records.unnamed.add(key, self.now)
        places = records.owners.places.get(key, 1)
        if places == 1:
            records.claim(room, handle)
        else:
            records.spread(room, FanOut(handle, places))
        return room

    def send(
        self,
        room: PrefillRoom,
        chunk: Chunk,
        aux: bytes | None = None,
        expectation: tuple[int | None, Align] | None = None,
    ) -> None:
        """Takes pages that are computed; they wait until the destination is known (12, poll; 13, chunks).
        ``expectation``: of the engine's ``init``, how many pages it will send in all (None: ``is_last`` says it), and
        how they match decode's.
        """
        for each in room.siblings:
            if not each.ended:
                if expectation is not None:
                    each.expect(*expectation)
                self._records.book(each, each.send(chunk, aux, self.bounds.chunks_per_room))

    def fail(self, room: PrefillRoom, failure: Failure) -> None:
        """Abort or cancel: the room is Failed at once, and no further write of it starts, to whichever decode rank."""
        for each in room.siblings:
            if self.rooms.get(each.key) is each:
                self._records.fail(each, failure)

    def find(self, key: RoomKey) -> PrefillRoom | None:
        """The room's record; where several decode ranks are owed the room, that of the first which is left."""
        return self._records.find(key)

    def has_sender(self, key: RoomKey) -> bool:
        """True if a local sender took the room. The first of its decode ranks may be done, and the others not."""
        return self._records.has_sender(key)

    def drain(self) -> None:
        """From now on refuses new rooms; rooms with a local sender go on (rule 4, proof of death)."""
        self._records.draining = True
        for room in list(self.rooms.values()):
            if not room.claimed:
                self._records.refuse(room, failures.draining(self.me))

    def undrain(self) -> None:
        """Takes new rooms again; those that a drain refused stay refused."""
        self._records.draining = False

    # What the shell does for the core.

    def take_work(self) -> PrefillWork:
        """Hands over what is to be done now; the core keeps no part of it."""
        work = self._records.take_work()
        self._reject_ended(work)
        work.tell = self._records.pending.take_pairs()
        return work

    def flush(self, pair: PrefillPair) -> list[PrefillEntry]:
        """The latest states of changed rooms of the pair, at most one frame of them; the others stay pending.

        Only of rooms that this pair named (11, memory of the ended).
        """
        entries = []
        for key in take_keys(pair):
            answer = pair.answers.get(key) if pair.answers else None
            if answer is not None:
                entries.append(PrefillEntry(key, STATE_FAILED, answer[1], failure=answer[0]))
                continue
            room = self.rooms.get(key)
            if room is not None and room.owner is pair:
                entries.append(room.entry())
        return entries

    # What happened.

    def on_hello(
        self, stream: object, ref: RankRef, to: RankRef, number: int, peer: object = None
    ) -> KvGrpcError | None:
        """A decode opened a stream. Returns None where it is welcome, else the error for its Goodbye.

        ``peer``: what the data plane needs to write to its memory, opaque here.
        """
        if to != self.me:
            metadata = {"requestEpoch": to.epoch, "currentEpoch": self.me.epoch, "rank": self.me.rank}
            return StaleEpoch(f"{to} was meant, {self.me} is here; resolve again", metadata=metadata)
        known = self._numbers.largest(ref)
        if number <= known and self._refuses_smaller_streams():
            text = f"stream: must be above {known}, the newest of {ref}"
            return InvalidRequest(text, metadata={"field": "stream", "value": number, "rule": f"above {known}"})
        self._numbers.note(ref, number)
        pair = self.pairs.get(ref)
        if pair is None:
            pair = self.pairs[ref] = PrefillPair(ref, peer, self.now)
            if self._records.unknown.without_record(ref) is WRITES_UNKNOWN:
                pair.unknown_writes = self.bounds.unknown_writes
        self._records.unnamed.note_back(ref.rank)
        older = pair.welcome(stream, number, self.now)
        if older is not None:
            self._records.work.closes.append(older)  # 2, one stream: a larger one ends the older before welcome is sent
        unsettled = (key for key in pair.rooms if not self.rooms[key].forgotten)
        self._records.pending.add_all(pair, (*unsettled, *pair.answers))
        return None

    def on_refused_hello(self, keys: Iterable[RoomKey], engine: str, error: KvGrpcError) -> None:
        """A decode of ``engine`` whose Hello was refused waits for these rooms: their senders fail with the reason,
        also those that come later (1, opening)."""
        for key in keys:
            if key in self._records.owners.places:  # one of several decode ranks has named it
                continue
            named = self._records.owners.named.get(key)
            if named != engine if named else key.room < HARDLY_GUESSED:
                continue
            room = self.rooms.get(key)
            if room is None and len(self.rooms) < self.bounds.rooms:
                room = self._records.make(key)
            if room is not None and room.owner is None:
                room.engine = engine
                self._records.refuse(room, error)

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

    def on_end(self, stream: object, ref: RankRef) -> None:
        """The stream ended, with Goodbye or without: prefill cannot dial, and waits (3, break and loss)."""
        pair = self.pairs.get(ref)
        if pair is not None and pair.stream is stream:
            pair.end_stream(self.now, self.timing)

    def on_outcome(self, submission: Submission, outcome: Outcome, detail: str = "") -> None:
        """The data plane ended one submission (7, writes)."""
        records = self._records
        room = submission.record
        records.count_outcome(submission, outcome)
        had_ended = room.ended
        room.end_write(submission, outcome, detail, self._data_plane)
        if outcome is _UNKNOWN or submission.pair.unknown_writes:
            self._note_unknown(submission.pair, outcome)
        if not had_ended:
            records.book(room)
        elif not room.open_writes:
            records.remember_ended(room)
            records.tell(room)

    def fail_write(self, submission: Submission, outcome: Outcome, failure: Failure) -> None:
        """``on_outcome`` raised, wherever it was: the write is over all the same, and its room fails."""
        records = self._records
        records.count_outcome(submission, outcome)
        room = submission.record
        had_ended = room.ended
        self.fail(room, failure)
        if had_ended and not room.open_writes:
            room.settle()
            records.remember_ended(room)
            records.tell(room)

    @property
    def has_unknown_writes(self) -> bool:
        """True if a write that failed may still be on its way (rule 7, writes)."""
        return bool(self._records.unknown) or any(room.writes is WRITES_UNKNOWN for room in self.rooms.values())

    def on_engine_destroyed(self) -> None:
        """All outcomes were reported, and no write of ours is left anywhere: UNKNOWN becomes STOPPED (7, writes)."""
        self._records.unknown.clear()
        self.unknown_writes = 0
        for room in self.rooms.values():
            if room.engine_destroyed():
                self._records.remember_ended(room)
                self._records.tell(room)
        for pair in self.pairs.values():
            pair.unknown_writes = 0
            for key, (failure, writes) in pair.answers.items():
                if writes is WRITES_UNKNOWN:
                    pair.answers[key] = (failure, self._records.unknown.without_record(pair.ref))
                    self._records.pending.add(pair, key)

    def tick(self) -> None:
        for late in self._records.tick():
            self._end_stream(late)
        for pair in list(self.pairs.values()):
            how = pair.given_up(self.now, self.timing)
            if how:
                self._lose(pair, how)
            said = pair.heard_at if pair.up else None
            told = note_silence(pair, said, pair.open_rooms, self.now, self.timing)
            if told is not None:
                self._records.work.silent.append(told)
            if pair.lost and pair.stream is None and not pair.rooms:
                del self.pairs[pair.ref]
        if not any(pair.silent for pair in self.pairs.values()):  # who is held names no room
            self._records.fail_unnamed()

    # One entry of a frame.

    def _apply(self, pair: PrefillPair, entry: DecodeEntry) -> None:
        records = self._records
        key, want = entry.key, entry.want
        if pair.place:
            key = key.at(pair.place)
        room = self.rooms.get(key)
        if want is WANT_FORGET:
            self._forget(pair, key, room)
        elif pair.answers and key in pair.answers:
            records.pending.add(pair, key)
        elif records.owners.named and not records.owners.may_name(pair.ref.rank.engine, key):
            self._answer_bound(pair, key)
        elif room is not None and room.owner is pair:
            self._take_want(pair, room, entry)
        elif (other := records.owners.other_owner(pair, key)) is not None:
            self._answer(pair, key, self._failure(failures.conflict(key, other.ref)))
        elif room is not None:
            self._own(pair, room, entry)
        else:
            full = records.owners.full(pair)
            if full is None:
                self._own(pair, records.make(key), entry)
            elif want is not WANT_ANNOUNCE:  # of one that is not noted nothing is lost: WRITE says it again
                self._answer(pair, key, self._too_many(full))

    def _own(self, pair: PrefillPair, room: PrefillRoom, entry: DecodeEntry) -> None:
        """Takes the first time that a decode incarnation names a room (10, ownership)."""
        records = self._records
        records.owners.own(pair, room)
        of_sender = room.key.at(0) if room.key.place else room.key
        records.unnamed.drop(of_sender)
        if pair.places > 1:
            records.expect_places(of_sender, pair.places)
        if not room.claimed:
            records.owners.wait_for_sender(pair, room)
            if not room.ended:  # as one of a Hello that was refused
                records.await_sender(room, entry)
            if self.draining:
                records.refuse(room, failures.draining(self.me))
        if pair.unknown_writes > self.bounds.unknown_writes:
            self._refuse_unless_probe(pair, room)
        self._take_want(pair, room, entry)

    def _note_unknown(self, pair: PrefillPair, outcome: Outcome) -> None:
        """Past the bound the pair's rooms that write nothing are given up, and new ones are refused; a write that is
        done clears it (8, pages by evidence).
        """
        limit = self.bounds.unknown_writes
        if outcome is Outcome.DONE and pair.unknown_writes > limit:
            pair.unknown_writes = 0
        if outcome is not _UNKNOWN:
            return
        self.unknown_writes += 1
        pair.unknown_writes += 1
        pair.probe, pair.next_probe_at = None, self.now + self.timing.probe
        if pair.unknown_writes == limit + 1:  # those that are named from now on are refused when they are
            for room in [self.rooms[key] for key in pair.rooms]:
                if not (room.ended or room.open_writes):
                    self._records.refuse(room, self._too_many_unknown(pair))

    def _refuse_unless_probe(self, pair: PrefillPair, room: PrefillRoom) -> None:
        """Never for good: one room a while shows whether writes to this decode end again. One that ended before it
        wrote showed nothing, and the next one has its turn: with several decode ranks past the bound each refuses the
        others' probes else.
        """
        if self.now >= pair.next_probe_at or self._showed_nothing(pair.probe):
            pair.probe, pair.next_probe_at = room.key, self.now + self.timing.probe
        else:
            self._records.refuse(room, self._too_many_unknown(pair))

    def _showed_nothing(self, probe: RoomKey | None) -> bool:
        room = self.rooms.get(probe) if probe is not None else None
        return probe is not None and (room is None or (room.ended and room.writes is not WRITES_OPEN))

    def _too_many_unknown(self, pair: PrefillPair) -> KvGrpcError:
        left = (pair.next_probe_at - self.now) * self.timing.tick_seconds
        return failures.too_many_unknown(pair.ref, self.bounds.unknown_writes, pair.unknown_writes, left)

    def _take_want(self, pair: PrefillPair, room: PrefillRoom, entry: DecodeEntry) -> None:
        want = entry.want
        if want < room.want:
            self.ignored_entries += 1  # 5, nothing goes back
        elif not room.ended:
            announced, room.want = room.want is WANT_ANNOUNCE, want
            error = entry.error or (pair.misfit(entry.destination) if entry.destination is not None else None)
            if error is not None:
                self._records.refuse(room, error)
            elif want is WANT_STOP:
                self._records.fail(room, entry.failure or self._failure(failures.stopped(room.key, pair.ref)))
            elif entry.destination is not None:
                submissions = room.set_destination(entry.destination.divided(pair.parts), entry.traceparent)
                if room.claimed:
                    self._records.end_waiting(room)
                elif announced:
                    self._records.await_sender(room, entry)
                self._records.book(room, submissions)
            elif room.announce(entry.traceparent):
                self._records.tell(room)
        if room.ended:
            self._records.pending.add(pair, room.key)  # it is answered from the record, also a second time (11, memory)

    def _forget(self, pair: PrefillPair, key: RoomKey, room: PrefillRoom | None) -> None:
        """Decode has what it needs (11, memory of the ended)."""
        pair.pending_rooms.pop(key, None)
        if pair.answers.pop(key, None) is not None or room is None or room.owner is not pair:
            return
        if not room.ended and not room.claimed:
            self._records.drop(room)  # nothing was ever written for it, and decode does not know it
            return
        if room.destination is None:  # nor for one that was announced, and whose sender waits
            self._records.refuse(room, failures.stopped(key, pair.ref))
        if room.writes is WRITES_OPEN:
            self.ignored_entries += 1  # it forgets what is not settled (6, ending)
        elif room.writes is not WRITES_UNKNOWN:
            if room.claimed:
                self._records.drop(room)
            elif not room.forgotten:
                room.forgotten = True  # a sender may still come, and fails with the record's cause
                pair.forgotten += 1
                self._records.owners.wait_no_more(room)

    def _too_many(self, full: tuple[str, int, int]) -> Failure:
        """One for all rooms that find the same bound reached in a tick: a hostile frame names 65,536 of them."""
        found = (self.now, *full)
        if self._last_refusal is None or self._last_refusal[0] != found:
            self._last_refusal = found, self._failure(failures.too_many(*full))
        return self._last_refusal[1]

    def _answer(self, pair: PrefillPair, key: RoomKey, failure: Failure) -> None:
        """An answer that is no record: the asker keeps it until its FORGET and disturbs nobody (10, ownership)."""
        if key not in pair.answers and len(pair.answers) >= self.bounds.unclaimed:
            self._lose(pair, f"{len(pair.answers)} rooms were refused and not forgotten")
            return
        writes, last = self._records.unknown.without_record(pair.ref), self._last_answer
        if last is None or last[0] is not failure or last[1] is not writes:
            last = self._last_answer = failure, writes  # shared: a frame may get 65,536 of them
        pair.answers[key] = last
        self._records.pending.add(pair, key)

    def _answer_bound(self, pair: PrefillPair, key: RoomKey) -> None:
        """It is told no name: whoever guesses at rooms learns nothing of them."""
        self._answer(pair, key, self._failure(failures.conflict(key, "another decode, which its sender named")))

    def _take_back(self, key: RoomKey, decode: str) -> None:
        """Drops what decodes of other engines said of the room before its sender came (10, ownership)."""
        for room in [each for each in (self.rooms.get(key), *self._records.later(key)) if each is not None]:
            if room.engine not in ("", decode):
                owner = room.owner
                self._records.drop(room)
                if owner is not None and not owner.lost:
                    self._answer_bound(owner, room.key)

    # Rooms.

    def _reject_ended(self, work: PrefillWork) -> None:
        """A write that the plane did not start yet never does once its room has ended (7, writes)."""
        ended = [submission for submission in work.submissions if submission.record.ended]
        if ended:
            work.submissions = [submission for submission in work.submissions if not submission.record.ended]
            for submission in ended:
                self.on_outcome(submission, Outcome.REJECTED)

    # Pairs.

    def _lose(self, pair: PrefillPair, how: str) -> None:
        """The pair is given up: its rooms fail, and no further write for them starts (3, break and loss)."""
        if not pair.lost:
            self._records.work.lost.append(LostPair(pair.ref, how, pair.open_rooms))
            # Now, not with its last record: what is mapped of a process that died is memory that nobody else gets.
            self._records.work.gone.append(pair)
        pair.lost = True
        self._records.unnamed.note_lost(pair.ref.rank, self.now)
        self._end_stream(pair)
        failure = self._failure(failures.peer_lost(pair.ref, f"decode {pair.ref}", how))
        for key in list(pair.rooms):
            self._records.fail(self.rooms[key], failure)

    def _end_stream(self, pair: PrefillPair) -> None:
        stream = pair.end_stream(self.now, self.timing)
        if stream is not None:
            self._records.work.closes.append(stream)

    def _failure(self, error: KvGrpcError) -> Failure:
        return Failure.of(error, str(self.me))

    # Who is current: methods of their own, so that the simulation can switch the rules off.

    def _refuses_smaller_streams(self) -> bool:
        """A smaller stream number is refused (2, one stream)."""
        return True

    def _current(self, pair: PrefillPair, stream: object) -> bool:
        """No frame of an older stream is applied (2, one stream)."""
        return pair.stream is stream
