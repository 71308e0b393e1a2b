"""Decode's half of a session as a state machine: rooms, the pairs they depend on, and the pages they hold.

Sans I/O. The shell (runtime/decode_manager.py in the product, a world in tests/simulation) calls ``on_*`` when
something happened and ``tick`` every ``Timing.tick_seconds`` of its own running time; then it takes the ``DecodeWork``
and does it. All calls come from one thread. Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvgrpc.errors import Failure, KvGrpcError, Reason, RoomConflict
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.decode.held import HeldPages
from kvgrpc.transfer.protocol.decode.pair import DecodePair, Stream
from kvgrpc.transfer.protocol.decode.room import DecodePart, DecodeRoom
from kvgrpc.transfer.protocol.page_check import WrittenPages
from kvgrpc.transfer.protocol.pairs import PendingRooms, SilentPair, note_silence, take_keys
from kvgrpc.transfer.protocol.timers import Deadlines
from kvgrpc.transfer.protocol.types import (
    PAST_FAILURES,
    STATE_FAILED,
    STATE_SUCCESS,
    STATE_TRANSFERRING,
    STATE_WAITING_FOR_INPUT,
    WANT_FORGET,
    WANT_STOP,
    WRITES_STOPPED,
    Bounds,
    DecodeEntry,
    Destination,
    LostPair,
    PrefillEntry,
    RoomKey,
    Target,
    Timing,
)

REFUSALS_AT_MOST = 4096  # of one pair
__all__ = ["DecodeCore", "DecodePair", "DecodePart", "DecodeRoom", "DecodeWork", "Stream"]


@dataclass(slots=True)
class DecodeWork:
    """Work for the shell, to be done in this order.

    ``dead``: peers whose address refused, so that nobody is to be told to ask there again. ``resolves``: rooms to be
    bound again, to all their targets. ``lost_peers``: peers that welcomed us once and to
    which there is no session now; they or a successor may come back. ``dials``: streams to open. ``closes``: streams
    to end. ``tell``: pairs with something to say, each to be flushed when its stream has room. ``failed``: rooms that
    failed and are dropped, of which people may still ask why; the last 256. ``ended``: rooms that got their terminal
    state. ``lost``: pairs that were given up. ``compares``: rooms whose pages are to be compared with their checksums.
    ``silent``: pairs whose peer fell silent, or speaks again.
    """

    dead: list[RankRef] = field(default_factory=list)
    resolves: list[DecodeRoom] = field(default_factory=list)
    lost_peers: list[RankRef] = field(default_factory=list)
    dials: list[Stream] = field(default_factory=list)
    closes: list[Stream] = field(default_factory=list)
    tell: list[DecodePair] = field(default_factory=list)
    failed: deque[DecodeRoom] = field(default_factory=lambda: deque(maxlen=PAST_FAILURES))
    ended: list[DecodeRoom] = field(default_factory=list)
    lost: list[LostPair] = field(default_factory=list)
    compares: list[DecodeRoom] = field(default_factory=list)
    silent: list[SilentPair] = field(default_factory=list)


class DecodeCore:
    """See the module. ``open_rooms``: rooms that have not ended.

    ``connections(pair)`` names the data connections of that peer to us (8, pages by evidence); ``deliver_aux(room)``
    copies ``room.aux`` into the engine's buffers before SUCCESS is told, and returns why it cannot (14, aux).
    ``written``: where given, no page may be in two rooms (16, page check).
    """

    held_pages_class = HeldPages

    def __init__(
        self,
        me: RankRef,
        *,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        connections: Callable[[DecodePair], frozenset[str] | None] = lambda pair: frozenset(),
        deliver_aux: Callable[[DecodeRoom], Failure | None] = lambda room: None,
        written: WrittenPages | None = None,
    ) -> None:
        self.me = me
        self.timing = timing or Timing()
        self.bounds = bounds or Bounds()
        self._settle_seconds = self.timing.settle * self.timing.tick_seconds
        self.now = 0
        # Of rooms that come further now: one number for all of a tick.
        self._deadline = self.timing.room_deadline
        self.rooms: dict[RoomKey, DecodeRoom] = {}
        self.open_rooms = 0
        self.pairs: dict[RankRef, DecodePair] = {}
        self.ignored_entries = 0
        self._deliver_aux = deliver_aux
        self._written = written
        self._held = self.held_pages_class(self.timing.settle, connections)
        self._due: Deadlines[DecodeRoom] = Deadlines()
        self._streams = 0
        self._work = DecodeWork()
        self._pending: PendingRooms[DecodePair] = PendingRooms()
        # Bound without pages: prefill does not know them yet.
        self._nameless: list[DecodeRoom] = []

    # What the engine asks for.

    def open(self, room: DecodeRoom) -> bool:
        """Takes a new room, which ``bind`` will tie to its targets. False: the room cannot be taken and has failed.

        A failed room with ``room.refused`` must be bound all the same, so that its prefill is told of the failure.
        """
        error = self._refusal(room.key)
        if error is not None:
            failure = self._failure(error)
            room.fail(failure)
            room.refused = not isinstance(error, RoomConflict)
            room.handle.release_safe = True
            room.handle.fail(failure)
            self._work.ended.append(room)
            return False
        room.created_at = self.now
        self.rooms[room.key] = room
        self.open_rooms += 1
        self._due.set(room, self._deadline)
        return True

    def bind(self, room: DecodeRoom, targets: Sequence[Target]) -> None:
        """Ties a room to all prefill incarnations that owe parts of it. It belongs to pairs, not to their streams."""
        if room.refused:
            self._tell_refusal(room, targets)
        if room.ended or self.rooms.get(room.key) is not room:
            return
        bound = room.ranks
        for target in targets:
            if target.ref.rank in bound:
                continue
            pair = self._pair(target)
            bound.add(target.ref.rank)
            room.parts = (*room.parts, DecodePart(pair))
            pair.wait(self.now)
            pair.rooms[room.key] = None
            failure = self._refusal_of(pair)
            if failure is not None:
                self._end(room, failure)
                self._tell_refusal(room, targets)  # those behind it
                return
        if len(room.parts) != len(targets):  # resolved again, and the engine came back with another layout
            self._end(room, self._failure(failures.other_ranks(room.key, [target.ref.rank for target in targets])))
            return
        room.bound = True
        room.refresh()
        if room.destination is not None:  # its pages came first, and the session may stand already
            self._tell(room)
        else:
            self._nameless.append(room)

    def predial(self, target: Target) -> None:
        """Dials a rank once, before a room needs it. Nothing fails where that does not lead to a session."""
        self._pair(target)

    def write(self, room: DecodeRoom, destination: Destination, aux_index: int | None = None) -> None:
        """The engine gave the room's pages. They belong to the room until SUCCESS, or until it is proven that nobody
        can write to them any more (8, pages by evidence)."""
        if room.ended or room.destination is not None:
            return
        error = None if self._written is None else self._written.take(room.key, destination)
        if error is not None:
            self._end(room, self._failure(error))
            return
        room.destination = destination
        room.aux_index = aux_index
        self._due.set(room, self._deadline)
        self._tell(room)

    def fail(self, room: DecodeRoom, failure: Failure) -> None:
        """Abort, cancel, or a resolve that failed. The handle ends at once; the pages are given back only when nobody
        can write to them any more (6, ending; 8, pages by evidence)."""
        if self.rooms.get(room.key) is room:
            self._end(room, failure)

    @property
    def held_pages(self) -> int:
        return self._held.pages

    @property
    def refuses_all(self) -> bool:
        """True if all new rooms are refused: two peers or more hold too many pages. If only one does, only rooms with
        that peer are refused (8, pages by evidence)."""
        past = self.bounds.held_pages + 1
        return self._held.counted(past) >= 2 * past

    # What the shell does for the core.

    def take_work(self) -> DecodeWork:
        """Hands over what is to be done now; the core keeps no part of it."""
        work, self._work = self._work, DecodeWork()
        work.tell = self._pending.take_pairs()
        return work

    def flush(self, pair: DecodePair) -> list[DecodeEntry]:
        """The latest states of changed rooms of the pair, at most one frame of them; the others stay pending."""
        entries: list[DecodeEntry] = []
        for key in take_keys(pair):
            room = self.rooms.get(key)
            part = room.part_of(pair) if room is not None else None
            if part is None and key in pair.refusals:
                entries.append(DecodeEntry(key, WANT_STOP, failure=pair.refusals[key]))
                continue
            if room is None or part is None:
                entries.append(DecodeEntry(key, WANT_FORGET))  # 11: decode answers a room it does not know
                continue
            entries.append(room.entry(part, self.now, self.timing))
            if part.forgot:
                self._drop_if_over(room)
        return entries

    # What happened.

    def on_connected(self, stream: Stream) -> None:
        """The connection of the stream stands: there is a process that answers, whatever its interpreter does."""
        if self._current(stream):
            stream.pair.connect(self.now)

    def on_welcome(self, stream: Stream, idle_timeout: int | None = None) -> None:
        """The peer welcomed us on this stream. ``idle_timeout``: the one it asks for, in ticks; None: our own."""
        pair = stream.pair
        if not self._current(stream) or pair.dead_at is not None:
            return
        pair.welcome(self.now, min(idle_timeout or self.timing.idle_timeout, self.timing.room_deadline))
        for key in pair.rooms:
            self.rooms[key].refresh()
        self._pending.add_all(pair, (*pair.rooms, *pair.refusals))

    def on_heard(self, stream: Stream) -> None:
        """Anything arrived on the stream."""
        if self._current(stream):
            stream.pair.heard_at = self.now

    def on_frame(self, stream: Stream, entries: Iterable[PrefillEntry]) -> None:
        pair = stream.pair
        if not pair.up or not self._current(stream):
            return
        pair.heard_at = self.now
        rooms = self.rooms
        for entry in entries:
            room = rooms.get(entry.key)
            part = room.part_of(pair) if room is not None else None
            if room is not None and part is not None:
                self._apply(room, part, entry)
            elif pair.refusals.pop(entry.key, None) is not None or len(pair.pending_rooms) < self.bounds.rooms:
                self._pending.add_later(pair, entry.key)

    def on_compared(self, room: DecodeRoom, failure: Failure | None) -> None:
        """The pages of a room are those that were sent, or ``failure`` says which are not (14, aux and checksums)."""
        if room.ended:
            return
        if failure is not None:
            self._end(room, failure)
        else:
            self._succeed(room)

    def on_goodbye(self, stream: Stream, failure: Failure | None) -> None:
        pair = stream.pair
        if pair.stream is not stream:
            return
        pair.broke(self.now, self.timing)
        if failure is not None and failure.reason in (Reason.STALE_EPOCH, Reason.WRONG_RANK):
            if pair.welcomed:
                self._prove_dead(pair)  # 4, proof of death: another one answers at the address where this one listened
            else:
                self._refuse(pair, failure, elsewhere=True)
        elif failure is None:
            self._break(pair)
        elif not pair.welcomed:
            self._refuse(pair, failure, elsewhere=failure.reason is Reason.SERVER_DRAINING)
        elif failure.reason is Reason.SERVER_DRAINING:
            pair.drained = True
            self._resolve_untold(pair, drains=True)
            self._break(pair)
        else:
            self._lose(pair, "refused", failure)  # what we said is wrong; saying it again would not help

    def on_refused(self, stream: Stream) -> None:
        """Nobody listens at the address: with the listener the writer is gone (rule 4, proof of death)."""
        pair = stream.pair
        if pair.stream is stream:
            pair.end_stream()
            if not pair.drained:  # else its successor is on its way
                self._work.dead.append(pair.ref)
            self._prove_dead(pair)

    def on_end(self, stream: Stream) -> None:
        """The stream ended, or could not be opened, without a word: a break (rule 3, break and loss)."""
        pair = stream.pair
        if pair.stream is stream:
            pair.broke(self.now, self.timing)
            self._break(pair)

    def tick(self) -> None:
        self.now += 1
        self._deadline = self.now + self.timing.room_deadline
        for room in self._due.due(self.now):
            limit = self.timing.milliseconds(self.timing.room_deadline)
            self._end(room, self._failure(failures.out_of_time(room.key, room.state.name, limit, "decode")))
        silent_after = self.timing.silent_after
        for pair in list(self.pairs.values()):
            if not pair.is_well(self.now, silent_after):
                self._tick_pair(pair)
        for room in self._held.due(self.now):
            self._look(room)
        self._announce()
        self._pending.tick()

    # Rooms.

    def _tell_refusal(self, room: DecodeRoom, targets: Sequence[Target]) -> None:
        """Nothing is kept of a refused room but why, for as long as its prefill's pages would wait for it."""
        told = room.ranks
        for target in targets:
            if target.ref.rank in told:
                continue
            pair = self._pair(target)
            if room.failure is not None and len(pair.refusals) < REFUSALS_AT_MOST and pair.dead_at is None:
                pair.refusals[room.key] = room.failure
                self._pending.add(pair, room.key)

    def _refusal(self, key: RoomKey) -> KvGrpcError | None:
        if key in self.rooms:
            return failures.conflict(key, f"a receiver of {self.me}")
        if len(self.rooms) >= self.bounds.rooms:
            return failures.too_many("rooms", self.bounds.rooms, len(self.rooms))
        if self.refuses_all:
            return failures.pages_held(self.held_pages, 2 * self.bounds.held_pages, self._settle_seconds)
        return None

    def _refusal_of(self, pair: DecodePair) -> Failure | None:
        """Why this pair gets no new room."""
        if pair.dead_at is not None:  # 5, nothing goes back: a new room on a pair proven dead fails at once
            return self._lost_failure(pair, "it was proven dead")
        held = self._held.of_pair.get(pair, 0)
        if held > self.bounds.held_pages:
            return self._failure(failures.pages_held(held, self.bounds.held_pages, self._settle_seconds, pair.ref))
        return None

    def _apply(self, room: DecodeRoom, part: DecodePart, entry: PrefillEntry) -> None:
        stopped_before = part.writes is WRITES_STOPPED
        if not part.take(entry):
            self.ignored_entries += 1
            return
        if part.writes is WRITES_STOPPED and not stopped_before:
            part.stopped_at = self.now
        if part.state >= STATE_SUCCESS:
            self._part_ended(room, part, entry)
        elif part.state is STATE_WAITING_FOR_INPUT:
            room.note_ready()
        elif part.state is STATE_TRANSFERRING:
            room.transfer()
            if room.bound:  # else a part that is resolved again has none in place
                done = min(each.pages_done for each in room.parts)
                room.handle.note_done(min(done, room.page_count))

    def _part_ended(self, room: DecodeRoom, part: DecodePart, entry: PrefillEntry) -> None:
        """The first part that fails fails the room; SUCCESS needs every part that is owed (rule 9, fan-in)."""
        if part.settled:
            self._pending.add_later(part.pair, room.key)
        if room.ended:
            self._look(room)
        elif part.state is STATE_FAILED and _goes_elsewhere(room, part, entry):
            self._resolve_again(room, part)
        elif part.state is STATE_FAILED:
            self._end(room, entry.failure or failures.unexplained(part.pair.ref))
        elif not part.told_write:
            self._end(room, self._failure(failures.not_asked_for(part.pair.ref)))
        elif len(entry.aux) > self.bounds.aux_bytes:
            error = failures.too_much_aux(part.pair.ref, len(entry.aux), self.bounds.aux_bytes)
            self._end(room, self._failure(error))
        elif not room.compared:  # what was said first is compared: a second word changes nothing of it
            if entry.aux:
                room.aux = entry.aux
            part.checksums = entry.checksums
            if room.arrived:
                self._arrive(room)

    def _arrive(self, room: DecodeRoom) -> None:
        """All is in place; where it came with checksums they are compared first, once (14, aux and checksums)."""
        if room.compared:
            return
        if room.verified:
            room.compared = True
            self._work.compares.append(room)
        else:
            self._succeed(room)

    def _succeed(self, room: DecodeRoom) -> None:
        failure = self._deliver_aux(room)
        if failure is not None:
            self._end(room, failure)
        else:
            self._due.clear(room)
            self.open_rooms -= 1
            if self._written is not None:
                self._written.give_back(room.key)
            room.succeed()
            self._work.ended.append(room)

    def _announce(self) -> None:
        """Rooms that are bound and have no pages yet. Once a tick: most have theirs by then, which say all of it."""
        nameless, self._nameless = self._nameless, []
        for room in nameless:
            if room.destination is None and not room.ended:
                for part in room.parts:
                    if not part.told:
                        self._pending.add(part.pair, room.key)

    def _tell(self, room: DecodeRoom) -> None:
        """All pairs of the room, now."""
        for part in room.parts:
            if not part.forgot:
                self._pending.add(part.pair, room.key)

    def _end(self, room: DecodeRoom, failure: Failure) -> None:
        """One terminal state, at once, with the first cause, told to the other parts (6, ending; 9, fan-in)."""
        if room.ended:
            return
        self.open_rooms -= 1
        room.fail(failure)
        room.refused = not room.bound  # who owes it is not known yet, and is told once it is
        self._due.clear(room)
        self._tell(room)
        self._held.hold(room)
        self._look(room)
        room.handle.fail(failure)
        self._work.ended.append(room)

    def _look(self, room: DecodeRoom) -> None:
        """Gives the room's pages back if there is evidence."""
        if room.key in self._held and self._held.look(room, self.now):
            if self._written is not None:
                self._written.give_back(room.key)
            room.handle.release()
            self._drop_if_over(room)

    def _drop_if_over(self, room: DecodeRoom) -> None:
        if room.key not in self._held and room.over and self.rooms.get(room.key) is room:
            del self.rooms[room.key]
            if room.failure is not None:
                self._work.failed.append(room)
            for part in room.parts:
                part.pair.rooms.pop(room.key, None)

    # Pairs.

    def _pair(self, target: Target) -> DecodePair:
        pair = self.pairs.get(target.ref)
        if pair is None:
            pair = self.pairs[target.ref] = DecodePair(target, self.now)
            self._dial(pair)
        return pair

    def _current(self, stream: Stream) -> bool:
        """No frame of an older stream is applied (rule 2, one stream)."""
        return stream.pair.stream is stream

    def _dial(self, pair: DecodePair) -> None:
        self._close_stream(pair)
        # Over all pairs: one that is dropped and met again still counts upwards (2, one stream).
        self._streams += 1
        self._work.dials.append(pair.dial(self._streams, self.now, self.timing))

    def _break(self, pair: DecodePair) -> None:
        """Fails nothing; decode dials again, at once the first time (rule 3, break and loss)."""
        if (pair.rooms or pair.owes_redial) and self.now >= pair.next_dial_at:
            self._dial(pair)

    def _prove_dead(self, pair: DecodePair) -> None:
        if pair.dead_at is None:
            self._held.died(pair, self.now)
        self._resolve_untold(pair)
        self._lose(pair, "its address refuses, or another one answers there")

    def _lose(self, pair: DecodePair, how: str, cause: Failure | None = None) -> None:
        """The pair is given up: its rooms fail, except those whose part here is settled (rule 3, break and loss)."""
        self._note_loss(pair)
        if not pair.lost:
            lost = LostPair(pair.ref, cause.message if cause is not None else how, len(pair.rooms))
            self._work.lost.append(lost)
        pair.lost = True
        pair.waiting_since = None
        pair.next_dial_at = self.now
        self._close_stream(pair)
        failure = cause or self._lost_failure(pair, how)
        for key in list(pair.rooms):
            room = self.rooms[key]
            part = room.part_of(pair)
            if part is not None and not part.settled:
                self._end(room, failure)
            self._look(room)
            self._drop_if_over(room)

    def _refuse(self, pair: DecodePair, failure: Failure, elsewhere: bool) -> None:
        """It refused before the first Welcome; the next room asks again. ``elsewhere``: the registry was behind."""
        self._drop_pair(pair)
        if elsewhere:
            self._resolve_untold(pair)
        self._lose(pair, "refused", failure)

    def _resolve_untold(self, pair: DecodePair, drains: bool = False) -> None:
        """Rooms of which it was never told lose nothing with it: who is in its place now is asked, once
        (3, break and loss). One that drains ends no sooner than its senders: rooms that it knew by name alone had none.
        """
        for key in list(pair.rooms):
            room = self.rooms[key]
            part = room.part_of(pair)
            if part is None or room.ended or room.resolved_again:
                continue
            if not part.told or (drains and not part.told_write and not part.sender_seen):
                self._resolve_again(room, part)

    def _resolve_again(self, room: DecodeRoom, part: DecodePart) -> None:
        room.resolved_again = True
        room.bound = False
        room.parts = tuple(each for each in room.parts if each is not part)
        part.pair.rooms.pop(room.key, None)
        self._work.resolves.append(room)

    def _tick_pair(self, pair: DecodePair) -> None:
        if pair.dead_at is None:
            how = pair.given_up(self.now, self.timing)
            if how:
                self._lose(pair, how)
        told = note_silence(pair, pair.heard_or_reached_at, len(pair.rooms), self.now, self.timing)
        if told is not None:
            self._work.silent.append(told)
        if pair.up:
            return
        if not pair.rooms and not pair.is_dialling(self.now, self.timing) and not pair.owes_redial:
            self._drop_pair(pair)
        elif pair.dead_at is None and pair.dial_is_due(self.now, self.timing):
            self._dial(pair)

    def _drop_pair(self, pair: DecodePair) -> None:
        if self.pairs.get(pair.ref) is pair:
            del self.pairs[pair.ref]
            self._note_loss(pair)
        self._close_stream(pair)

    def _note_loss(self, pair: DecodePair) -> None:
        if pair.welcomed and not pair.lost:
            self._work.lost_peers.append(pair.ref)

    def _close_stream(self, pair: DecodePair) -> None:
        stream = pair.end_stream()
        if stream is not None:
            self._work.closes.append(stream)

    def _lost_failure(self, pair: DecodePair, how: str) -> Failure:
        return self._failure(failures.peer_lost(pair.ref, f"prefill {pair.ref} at {pair.address}", how))

    def _failure(self, error: KvGrpcError) -> Failure:
        return Failure.of(error, str(self.me))


def _goes_elsewhere(room: DecodeRoom, part: DecodePart, entry: PrefillEntry) -> bool:
    """A draining prefill refused a room that it knows by name alone: its successor may have it (3, break and loss)."""
    draining = entry.failure is not None and entry.failure.reason is Reason.SERVER_DRAINING
    return draining and not (part.told_write or part.sender_seen or room.resolved_again)
