"""One hand-off at prefill as a state machine: a sender's chunks, decode's pages, the writes between them. Pure.

Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, KvGrpcError
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.prefill.chunks import Chunk, Chunks, Coverage, Wait
from kvgrpc.transfer.protocol.prefill.pair import PrefillPair
from kvgrpc.transfer.protocol.types import (
    POLL_BOOTSTRAPPING,
    POLL_SUCCESS,
    POLL_TRANSFERRING,
    POLL_WAITING_FOR_INPUT,
    STATE_BOOTSTRAPPING,
    STATE_FAILED,
    STATE_SUCCESS,
    STATE_TRANSFERRING,
    STATE_WAITING_FOR_INPUT,
    WANT_ANNOUNCE,
    WANT_OPENED,
    WRITES_OPEN,
    WRITES_SETTLED,
    WRITES_STOPPED,
    WRITES_UNKNOWN,
    Align,
    Destination,
    Handle,
    PrefillEntry,
    RoomKey,
    RoomState,
    U32Array,
    Want,
    Writes,
)

_DONE: Final = Outcome.DONE  # reading it off its class costs more than the comparison
# By Outcome: FAILED_UNKNOWN, FAILED_SRC_FREE, REJECTED, DONE (rule 7, writes).
_WRITES_AFTER = (WRITES_UNKNOWN, WRITES_STOPPED, WRITES_SETTLED, WRITES_SETTLED)


class Submission(Struct, eq=False, gc=False):
    """One write for the data plane: our page ``source[i]`` goes to the owner's ``destination[i]``, at start + i.

    ``others``: pages of the other pools, source and destination; None: those pages are every pool's.
    """

    record: PrefillRoom
    pair: PrefillPair
    source: U32Array
    destination: U32Array
    start: int
    wait: Wait | None = None
    others: tuple[tuple[U32Array, U32Array], ...] | None = None
    # Where the owner verifies, before DONE: of each pool decode's pages and the checksums of what goes there.
    checksums: tuple[tuple[U32Array, U32Array], ...] | None = None
    counted: bool = False  # among those that ended


class PrefillRoom(Struct, eq=False):
    """The record of one room at prefill, made when a decode or a local sender first names it (rule 10, ownership).

    Of the sender: ``claimed`` (it has come), ``handle``, ``chunks``, ``aux``. Of the decode that receives the room:
    ``owner``, ``engine`` (of whoever named it first), ``want``, ``destination``, ``open_writes`` (submissions
    without an outcome), ``worst`` (how the others ended), ``forgotten``. ``unclaimed``: an owner waits for a sender.
    ``progress``: pages moved since decode was told. ``noted``: people were told of its
    end. ``siblings``: the records of all decode ranks that the sender owes, this one included.

    ``deadline``: the tick until which it waits for its decode or its sender; 0: it has met them.

    The methods that start writes return them; the room has ended by itself when there is nothing to write or to wait
    for. What follows for the rank is the core's.
    """

    key: RoomKey
    me: RankRef
    created_at: int
    deadline: int = 0
    handle: Handle | None = None
    claimed: bool = False
    aux: bytes = b""
    owner: PrefillPair | None = None
    engine: str = ""
    unclaimed: bool = False
    want: Want = WANT_OPENED
    destination: Destination | None = None
    traceparent: str = ""
    state: RoomState = STATE_BOOTSTRAPPING
    ended: bool = False
    failure: Failure | None = None
    writes: Writes = WRITES_OPEN
    worst: Writes = WRITES_SETTLED
    open_writes: int = 0
    checksums: list[tuple[tuple[U32Array, U32Array], ...]] | None = None
    progress: bool = False
    forgotten: bool = False
    noted: bool = False
    # None: it is the only one. A tuple with itself in it would keep every room until a full garbage collection.
    _siblings: tuple[PrefillRoom, ...] | None = None
    # Made when there is something to keep: thousands wait for their pages.
    _chunks: Chunks | None = None
    _done: Coverage | None = None

    @property
    def siblings(self) -> tuple[PrefillRoom, ...]:
        return self._siblings or (self,)

    @property
    def state_of_all(self) -> RoomState:
        """The least that holds for all decode ranks that are owed it; FAILED where it failed for one."""
        if self._siblings is None:
            return self.state
        failed = any(each.failure is not None for each in self._siblings)
        return STATE_FAILED if failed else min(each.state for each in self._siblings)

    @property
    def failure_of_all(self) -> Failure | None:
        """The first failure, at whichever decode rank."""
        return next((each.failure for each in self.siblings if each.failure is not None), None)

    @property
    def sender_live(self) -> bool:
        """An engine's sender waits for the end."""
        return self.claimed and not self.ended

    @property
    def chunks(self) -> Chunks:
        if self._chunks is None:
            self._chunks = Chunks()
        return self._chunks

    @property
    def pages_done(self) -> int:
        """In place, a prefix of them."""
        return 0 if self._done is None else self._done.prefix

    @property
    def page_count(self) -> int:
        """Of the first pool, in our own pages, as far as is known."""
        if self.destination is None or self._chunks is None:
            return 0 if self.destination is None else self.destination.count
        return self._chunks.wanted(self.destination)

    def entry(self) -> PrefillEntry:
        """Returns what its decode is told."""
        sends_aux = self.owner is not None and self.owner.sends_aux
        aux = self.aux if sends_aux and self.state is STATE_SUCCESS else b""
        checksums = self._page_checksums() if self.checksums and self.state is STATE_SUCCESS else b""
        failure = None if self.failure is None else failures.for_peers(self.failure)
        done, destination = self.pages_done, self.destination
        if destination is not None and destination.parts > 1:  # of decode's, the last of which may have room left
            done = (destination.count if self.state is STATE_SUCCESS else done) // destination.parts
        return PrefillEntry(self.key, self.state, self.writes, done, aux, failure, checksums)

    def join(self, siblings: tuple[PrefillRoom, ...], sender: PrefillRoom) -> None:
        """Joins the records of a sender that owes the room to several decode ranks; takes the chunks given so far."""
        self._siblings = siblings
        if self is not sender:
            self._chunks, self.aux = sender.chunks.copy(), sender.aux

    # The sender.

    def claim(self, handle: Handle) -> list[Submission]:
        """The local sender came. One that finds an ended record fails at once with its cause (rule 11, memory)."""
        self.handle = handle
        self.claimed = True
        if not self.ended:
            return self._meet()
        handle.release()
        if self.failure is not None:
            handle.fail(self.failure)
        return []

    def expect(self, pages: int | None, align: Align) -> None:
        """The sender's ``init``: how many pages it will send, and how their positions match decode's."""
        chunks = self.chunks
        chunks.total, chunks.align = pages, align
        if self.handle is not None and self.handle.poll is POLL_BOOTSTRAPPING:
            self.handle.turn(POLL_WAITING_FOR_INPUT)  # 12, poll: never Bootstrapping after init

    def send(self, chunk: Chunk, aux: bytes | None, at_most: int) -> list[Submission]:
        """Takes computed pages. At most ``at_most`` chunks wait while the destination is not known."""
        if aux is not None:
            self.aux = aux
        error = self.chunks.add(self.key, chunk, at_most)
        if error is None:
            return self._advance()
        self.refuse(error)
        return []

    # Decode.

    def set_destination(self, destination: Destination, traceparent: str) -> list[Submission]:
        """Decode named its pages. A different destination later fails the room (rule 5, nothing goes back)."""
        if self.destination is None:
            self.destination = destination
            self.traceparent = traceparent
            return self._meet()
        if self.owner is not None and not self.destination.same(destination):
            self.refuse(failures.pages_changed(self.key, self.owner.ref))
        return []

    def announce(self, traceparent: str = "") -> bool:
        """Decode named the room, still without pages. True: the sender exists, and decode is to be told so."""
        self.traceparent = self.traceparent or traceparent
        if self.want is not WANT_ANNOUNCE or self.handle is None or self.state is not STATE_BOOTSTRAPPING:
            return False
        self.state = STATE_WAITING_FOR_INPUT
        return True

    # The data plane.

    def count_write(self, outcome: Outcome) -> None:
        """One write ended (rule 7, writes)."""
        self.open_writes -= 1
        after = _WRITES_AFTER[outcome]
        self.worst = after if after < self.worst else self.worst

    def end_write(self, submission: Submission, outcome: Outcome, detail: str, data_plane: str) -> None:
        """Takes the end of one write, which was counted. ``data_plane``: the name of what wrote."""
        if outcome is _DONE:
            done = self._done = self._done or Coverage()
            done.add(submission.start, len(submission.destination))
            if submission.checksums is not None:
                if self.checksums is None:
                    self.checksums = []
                self.checksums.append(submission.checksums)
            if self.handle is not None:
                self.handle.note_done(done.prefix)
        if self.ended:
            self.settle()
        elif outcome is not _DONE:
            self.refuse(failures.not_written(self.key, data_plane, outcome.name, detail))
        elif self._complete():
            self._end(STATE_SUCCESS)
        else:
            self.progress = True

    def engine_destroyed(self) -> bool:
        """No write of this process is left anywhere: UNKNOWN becomes STOPPED. True where it did (rule 7, writes)."""
        self.worst = max(self.worst, WRITES_STOPPED)
        if self.writes is not WRITES_UNKNOWN:
            return False
        self.settle()
        return True

    # The end.

    def refuse(self, error: KvGrpcError) -> None:
        self.fail(Failure.of(error, str(self.me)))

    def fail(self, failure: Failure) -> None:
        """Failed at once, with the first cause; no further write starts."""
        if not self.ended:
            self.failure = failure
            self._end(STATE_FAILED)

    # One step.

    def _page_checksums(self) -> bytes:
        """In the order of the destination, which names each page once; chunks may have come in any."""
        destination = self.destination
        assert destination is not None
        found = bytearray()
        for pool, pages in enumerate((destination, *(destination.others or ()))):
            parts = [part[pool] for part in self.checksums or () if pool < len(part)]
            by_page = {
                page: crc for numbers, sums in parts for page, crc in zip(numbers.tolist(), sums.tolist(), strict=True)
            }
            found += np.array([by_page.get(page, 0) for page in pages.pages.tolist()], "<u4").tobytes()
        return bytes(found)

    def _meet(self) -> list[Submission]:
        """Both sides are there once the destination is known and a sender claimed the room."""
        destination, handle = self.destination, self.handle
        if destination is None or handle is None:
            return []
        self.state = STATE_WAITING_FOR_INPUT
        handle.note_prefix(destination.first_page)
        handle.turn(POLL_WAITING_FOR_INPUT)
        return self._advance() if self._chunks is not None and self._chunks.waiting else []

    def _advance(self) -> list[Submission]:
        """Places what can be placed; the room ends where nothing is left to place, or something cannot come."""
        destination, owner, chunks = self.destination, self.owner, self.chunks
        if destination is None or owner is None:
            return []
        error = chunks.misfit(self.key, destination) or chunks.missing(self.key, destination)
        if error is not None:
            self.refuse(error)
            return []
        submissions = []
        for placed in chunks.place(destination):
            where = placed.source, placed.destination, placed.start
            submissions.append(Submission(self, owner, *where, placed.wait, placed.others))
        self.open_writes += len(submissions)
        if submissions and self.state is not STATE_TRANSFERRING:
            self.state = STATE_TRANSFERRING
            self.progress = True
            if self.handle is not None:
                self.handle.turn(POLL_TRANSFERRING)
        elif not submissions and self._complete():
            self._end(STATE_SUCCESS)
        return submissions

    def _complete(self) -> bool:
        """The last chunk was seen, and every page is in place."""
        destination, chunks, done = self.destination, self._chunks, self._done
        if destination is None or chunks is None or not chunks.last_seen or self.open_writes or chunks.waiting:
            return False
        return (0 if done is None else done.prefix) >= chunks.wanted(destination)

    def _end(self, state: RoomState) -> None:
        """One terminal state; the handle hears it last, when all else is known (rule 6, ending)."""
        if self._chunks is not None:
            self._chunks.drop()
        self.state = state
        self.ended = True
        self.settle()
        if self.handle is None:
            return
        if self.failure is not None:
            self.handle.fail(self.failure)
        else:
            self.handle.turn(POLL_SUCCESS)

    def settle(self) -> None:
        """Writes advance from OPEN once the state is terminal and none is open (rule 7, writes)."""
        if self.open_writes:
            return
        self.writes = self.worst
        if self.handle is not None and self.writes is not WRITES_UNKNOWN:
            self.handle.release()  # of the source: nothing reads it any more
