"""The taker's side of a pull: asks a holder to lend, receives as a decode does, copies into its own cache's pages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvgrpc.errors import Failure, KvGrpcError, ServerDraining
from kvgrpc.model import RankRef
from kvgrpc.prefetch.storage.base import MISSING, OK, PageBuffers, PageResult, failed
from kvgrpc.pull.book import Entry, PullBook
from kvgrpc.pull.model import Found, Holder, Lent, PullDirection
from kvgrpc.pull.taking.landing import Landing
from kvgrpc.pull.taking.silent import OWN_DELAY_SECONDS, SilentHolders
from kvgrpc.pull.waits import ForAnswer, ForPages, ForRoom, ForTime, Waiting, blocking
from kvgrpc.transfer import KVReceiver
from kvgrpc.transfer.protocol.types import MAX_ROOM

Lend = Callable[[Found, Sequence[str], int, int, int, float], Lent]
"""Asks a holder for pages of a prompt in a room: (found, prompt, first, count, room, timeout). Raises KvGrpcError."""

_LOOK_SECONDS = 0.2
# Between two questions of a holder that is busy: one that says "at once" would be asked thousands of times a second.
_LEAST_PAUSE_SECONDS = 0.01


class Taker:
    """Takes pages from one holder at a time; thread-safe. ``take`` waits, ``taking`` says what for.

    A holder may be several ranks of an engine that divides pages by heads among more of them: each lends its share of
    the same pages in a room of its own, and a page counts once all shares of it are there.

    ``stall``: seconds without a further page after which a holder is given up. Staging pages, which a holder that fell
    silent may still have, are waited for as long. What is taken is staged, so nothing of the cache waits for evidence.
    """

    piece_bytes = 64 << 20
    """Of one room at most: of a larger batch one piece is copied while another is on its way. Smaller pieces cost more
    CPU than that saves on two cores, over either plane; larger ones save some, but pages count when their room's write
    has ended, so that two readers over 1 Gbit/s would give up a holder that sends. Batches of small pages: 16 MiB."""

    def __init__(
        self,
        landing: Callable[[Holder], Landing],
        lend: Lend,
        book: PullBook,
        stall: float,
        silent: SilentHolders,
        now: Callable[[], float] = time.monotonic,
        new_room: Callable[[], int] = lambda: secrets.randbelow(MAX_ROOM) + 1,
    ) -> None:
        """``landing``: where pages of a holder land. Raises KvGrpcError."""
        self._landing = landing
        self._lend = lend
        self._book = book
        self._stall = stall
        self._silent = silent
        self._now = now
        self._new_room = new_room

    def take(
        self, found: Found, prompt: Sequence[str], first: int, buffers: Sequence[PageBuffers], timeout: float
    ) -> list[PageResult]:
        """Fills ``buffers[i]`` with the page ``prompt[first + i]``; one result each, in order, a prefix of them OK."""
        return blocking(self.taking(found, prompt, first, buffers, timeout))

    def taking(
        self, found: Found, prompt: Sequence[str], first: int, buffers: Sequence[PageBuffers], timeout: float
    ) -> Waiting[list[PageResult]]:
        """``take`` as a pull that says what it waits for."""
        began = self._now()
        try:
            landing = self._landing(found.holder)
        except KvGrpcError as error:
            return [failed(error.message)] * len(buffers)
        pull = _Pull(found, prompt, first, buffers, landing, began + timeout, began)
        try:
            why = yield from self._take_all(pull)
        finally:
            for batch in (pull.now, pull.behind):  # of one that is cancelled
                if batch is not None:
                    self._end(batch)
        self._book.note_taken(found.holder.engine, pull.done, self._now() - began)
        return [OK] * pull.done + [why] * (len(buffers) - pull.done)

    def _take_all(self, pull: _Pull) -> Waiting[PageResult]:
        """Batch after batch; the next one is opened before one is waited for, so that its holder copies while that one
        is on its way, and it is on its way while that one is copied here. Returns why there are no more."""
        while pull.done < len(pull.buffers):
            batch, pull.behind = pull.behind, None
            if batch is None:
                wait = max(0.0, min(self._stall, pull.end - self._now()))
                batch = pull.now = yield from self._begin(pull, pull.done, wait)
                if batch is None:
                    return failed(f"no staging page came back in {wait:.1f} s")
                yield from self._open(batch)
            pull.now = batch
            batch.moved = pull.moved = max(batch.moved, pull.moved)
            if batch.count and batch.failure is None:
                yield from self._open_behind(pull, batch)
                batch.failure = yield from self._receive_all(batch)
            if batch.count and batch.failure is None:
                batch.failure = self._copy(batch, pull.buffers[pull.done :])
            self._note_done(batch)
            pull.now = None
            self._end(batch)
            if batch.failure is None and batch.count:
                pull.done, pull.moved = pull.done + batch.count, self._now()
                continue
            self._drop_behind(pull)
            if batch.failure is None:
                return MISSING
            if not self._may_wait(batch.failure, pull.moved, pull.end):
                return failed(batch.failure.message)
            pull.moved += yield from self._late(ForTime(_pause_after(batch.failure)))
        return MISSING

    def _begin(self, pull: _Pull, done: int, wait: float) -> Waiting[_Batch | None]:
        """Pages to land in for what comes behind the first ``done`` ones; None: there were none in time."""
        memory, left = pull.landing.memory, len(pull.buffers) - done
        pieces = -(-left * memory.page_bytes // self.piece_bytes)
        most = -(-left // pieces)
        slots = yield ForPages(partial(memory.slots.take, most, leaving_half=True), wait)
        if not slots:
            return None
        return _Batch(pull.found, pull.prompt, pull.first + done, pull.landing, slots, pull.moved, pull.end)

    def _open_behind(self, pull: _Pull, batch: _Batch) -> Waiting[None]:
        """Opens the next batch behind one, where that can be had now. A holder that does not lend it now is asked again
        once that batch is over."""
        done = pull.done + batch.count
        if done >= len(pull.buffers):
            return
        behind = pull.behind = yield from self._begin(pull, done, 0.0)
        if behind is not None:
            behind.is_ahead = True
            yield from self._open(behind)
            if behind.failure is not None:
                self._drop_behind(pull)

    def _drop_behind(self, pull: _Pull) -> None:
        batch, pull.behind = pull.behind, None
        if batch is not None:
            for room in batch.rooms:
                room.receiver.abort("it is not waited for: pages before it did not come")
            self._end(batch)

    def _may_wait(self, failure: Failure, moved: float, end: float) -> bool:
        """True if a holder that is busy may be asked again: it has lent something of late, and there is time."""
        if failure.retry_after is None:
            return False
        again = self._now() + _pause_after(failure)
        return again < end and again - moved < self._stall

    def _open(self, batch: _Batch) -> Waiting[None]:
        """Asks for a share after the other, each for as many pages as were lent before: ``count`` says how many all of
        them lent."""
        found, memory, count = batch.found, batch.landing.memory, len(batch.slots)
        for share, part in enumerate((found, *found.others)):
            room, holder = self._new_room(), part.holder
            try:
                lent = yield from self._ask(batch, part, count, room)
            except KvGrpcError as error:
                count, batch.failure = 0, Failure.of(error)
                break
            count = lent.pages
            if not count:
                break
            receiver = KVReceiver(batch.landing.manager, holder.sessions, room, prefill_dp_rank=lent.session.rank.dp)
            entry = self._entry(holder, lent.holder, room, count, lent.pages, memory.page_bytes)
            batch.rooms.append(_Room(receiver, entry, holder, self._now()))
            receiver.init(memory.pages(batch.slots[:count], share))
        batch.count = count
        if not count:
            for each in batch.rooms:
                each.receiver.abort(f"another rank of {found.holder.engine} does not lend the rest of these pages")

    def _receive_all(self, batch: _Batch) -> Waiting[Failure | None]:
        """Until all rooms of a batch have ended; why they brought nothing."""
        failure: Failure | None = None
        before = batch.moved  # one link brings what is before it first
        for room in batch.rooms:
            if failure is None:
                room.quiet_since = max(room.quiet_since, before)
                failure = yield from self._receive(room, batch.end)
                before = self._now()
            else:
                room.receiver.abort(f"another rank of {batch.found.holder.engine} did not bring its share")
        return failure

    def _note_done(self, batch: _Batch) -> None:
        for room in batch.rooms:
            if room.receiver.failure is None:
                room.entry.done = room.entry.lent if batch.count and batch.failure is None else 0

    def _ask(self, batch: _Batch, part: Found, count: int, room: int) -> Waiting[Lent]:
        """Returns what a holder lends. A busy one is asked again while shares that others have lent are on their way,
        which would have to be lent anew. Raises KvGrpcError."""
        while True:
            left = batch.end - self._now()
            if batch.is_ahead:  # a batch is on its way meanwhile, and may stall no longer
                left = min(left, self._stall)
            try:
                lent: Lent = yield ForAnswer(self._lend, (part, batch.prompt, batch.first, count, room, left))
                return lent
            except KvGrpcError as error:
                failure = Failure.of(error)
                others_come = batch.rooms and all(each.receiver.failure is None for each in batch.rooms)
                if not others_come or not self._may_wait(failure, batch.moved, batch.end):
                    raise
            batch.moved += yield from self._late(ForTime(_pause_after(failure)))

    def _receive(self, room: _Room, end: float) -> Waiting[Failure | None]:
        """Until a room has ended; why it brought nothing."""
        receiver = room.receiver
        in_time = yield from self._wait(room, end)
        if receiver.failure is None:
            self._silent.forget(room.holder.address)
        elif in_time:
            self._silent.failed(room.holder.address)
        return self._brought(receiver)

    def _brought(self, receiver: KVReceiver) -> Failure | None:
        """A room that failed brought none of its pages."""
        return receiver.failure

    def _copy(self, batch: _Batch, buffers: Sequence[PageBuffers]) -> Failure | None:
        if not batch.landing.memory.copy_out(batch.slots[: batch.count], buffers[: batch.count]):
            return Failure.of(ServerDraining("the cache is closing and takes nothing more"))
        return None

    def _end(self, batch: _Batch) -> None:
        """Slots that no room was told of are free at once, the others when no holder writes to them any more."""
        slots, rooms, free = batch.slots, batch.rooms, batch.landing.memory.slots
        used = rooms[0].entry.lent if rooms else 0
        free.give_back(slots[used:])
        for room in rooms:
            room.receiver.close()
        if used:
            receivers = [room.receiver for room in rooms]
            free.retire(slots[:used], lambda: all(each.release_safe for each in receivers))
        for room in rooms:
            self._book.end(room.entry, room.receiver.failure)

    def _wait(self, room: _Room, end: float) -> Waiting[bool]:
        """Until the room has ended: at the latest when nothing came for as long as a holder may take, or at ``end``;
        False there, whatever the holder would still have sent."""
        receiver, entry, moved = room.receiver, room.entry, room.quiet_since
        while not receiver.ended:
            now = self._now()
            if receiver.pages_done > entry.done:
                entry.done, moved = receiver.pages_done, now
            elif now - moved >= self._stall:
                receiver.abort(f"{entry.peer} sent nothing for {self._stall:g} s")
            if now >= end and not receiver.ended:
                receiver.abort("the time of the pull is over")
                return False
            if not receiver.ended:
                moved += yield from self._late(ForRoom(receiver, _LOOK_SECONDS))
        return True

    def _late(self, wait: ForTime | ForRoom) -> Waiting[float]:
        """Waits; seconds by which that took much too long: this process stood still, and no holder was silent."""
        due = self._now() + wait.seconds
        yield wait
        late = self._now() - due
        return late if late > OWN_DELAY_SECONDS else 0.0

    def _entry(self, holder: Holder, ref: RankRef, room: int, asked: int, lent: int, page_bytes: int) -> Entry:
        entry = Entry(room, PullDirection.TAKEN, ref, holder.address, asked, lent, page_bytes)
        self._book.begin(entry)
        return entry


def _pause_after(failure: Failure) -> float:
    return max(failure.retry_after or 0.0, _LEAST_PAUSE_SECONDS)


@dataclass(slots=True)
class _Room:
    """One share on its way. ``quiet_since``: when it was opened, or what comes before it in its pull was there."""

    receiver: KVReceiver
    entry: Entry
    holder: Holder
    quiet_since: float


@dataclass(slots=True)
class _Batch:
    """Pages of a prompt from ``first`` on, one for each slot, and the ``rooms`` in which their shares come. ``moved``:
    when a page of this pull came last; ``end``: of its time; ``count``: pages that were lent; ``is_ahead``: another
    batch was on its way when it was asked for."""

    found: Found
    prompt: Sequence[str]
    first: int
    landing: Landing
    slots: list[int]
    moved: float
    end: float
    rooms: list[_Room] = field(default_factory=list)
    count: int = 0
    failure: Failure | None = None
    is_ahead: bool = False


@dataclass(slots=True)
class _Pull:
    """One call of ``taking``: ``done`` pages are in place, ``now`` is the batch that is waited for, and ``behind`` the
    one that follows it."""

    found: Found
    prompt: Sequence[str]
    first: int
    buffers: Sequence[PageBuffers]
    landing: Landing
    end: float
    moved: float
    done: int = 0
    now: _Batch | None = None
    behind: _Batch | None = None
