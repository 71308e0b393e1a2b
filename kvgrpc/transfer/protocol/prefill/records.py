"""The records of all rooms of a prefill rank, from the first word of one until it is remembered no more. Pure.

``PrefillCore`` takes what happened to its pairs; what follows for a room, whoever named it, is here: its siblings, its
deadline, what its decode is to be told, the work of the shell. Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, KvGrpcError
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.page_check import ReadPages
from kvgrpc.transfer.protocol.pairs import PendingRooms, SilentPair
from kvgrpc.transfer.protocol.prefill.fan_out import FanOut
from kvgrpc.transfer.protocol.prefill.memory import EndedRecords, UnknownWrites, Unnamed
from kvgrpc.transfer.protocol.prefill.pair import PrefillPair
from kvgrpc.transfer.protocol.prefill.room import PrefillRoom, Submission
from kvgrpc.transfer.protocol.timers import Deadlines
from kvgrpc.transfer.protocol.types import (
    PAST_FAILURES,
    WRITES_UNKNOWN,
    Bounds,
    DecodeEntry,
    Handle,
    LostPair,
    RoomKey,
    Timing,
)


@dataclass(slots=True)
class PrefillWork:
    """Work for the shell, to be done in this order.

    ``submissions``: writes to start. ``stops``: rooms that ended while writes were open; no further write of theirs
    may start. ``gone``: pairs that were given up, whose memory the data plane is to forget. ``closes``: streams to end.
    ``tell``: pairs with something to say, each to be flushed when its stream has room. ``failed``: rooms that failed
    and are dropped, of which people may still ask why; the last 256. ``ended``: rooms that got their terminal state.
    ``lost``: the same pairs, as people are told of them. ``silent``: pairs whose peer fell silent, or speaks again.
    """

    submissions: list[Submission] = field(default_factory=list)
    stops: list[PrefillRoom] = field(default_factory=list)
    gone: list[PrefillPair] = field(default_factory=list)
    closes: list[object] = field(default_factory=list)
    tell: list[PrefillPair] = field(default_factory=list)
    failed: deque[PrefillRoom] = field(default_factory=lambda: deque(maxlen=PAST_FAILURES))
    ended: list[PrefillRoom] = field(default_factory=list)
    lost: list[LostPair] = field(default_factory=list)
    silent: list[SilentPair] = field(default_factory=list)


class Ownership:
    """Of which decode incarnation each room is (10, ownership). ``rooms``: the table of all records.

    ``places``: how many decode ranks name a room, where these are several, by the key of its sender; ``named``: the
    engine whose decode a sender's room is for, where its engine said so.
    """

    def __init__(self, rooms: Mapping[RoomKey, PrefillRoom], bounds: Bounds) -> None:
        self._rooms = rooms
        self._bounds = bounds
        self._unclaimed = 0
        self.places: dict[RoomKey, int] = {}
        self.named: dict[RoomKey, str] = {}

    def own(self, pair: PrefillPair, room: PrefillRoom) -> None:
        """Makes this decode incarnation the owner of the room at its place, as the first one that names it."""
        room.owner, room.engine = pair, pair.ref.rank.engine
        pair.rooms[room.key] = None

    def may_name(self, engine: str, key: RoomKey) -> bool:
        """True if the room's sender left it open which engine's decode gets it, or named this one."""
        return self.named.get(key.at(0), engine) == engine

    def other_owner(self, pair: PrefillPair, key: RoomKey) -> PrefillPair | None:
        """The owner of the room, where this pair may not name the room too: another pair at the same place, or a pair
        of another engine at any place. None: it may."""
        if pair.places == 1 and not self.places:
            room = self._rooms.get(key)
            return room.owner if room is not None else None
        for place in range(max(self.places.get(key.at(0), 1), pair.places)):
            room = self._rooms.get(key.at(place))
            owner = room.owner if room is not None else None
            if owner is not None and (place == pair.place or not owner.serves_with(pair)):
                return owner
        return None

    def full(self, pair: PrefillPair) -> tuple[str, int, int] | None:
        """Returns which bound keeps this decode from naming one more room without a local sender: its name, its limit,
        and how many there are; None: no bound does (11, memory of the ended)."""
        bounds = self._bounds
        if pair.unclaimed >= bounds.unclaimed_per_session:
            return "unclaimed rooms of one session", bounds.unclaimed_per_session, pair.unclaimed
        if self._unclaimed >= bounds.unclaimed:
            return "unclaimed rooms", bounds.unclaimed, self._unclaimed
        if len(self._rooms) >= bounds.rooms:
            return "rooms", bounds.rooms, len(self._rooms)
        return None

    def wait_for_sender(self, pair: PrefillPair, room: PrefillRoom) -> None:
        room.unclaimed = True
        pair.unclaimed += 1
        self._unclaimed += 1

    def wait_no_more(self, room: PrefillRoom) -> None:
        """Stops counting the room as one without a local sender."""
        if room.unclaimed and room.owner is not None:
            room.unclaimed = False
            room.owner.unclaimed -= 1
            self._unclaimed -= 1

    def forget(self, key: RoomKey) -> None:
        """A record is gone: with the last one of a room goes how many decode ranks name it, and of which engine."""
        first = key.at(0)
        if not any(first.at(place) in self._rooms for place in range(self.places.get(first, 1))):
            self.places.pop(first, None)
            self.named.pop(first, None)


class RoomRecords:
    """``by_key``: every record; ``open``: how many have not ended; ``open_writes``: submissions without an outcome.
    ``now``: the tick; ``draining``: no room is taken. ``owners``: whose each room is; ``unnamed``: senders that no
    decode has named; ``unknown``: decodes to whom a write may be on its way. ``pending``: rooms that pairs are to be
    told of; ``work``: the shell's, until it takes it.
    """

    def __init__(self, me: RankRef, timing: Timing, bounds: Bounds, read: ReadPages | None) -> None:
        """``read``: where given, a page that a room reads is another room's only at the same place of its prompt
        (16, page check)."""
        self._me = me
        self._timing = timing
        self._read = read
        self.now = 0
        self.draining = False
        self.by_key: dict[RoomKey, PrefillRoom] = {}
        self.open = 0
        self.open_writes = 0
        self.owners = Ownership(self.by_key, bounds)
        self.unnamed = Unnamed(timing)
        self.unknown = UnknownWrites(bounds.known_streams)
        self.pending: PendingRooms[PrefillPair] = PendingRooms()
        self.work = PrefillWork()
        self._due: Deadlines[PrefillRoom] = Deadlines()
        self._moving: dict[RoomKey, PrefillRoom] = {}
        self._ended = EndedRecords(timing.ended_record, bounds.ended_records)

    def take_work(self) -> PrefillWork:
        work, self.work = self.work, PrefillWork()
        return work

    def tick(self) -> list[PrefillPair]:
        """Rooms whose time is over fail or are dropped. Returns the pairs that did not forget one in time."""
        self.now += 1
        for room in self._due.due(self.now):
            self._run_out(room)
        late = {self._expire(self.by_key[key], aged): None for key, aged in self._ended.take_over(self.now)}
        self._tell_progress()
        return [pair for pair in late if pair is not None]

    def make(self, key: RoomKey) -> PrefillRoom:
        room = self.by_key[key] = PrefillRoom(key, self._me, self.now)
        self.open += 1
        return room

    def find(self, key: RoomKey) -> PrefillRoom | None:
        """See ``PrefillCore.find``."""
        room = self.by_key.get(key)
        return next(self.later(key), None) if room is None else room

    def later(self, key: RoomKey) -> Iterator[PrefillRoom]:
        """The records of the room for all decode ranks that are owed it but the first."""
        for place in range(1, self.owners.places.get(key, 1)):
            room = self.by_key.get(key.at(place))
            if room is not None:
                yield room

    def has_sender(self, key: RoomKey) -> bool:
        """See ``PrefillCore.has_sender``."""
        room = self.by_key.get(key)
        return (room is not None and room.claimed) or any(each.claimed for each in self.later(key))

    # A sender, alone or of several decode ranks (9, fan-in; 10, ownership).

    def claim(self, room: PrefillRoom, handle: Handle) -> None:
        if room.ended:
            room.claim(handle)
            self.owners.wait_no_more(room)
            if room.forgotten:
                self.drop(room)
            return
        self.owners.wait_no_more(room)
        self._due.set(room, self.now + self._timing.room_deadline)
        self.book(room, room.claim(handle))
        if room.announce():
            self.tell(room)
        if room.destination is not None:
            self.end_waiting(room)
        if self.draining:
            self.refuse(room, failures.draining(self._me))

    def await_sender(self, room: PrefillRoom, entry: DecodeEntry) -> None:
        """A second less than decode waits, so that it hears the reason before its own deadline ends the room."""
        left = self._timing.ticks(entry.time_left_ms) if entry.time_left_ms else self._timing.unclaimed
        ticks = min(left - self._timing.welcome_within, self._timing.unclaimed)
        self._due.set(room, self.now + max(1, ticks))

    def end_waiting(self, room: PrefillRoom) -> None:
        """Its sender and its decode have met; what moves now has deadlines of its own."""
        self._due.clear(room)

    def expect_places(self, key: RoomKey, places: int) -> None:
        """Decode says by its layout how many of its ranks name the room."""
        if key in self.owners.places:
            return
        self.owners.places[key] = places
        sender = self.by_key.get(key)
        if sender is not None and sender.claimed and sender.handle is not None:
            self.spread(sender, FanOut(sender.handle, places))

    def spread(self, sender: PrefillRoom, fan_out: FanOut) -> None:
        """Makes the sender's chunks those of every place, and its handle that of all."""
        keys = [sender.key.at(place) for place in range(len(fan_out.places))]
        rooms = tuple(self.by_key.get(key) or self.make(key) for key in keys)
        for room in rooms:
            room.join(rooms, sender)
        for room, handle in zip(rooms, fan_out.places, strict=True):
            self.claim(room, handle)
        failed = next((room.failure for room in rooms if room.failure is not None), None)
        if failed is not None:
            self._fail_siblings(sender, failed)

    # What follows from what a room did.

    def book(self, room: PrefillRoom, submissions: Sequence[Submission] = ()) -> None:
        """Takes what an open room did into account, for the rank and for the siblings of one that failed."""
        self._book_work(room, submissions)
        if room.ended and room.failure is not None:
            self._fail_siblings(room, room.failure)

    def _book_work(self, room: PrefillRoom, submissions: Sequence[Submission] = ()) -> None:
        """For the rank: writes to start, progress to tell, its end."""
        if submissions:
            self.work.submissions += submissions
            self.open_writes += len(submissions)
            if self._read is not None:
                self._check_read(self._read, room, submissions)
        if room.progress:
            self._moving[room.key] = room
        if room.ended:
            self.open -= 1
            if self.owners.places:
                self._book_end(room)
            else:
                room.noted = True
                self.work.ended.append(room)
            self._due.clear(room)
            if room.open_writes:
                self.work.stops.append(room)
            else:
                self.remember_ended(room)
            self.tell(room)

    def _book_end(self, room: PrefillRoom) -> None:
        """For people a room that several decode ranks are owed ends once, when it has ended for all of them."""
        siblings = room.siblings
        if len(siblings) == 1:
            if not room.key.place:
                room.noted = True
                self.work.ended.append(room)
        elif all(each.ended for each in siblings) and not any(each.noted for each in siblings):
            ended = next((each for each in siblings if each.failure is not None), siblings[0])
            ended.noted = True
            self.work.ended.append(ended)

    def _check_read(self, read: ReadPages, room: PrefillRoom, submissions: Sequence[Submission]) -> None:
        """A room that fails here starts none of them (the core rejects what has ended)."""
        first = None if room.destination is None else room.chunks.first_wanted(room.destination)
        if first is None:
            return
        for submission in submissions:
            error = read.take(room.key, submission.source, first + submission.start)
            if error is not None:
                room.refuse(error)
                return

    def count_outcome(self, submission: Submission, outcome: Outcome) -> None:
        """Once: a write that nobody counts holds the pages of its room until the pair is lost."""
        if not submission.counted:
            submission.counted = True
            self.open_writes -= 1
            submission.record.count_write(outcome)

    def tell(self, room: PrefillRoom) -> None:
        if room.owner is not None and not room.forgotten:
            self.pending.add(room.owner, room.key)

    def _tell_progress(self) -> None:
        """Once a tick is enough: decode needs the end, and most rooms reach it sooner."""
        moving, self._moving = self._moving, {}
        for room in moving.values():
            room.progress = False
            if not room.ended:
                self.tell(room)

    # Its end.

    def refuse(self, room: PrefillRoom, error: KvGrpcError) -> None:
        self.fail(room, Failure.of(error, str(self._me)))

    def fail(self, room: PrefillRoom, failure: Failure) -> None:
        if not room.ended:
            self._fail_siblings(room, failure)

    def _fail_siblings(self, room: PrefillRoom, failure: Failure) -> None:
        """The room itself is one of them. In one loop: they may be as many as recursion is deep."""
        for other in room.siblings:
            self._fail_alone(other, failure)

    def _fail_alone(self, room: PrefillRoom, failure: Failure) -> None:
        if room.ended:
            return
        if not room.claimed and room.owner is not None:
            # 11, memory of the ended: an older record of the room may have expired.
            room.worst = min(room.worst, self.unknown.without_record(room.owner.ref))
        room.fail(failure)
        self._book_work(room)

    def _run_out(self, room: PrefillRoom) -> None:
        """No local sender, or no decode, came in time (6, ending; 11, memory of the ended)."""
        waited = self._timing.milliseconds(self.now - room.created_at)
        if room.claimed:
            self.refuse(room, failures.out_of_time(room.key, room.state.name, waited, "prefill"))
        else:
            self.refuse(room, failures.nobody_came(room.key, waited))

    def fail_unnamed(self) -> None:
        """Nobody named them since a decode was lost (6, ending)."""
        for key, lost in self.unnamed.take_over(self.now):
            room = self.find(key)
            if room is not None:
                waited = self._timing.milliseconds(self._timing.unnamed_after_loss)
                self.refuse(room, failures.nobody_named(key, lost, waited))

    def remember_ended(self, room: PrefillRoom) -> None:
        """Its last change: from now on the record has its time (11, memory of the ended)."""
        self._ended.keep(room.key, self.now)
        if self._read is not None and room.writes is not WRITES_UNKNOWN:
            self._read.give_back(room.key)

    def _expire(self, room: PrefillRoom, aged: bool) -> PrefillPair | None:
        """An ended record is remembered no more, but not before its decode forgot it: a WRITE may be on its way on the
        same stream, said before decode heard the end, and would open the room once more (11, memory of the ended).

        The pair that did not forget it in time, and therefore loses its stream.
        """
        owner, unknown = room.owner, room.writes is WRITES_UNKNOWN
        remembered = owner is not None and owner.up and not room.forgotten
        if remembered and (unknown or not aged or (owner is not None and owner.silent)):  # who is held cannot forget
            self.remember_ended(room)
            return None
        if owner is not None and unknown:
            self.unknown.add(owner.ref)
        self.drop(room)
        return owner if remembered else None

    def drop(self, room: PrefillRoom) -> None:
        del self.by_key[room.key]
        self.open -= not room.ended
        if room.failure is not None and (not room.key.place or room.siblings[0].failure is None):
            self.work.failed.append(room)
        if self.owners.places or self.owners.named:
            self.owners.forget(room.key)
        self._ended.drop(room.key)
        self._due.clear(room)
        if room.owner is None:
            self.unnamed.drop(room.key)
        self.owners.wait_no_more(room)
        if room.owner is not None:
            room.owner.rooms.pop(room.key, None)
            room.owner.forgotten -= room.forgotten
            room.owner.pending_rooms.pop(room.key, None)
