"""One hand-off at decode, and the part of it that each prefill rank owes. Pure."""

from __future__ import annotations

from msgspec import Struct

from kvgrpc.errors import Failure
from kvgrpc.model import RankId
from kvgrpc.transfer.protocol.decode.pair import DecodePair
from kvgrpc.transfer.protocol.failures import for_peers
from kvgrpc.transfer.protocol.types import (
    POLL_SUCCESS,
    POLL_TRANSFERRING,
    POLL_WAITING_FOR_INPUT,
    STATE_BOOTSTRAPPING,
    STATE_FAILED,
    STATE_SUCCESS,
    STATE_TRANSFERRING,
    STATE_WAITING_FOR_INPUT,
    WANT_ANNOUNCE,
    WANT_FORGET,
    WANT_STOP,
    WANT_WRITE,
    WRITES_OPEN,
    WRITES_SETTLED,
    WRITES_STOPPED,
    DecodeEntry,
    Destination,
    Handle,
    PrefillEntry,
    RoomKey,
    RoomState,
    Timing,
    Writes,
)


class DecodePart(Struct, eq=False, gc=False):
    """The part of one room that one prefill rank owes, as decode knows it.

    ``sender_seen``: the rank said that its sender exists. ``told``: the rank was told of the room, ``told_write``:
    where to write, ``forgot``: FORGET. ``stopped_at``: the tick at which it said STOPPED.
    """

    pair: DecodePair
    state: RoomState = STATE_BOOTSTRAPPING
    writes: Writes = WRITES_OPEN
    pages_done: int = 0
    checksums: bytes = b""
    told: bool = False
    told_write: bool = False
    sender_seen: bool = False
    forgot: bool = False
    stopped_at: int | None = None

    def take(self, entry: PrefillEntry) -> bool:
        """Takes news of this part. False: the news is older than what is known, and was not taken (rule 5, nothing
        goes back)."""
        state, writes = entry.state, entry.writes
        if state < self.state or writes < self.writes:
            return False
        if self.state is STATE_SUCCESS and state is STATE_FAILED:
            return False
        self.state, self.writes = state, writes
        if state is not STATE_FAILED:
            self.sender_seen = True
        if entry.pages_done > self.pages_done:
            self.pages_done = entry.pages_done
        return True

    @property
    def arrived(self) -> bool:
        """All of it is in place, and the writer is done with it (7, writes; 9, fan-in)."""
        return self.state is STATE_SUCCESS and self.writes is WRITES_SETTLED

    @property
    def settled(self) -> bool:
        """True if the part ended and its writer writes no more: only then may it be told FORGET (6, ending)."""
        return self.state >= STATE_SUCCESS and (self.writes >= WRITES_STOPPED or not self.told_write)

    @property
    def over(self) -> bool:
        """True if nothing is left to tell: it was told FORGET, or there is nobody to tell and nothing depends on it."""
        pair = self.pair
        return self.forgot or pair.dead_at is not None or (pair.lost and (self.settled or not self.told_write))


class DecodeRoom(Struct, eq=False, gc=False):
    """One hand-off at decode. It outlives its handle until its pages are proven free (6, ending; 8, pages by evidence).

    ``parts``: one for each prefill rank that owes something, all of them once ``bound``. ``refused``: it ended before,
    and is bound nevertheless, so that those who owe it hear why. ``compared``: its pages are being compared.
    ``deadline``: the tick by which it must have come further, and once it has ended that at which its pages are looked
    at again; 0: none.
    The garbage collector does not look at it: whoever lets its handle keep it ends that with the room.
    """

    key: RoomKey
    handle: Handle
    traceparent: str = ""
    parts: tuple[DecodePart, ...] = ()
    bound: bool = False
    compared: bool = False
    destination: Destination | None = None
    state: RoomState = STATE_BOOTSTRAPPING
    ended: bool = False
    failure: Failure | None = None
    aux: bytes | None = None
    aux_index: int | None = None
    deadline: int = 0
    created_at: int = 0
    resolved_again: bool = False
    refused: bool = False

    @property
    def page_count(self) -> int:
        """Of the first pool."""
        return 0 if self.destination is None else self.destination.count

    @property
    def has_pages(self) -> bool:
        """Of any pool."""
        return self.destination is not None and self.destination.held > 0

    @property
    def over(self) -> bool:
        """It ended, and no part has anything left to say or to hear."""
        if self.ended:
            for part in self.parts:
                if not part.over:
                    return False
        return self.ended

    @property
    def arrived(self) -> bool:
        """Every part that is owed is in place (rule 9, fan-in)."""
        if self.bound:
            for part in self.parts:
                if not part.arrived:
                    return False
        return self.bound

    @property
    def verified(self) -> bool:
        """Some of its parts come with checksums of what was sent."""
        for part in self.parts:
            if part.pair.verify:
                return self.has_pages
        return False

    @property
    def to_compare(self) -> list[DecodePart]:
        """Parts that came with checksums of what was sent (14, aux and checksums)."""
        return [part for part in self.parts if part.pair.verify] if self.verified else []

    def part_of(self, pair: DecodePair) -> DecodePart | None:
        """The part that this incarnation owes, if it is the one that owes it."""
        for part in self.parts:
            if part.pair is pair:
                return part
        return None

    @property
    def ranks(self) -> set[RankId]:
        """Those that owe a part, as far as it is bound."""
        return {part.pair.ref.rank for part in self.parts}

    def entry(self, part: DecodePart, now: int, timing: Timing) -> DecodeEntry:
        """Returns what is to be told of one part now; notes that it was told."""
        if part.settled:
            part.forgot = True
            return DecodeEntry(self.key, WANT_FORGET)
        if self.ended:
            part.told = True
            return DecodeEntry(self.key, WANT_STOP, failure=for_peers(self.failure))
        part.told = True
        left = timing.milliseconds(self.deadline - now)
        if self.destination is None:
            return DecodeEntry(self.key, WANT_ANNOUNCE, None, left, None, self.traceparent)
        part.told_write = True
        return DecodeEntry(self.key, WANT_WRITE, self.destination, left, None, self.traceparent)

    def refresh(self) -> None:
        """WaitingForInput once every target is resolved and welcomed, so that the scheduler may allocate (12, poll)."""
        if self.state is not STATE_BOOTSTRAPPING or not self.bound:
            return
        if all(part.pair.welcomed for part in self.parts):
            self.state = STATE_WAITING_FOR_INPUT
            self.handle.turn(POLL_WAITING_FOR_INPUT)

    def note_ready(self) -> None:
        """One more sender exists; once all do, the handle says ``prefill_ready`` (12, poll)."""
        if not self.bound or self.handle.prefill_ready:
            return
        if all(part.state >= STATE_WAITING_FOR_INPUT for part in self.parts):
            self.handle.note_prefill_ready()

    def transfer(self) -> None:
        """Pages move."""
        if self.state < STATE_TRANSFERRING:
            self.state = STATE_TRANSFERRING
            self.handle.turn(POLL_TRANSFERRING)

    def succeed(self) -> None:
        self.state = STATE_SUCCESS
        self.ended = True
        self.aux = None
        self.handle.note_done(self.page_count)
        self.handle.release_safe = True
        self.handle.turn(POLL_SUCCESS)

    def fail(self, failure: Failure) -> None:
        """Fails the room; the handle turns Failed later, when all else about the end is known (rule 6, ending)."""
        self.state = STATE_FAILED
        self.ended = True
        self.failure = failure
        self.aux = None
