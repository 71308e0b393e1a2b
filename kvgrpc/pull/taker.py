"""The taker's side of a pull: asks a holder to lend, receives as a decode does, copies into its own cache's pages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvgrpc.errors import Failure, KvGrpcError, ServerDraining
from kvgrpc.model import RankRef
from kvgrpc.prefetch.storage.base import MISSING, OK, PageBuffers, PageResult, failed
from kvgrpc.pull.book import Entry, PullBook
from kvgrpc.pull.model import Found, Holder, Lent, PullDirection
from kvgrpc.pull.silent import SilentHolders
from kvgrpc.pull.staging import Staging
from kvgrpc.pull.waits import ForAnswer, ForPages, ForRoom, ForTime, Waiting, blocking
from kvgrpc.transfer import KVReceiver
from kvgrpc.transfer.protocol.types import MAX_ROOM
from kvgrpc.transfer.runtime.boundary import DecodeRuntime

Lend = Callable[[Found, Sequence[str], int, int, int, float], Lent]
"""Asks a holder for pages of a prompt in a room: (found, prompt, first, count, room, timeout). Raises KvGrpcError."""

_LOOK_SECONDS = 0.2


class Taker:
    """Takes pages from one holder at a time; thread-safe. ``take`` waits, ``taking`` says what for.

    ``stall``: seconds without a further page after which a holder is given up. Staging pages, which a holder that fell
    silent may still have, are waited for as long. What is taken is staged, so nothing of the cache waits for evidence.
    """

    def __init__(
        self,
        manager: DecodeRuntime,
        staging: Staging,
        lend: Lend,
        book: PullBook,
        stall: float,
        silent: SilentHolders,
        now: Callable[[], float] = time.monotonic,
        new_room: Callable[[], int] = lambda: secrets.randbelow(MAX_ROOM) + 1,
    ) -> None:
        self._manager = manager
        self._staging = staging
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
        results: list[PageResult] = []
        while len(results) < len(buffers):
            at = first + len(results)
            wait = max(0.0, min(self._stall, end - self._now()))
            landing = yield ForPages(partial(self._landing_pages, len(buffers) - len(results)), wait)
            if not landing:
                results += [failed(f"no staging page came back in {wait:.1f} s")] * (len(buffers) - len(results))
                break
            count, failure = yield from self._pull(found, prompt, at, landing, buffers[len(results) :], end)
            results += [OK] * count
            moved = self._now() if count else moved
            if failure is not None and failure.retry_after is not None and self._may_wait(failure, moved, end):
                yield ForTime(failure.retry_after)
            elif count < len(landing) and (failure is not None or not count):
                why = MISSING if failure is None else failed(failure.message)
                results += [why] * (len(buffers) - len(results))
        brought = sum(result.ok for result in results)
        self._book.note_rate(found.holder.engine, brought, self._now() - began)
        return results

    def _landing_pages(self, most: int, timeout: float) -> list[int]:
        return self._staging.landing.take(most, timeout, leaving_half=True)

    def _may_wait(self, failure: Failure, moved: float, end: float) -> bool:
        """True if a holder that is busy may be asked again: it has lent something of late, and there is time."""
        again = self._now() + (failure.retry_after or 0.0)
        return again < end and again - moved < self._stall

    def _pull(
        self,
        found: Found,
        prompt: Sequence[str],
        first: int,
        landing: list[int],
        buffers: Sequence[PageBuffers],
        end: float,
    ) -> Waiting[tuple[int, Failure | None]]:
        """One room: how many leading pages of ``landing`` came, and what went wrong."""
        room, holder = self._new_room(), found.holder
        try:
            arguments = (found, prompt, first, len(landing), room, end - self._now())
            lent: Lent = yield ForAnswer(self._lend, arguments)
        except KvGrpcError as error:
            self._staging.landing.give_back(landing)
            return 0, Failure.of(error)
        except BaseException:
            self._staging.landing.give_back(landing)
            raise
        used, spare = landing[: lent.pages], landing[lent.pages :]
        self._staging.landing.give_back(spare)
        if not used:
            return 0, None
        receiver = KVReceiver(self._manager, holder.sessions, room, prefill_dp_rank=lent.holder.rank.dp)
        entry = self._entry(holder, lent.holder, room, len(landing), len(used))
        try:
            receiver.init(used)
            in_time = yield from self._wait(receiver, entry, end)
            if receiver.failure is None:
                self._silent.forget(holder.address)
            elif in_time:
                self._silent.failed(holder.address)
            failure = self._copy(receiver, used, buffers)
            if receiver.failure is None:
                entry.done = len(used) if failure is None else 0
        finally:
            receiver.close()
            self._staging.landing.retire(used, lambda: receiver.release_safe)
            self._book.end(entry, receiver.failure)
        return (0, failure) if failure is not None else (len(used), None)

    def _copy(self, receiver: KVReceiver, pages: Sequence[int], buffers: Sequence[PageBuffers]) -> Failure | None:
        """Where the room brought its pages they are copied; a room that failed brought none."""
        if receiver.failure is not None:
            return receiver.failure
        if not self._staging.copy_out(pages, buffers[: len(pages)]):
            return Failure.of(ServerDraining("the cache is closing and takes nothing more"))
        return None

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

    def _entry(self, holder: Holder, ref: RankRef, room: int, asked: int, lent: int) -> Entry:
        entry = Entry(room, PullDirection.TAKEN, ref, holder.address, asked, lent)
        self._book.begin(entry)
        return entry
