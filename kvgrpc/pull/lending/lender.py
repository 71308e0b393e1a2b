"""The holder's side of a pull: pages are copied out of the host cache and given to a room, as a prefill sends them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.model import RankRef
from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.prefetch.storage.keys import Keys
from kvgrpc.pull.book import Entry, PullBook
from kvgrpc.pull.common import CommonPages
from kvgrpc.pull.heads import PageHeads, Share
from kvgrpc.pull.model import PullDirection
from kvgrpc.pull.staging import Staging
from kvgrpc.transfer import KVSender
from kvgrpc.transfer.runtime.boundary import PrefillRuntime

UNOPENED_SECONDS = 10.0
"""A room that its taker does not open within this time ends."""
# About what a batch takes.
RETRY_SECONDS = 0.02
_LOOK_SECONDS = 0.5


class HostCache(Protocol):
    """The cache that lends. Thread-safe."""

    def count(self, hashes: Sequence[str]) -> int:
        """Leading pages that the host has."""

    def reading(self, hashes: Sequence[str], first: int = 0) -> contextlib.AbstractContextManager[Sequence[int]]:
        """The leading pages of ``hashes[first:]`` that the host has; they are not evicted before the end of the
        context."""

    def buffers(self, page: int) -> PageBuffers:
        """Returns the places of the bytes of one of these pages."""


@dataclass(frozen=True, slots=True)
class LentPages:
    """The parts of what a rank lends: the cache, the names of its pages in storage, and what a page is.

    ``heads``: where heads lie in a page, part after part; none: that cannot be told. ``shares``: which ranks of an
    engine of another tensor-parallel size have a page of ours together; none: its pages are not to be had. ``common``:
    how engines of another kind have our pages, and we theirs; None: not at all. ``fills``: False at a rank into whose
    ``cache`` nothing ever comes, because another rank has the same bytes and lends them for both. ``event_hash``: of a
    page's hash, the number by which the engine's events name it; None: as SGLang's do.
    """

    cache: HostCache
    keys: Keys
    page_bytes: int
    page_tokens: int
    dtype: str
    heads: tuple[PageHeads, ...] = ()
    shares: Callable[[int], Sequence[Share]] = lambda tp_size: ()
    common: CommonPages | None = None
    fills: bool = True
    event_hash: Callable[[bytes], int] | None = None


class Lender:
    """Lends pages of one host cache. ``lend`` is for threads that may copy; ``settle``, which looks whether a loan
    ``is_over`` and then ``end``s it, for the loop.

    The cache is held only while pages are copied: what a room sends are copies, so a taker that is slow or dead costs
    staging memory and nothing of the cache. One engine has at most half of that memory.
    """

    def __init__(
        self,
        cache: HostCache,
        staging: Staging,
        manager: PrefillRuntime,
        book: PullBook,
        now: Callable[[], float] = time.monotonic,
        common: CommonPages | None = None,
    ) -> None:
        self._now = now
        self._cache = cache
        self._common = common
        self._staging = staging
        self._manager = manager
        self._book = book
        self._lock = threading.Lock()
        # By engine: a rank chooses its own epoch and coordinates, each of which would have a share.
        self._lent_to: Counter[str] = Counter()
        self._share = max(1, staging.lending.size // 2)

    def count(self, hashes: Sequence[str], *, common: bool = False) -> int:
        """Leading pages that could be lent, were there room for all of them. ``common``: these are common names."""
        own = self._own(hashes, common)
        return self._cache.count(own) if own else 0

    def lend(
        self,
        hashes: Sequence[str],
        first: int,
        room: int,
        taker: RankRef,
        *,
        common: bool = False,
        most: int | None = None,
    ) -> Loan | None:
        """Copies ``hashes[first:]`` as far as the host has them and as there is room for. None: nothing is lent.
        ``common``: these are common names, and the copies are in the common order; ``most``: pages, None: all.

        Raises TooManyRequests while everything that this taker may have, or that there is, is lent. Who waits asks each
        20 ms, and the cache is not read for it.
        """
        self._check_room(taker)
        # An engine pins what is read.
        own = self._own(hashes[: first + self._share], common)
        if len(own) <= first:
            return None
        with self._cache.reading(own, first) as pages:
            if not pages:
                return None
            staged = self._take(taker, len(pages) if most is None else min(len(pages), most))
            try:
                lent = map(self._cache.buffers, pages[: len(staged)])
                axes = self._common.axes if common and self._common is not None else None
                if not self._staging.copy_in(staged, lent, axes):
                    raise ServerDraining("the cache is closing and lends nothing more", retry_after=1.0)
            except BaseException:
                self._staging.lending.give_back(staged)
                self._forget(taker, len(staged))
                raise
        # A prompt's pages: without this word whoever knows the number of the room may name it.
        sender = KVSender(self._manager, room=room, decode=taker.rank.engine)
        sender.init(len(staged))
        sender.send(staged, is_last=True)
        entry = Entry(room, PullDirection.LENT, taker, "", len(hashes) - first, len(staged))
        self._book.begin(entry)
        return Loan(sender, staged, entry, self._now())

    async def settle(self, loan: Loan) -> None:
        """Waits until the room has ended, and gives its pages back by evidence."""
        try:
            while not self.is_over(loan):
                due = self._now() + _LOOK_SECONDS
                await loan.sender.wait_async(_LOOK_SECONDS)
                # This process stood still: that its taker opens the room may lie unread.
                loan.lent_at += max(0.0, self._now() - due)
        finally:  # cancelled too: the pages of a room that nobody looks after any more are nobody's
            self.end(loan)

    def is_over(self, loan: Loan) -> bool:
        """A look at its room, which ends here if its taker did not open it in time."""
        sender = loan.sender
        if sender.decode_prefix_pages is None and self._now() - loan.lent_at >= UNOPENED_SECONDS:
            sender.abort(f"nobody opened the room within {UNOPENED_SECONDS:g} s")
        loan.entry.done = sender.pages_done
        return sender.ended

    def end(self, loan: Loan) -> None:
        """Its pages come back by evidence."""
        sender, entry = loan.sender, loan.entry
        sender.close()
        entry.done = entry.lent if sender.failure is None else sender.pages_done
        self._forget(entry.peer, entry.lent)
        self._staging.lending.retire(loan.pages, lambda: sender.release_safe)
        self._book.end(entry, sender.failure)

    def _own(self, hashes: Sequence[str], common: bool) -> Sequence[str]:
        return self._common.names.own(hashes) if common and self._common is not None else hashes

    def _forget(self, taker: RankRef, pages: int) -> None:
        with self._lock:
            self._lent_to -= Counter({taker.rank.engine: pages})

    def _check_room(self, taker: RankRef) -> None:
        """Raises TooManyRequests where this taker cannot have a single page now."""
        lending = self._staging.lending
        with self._lock:
            if self._lent_to[taker.rank.engine] >= self._share or lending.taken == lending.size:
                raise self._all_is_lent(taker, 1)

    def _take(self, taker: RankRef, most: int) -> list[int]:
        with self._lock:
            share = self._share - self._lent_to[taker.rank.engine]
            staged = self._staging.lending.take(min(most, share)) if share > 0 else []
            if not staged:
                raise self._all_is_lent(taker, most)
            self._lent_to[taker.rank.engine] += len(staged)
            return staged

    def _all_is_lent(self, taker: RankRef, most: int) -> TooManyRequests:
        lent, engine = self._staging.lending.taken, taker.rank.engine
        return TooManyRequests(
            f"{lent} pages are lent, {self._lent_to[engine]} of them to {engine}",
            metadata={"limit": self._share, "value": most, "scope": "lent pages"},
            retry_after=RETRY_SECONDS,
        )


@dataclass(eq=False, slots=True)
class Loan:
    """Pages on their way to one taker."""

    sender: KVSender
    pages: Sequence[int]
    entry: Entry
    lent_at: float
