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
from kvgrpc.pull.taking.silent import SilentHolders
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
        began = moved = self._now()
        end = moved + timeout
        try:
            landing = self._landing(found.holder)
        except KvGrpcError as error:
            return [failed(error.message)] * len(buffers)
        free, results = landing.memory.slots, list[PageResult]()
        while len(results) < len(buffers):
            at, left = first + len(results), len(buffers) - len(results)
            wait = max(0.0, min(self._stall, end - self._now()))
            slots = yield ForPages(partial(free.take, left, leaving_half=True), wait)
            if not slots:
                results += [failed(f"no staging page came back in {wait:.1f} s")] * left
                break
            batch = _Batch(found, prompt, at, landing, slots, moved, end)
            count, failure = yield from self._pull(batch, buffers[len(results) :])
            results += [OK] * count
            moved = self._now() if count else moved
            if failure is not None and self._may_wait(failure, moved, end):
                yield ForTime(_pause_after(failure))
            elif count < len(slots) and (failure is not None or not count):
                why = MISSING if failure is None else failed(failure.message)
                results += [why] * (len(buffers) - len(results))
        brought = sum(result.ok for result in results)
        self._book.note_rate(found.holder.engine, brought, self._now() - began)
        return results

    def _may_wait(self, failure: Failure, moved: float, end: float) -> bool:
        """True if a holder that is busy may be asked again: it has lent something of late, and there is time."""
        if failure.retry_after is None:
            return False
        again = self._now() + _pause_after(failure)
        return again < end and again - moved < self._stall

    def _pull(self, batch: _Batch, buffers: Sequence[PageBuffers]) -> Waiting[tuple[int, Failure | None]]:
        """One room for each share: how many leading pages of the batch came, and what went wrong."""
        slots, rooms = batch.slots, batch.rooms
        try:
            count, failure = yield from self._open(batch)
            for room in rooms:
                if count and failure is None:
                    failure = yield from self._receive(room, batch.end)
                elif not room.receiver.ended:
                    engine = batch.found.holder.engine
                    room.receiver.abort(f"another rank of {engine} does not lend the rest of these pages")
            if count and failure is None:
                failure = self._copy(batch.landing, slots[:count], buffers)
            for room in rooms:
                if room.receiver.failure is None:
                    room.entry.done = room.entry.lent if failure is None else 0
        finally:
            self._end(batch)
        return (0, failure) if failure is not None else (count, None)

    def _open(self, batch: _Batch) -> Waiting[tuple[int, Failure | None]]:
        """Asks for a share after the other, each for as many pages as were lent before: how many all of them lent."""
        found, memory, count = batch.found, batch.landing.memory, len(batch.slots)
        for share, part in enumerate((found, *found.others)):
            room, holder = self._new_room(), part.holder
            try:
                lent = yield from self._ask(batch, part, count, room)
            except KvGrpcError as error:
                return 0, Failure.of(error)
            if not lent.pages:
                return 0, None
            receiver = KVReceiver(batch.landing.manager, holder.sessions, room, prefill_dp_rank=lent.session.rank.dp)
            entry = self._entry(holder, lent.holder, room, count, lent.pages, memory.page_bytes)
            batch.rooms.append(_Room(receiver, entry, holder))
            count = lent.pages
            receiver.init(memory.pages(batch.slots[:count], share))
        return count, None

    def _ask(self, batch: _Batch, part: Found, count: int, room: int) -> Waiting[Lent]:
        """Returns what a holder lends. A busy one is asked again while shares that others have lent are on their way,
        which would have to be lent anew. Raises KvGrpcError."""
        while True:
            left = batch.end - self._now()
            try:
                lent: Lent = yield ForAnswer(self._lend, (part, batch.prompt, batch.first, count, room, left))
                return lent
            except KvGrpcError as error:
                failure = Failure.of(error)
                others_come = batch.rooms and all(each.receiver.failure is None for each in batch.rooms)
                if not others_come or not self._may_wait(failure, batch.moved, batch.end):
                    raise
            yield ForTime(_pause_after(failure))

    def _receive(self, room: _Room, end: float) -> Waiting[Failure | None]:
        """Until a room has ended; why it brought nothing."""
        receiver = room.receiver
        in_time = yield from self._wait(receiver, room.entry, end)
        if receiver.failure is None:
            self._silent.forget(room.holder.address)
        elif in_time:
            self._silent.failed(room.holder.address)
        return self._brought(receiver)

    def _brought(self, receiver: KVReceiver) -> Failure | None:
        """A room that failed brought none of its pages."""
        return receiver.failure

    def _copy(self, landing: Landing, slots: Sequence[int], buffers: Sequence[PageBuffers]) -> Failure | None:
        if not landing.memory.copy_out(slots, buffers[: len(slots)]):
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

    def _wait(self, receiver: KVReceiver, entry: Entry, end: float) -> Waiting[bool]:
        """Until the room has ended: at the latest when nothing came for as long as a holder may take, or at ``end``;
        False there, whatever the holder would still have sent."""
        moved = self._now()
        while not receiver.ended:
            yield ForRoom(receiver, _LOOK_SECONDS)
            now = self._now()
            if receiver.pages_done > entry.done:
                entry.done, moved = receiver.pages_done, now
            elif now - moved >= self._stall:
                receiver.abort(f"{entry.peer} sent nothing for {self._stall:g} s")
            if now >= end and not receiver.ended:
                receiver.abort("the time of the pull is over")
                return False
        return True

    def _entry(self, holder: Holder, ref: RankRef, room: int, asked: int, lent: int, page_bytes: int) -> Entry:
        entry = Entry(room, PullDirection.TAKEN, ref, holder.address, asked, lent, page_bytes)
        self._book.begin(entry)
        return entry


def _pause_after(failure: Failure) -> float:
    return max(failure.retry_after or 0.0, _LEAST_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class _Room:
    """One share on its way."""

    receiver: KVReceiver
    entry: Entry
    holder: Holder


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pages of a prompt from ``first`` on, one for each slot, and the ``rooms`` in which their shares come. ``moved``:
    when a page of this pull came last; ``end``: of its time."""

    found: Found
    prompt: Sequence[str]
    first: int
    landing: Landing
    slots: list[int]
    moved: float
    end: float
    rooms: list[_Room] = field(default_factory=list)
