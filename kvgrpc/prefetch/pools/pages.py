"""The states of a pool's pages (free, being filled, present) and who reads them: one owner for each page, always.

Taking what is taken and freeing what is free are errors at once, in production too: a page with two owners is another
request's KV cache, and nothing later would notice.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence

import numpy as np

from kvgrpc.errors import PageStateInvalid
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.model import Pages as Pages


class PageState(enum.IntEnum):
    """FREE: nobody's. RESERVED: somebody's, its bytes are on their way. PRESENT: all its bytes are there."""

    FREE = 0
    RESERVED = 1
    PRESENT = 2


def as_pages(pages: Sequence[int] | Pages) -> Pages:
    """Page numbers as an array of their own."""
    return np.array(pages, dtype=np.int64).reshape(-1)


class PageTable:
    """Pages 0 to ``pages`` - 1 of one pool. Thread-safe; no call waits for anything but its lock.

    Each call takes all of its pages or, raising PageStateInvalid, none. ``name`` is said in errors.
    """

    def __init__(self, pages: int, name: str) -> None:
        self.pages = pages
        self.name = name
        self._lock = threading.Lock()
        self._state = np.zeros(pages, dtype=np.uint8)
        self._readers = np.zeros(pages, dtype=np.int32)
        # A stack: the page that was freed last is the one that caches still hold.
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int64)
        self._free_count = pages

    @property
    def free_count(self) -> int:
        return self._free_count

    def counts(self) -> dict[str, int]:
        """Pages by state in lower case, and "read" for those with readers."""
        with self._lock:
            states = np.bincount(self._state, minlength=3)
            counted = {state.name.lower(): int(states[state]) for state in PageState}
            return {**counted, "read": int(np.count_nonzero(self._readers))}

    def take(self, count: int) -> Pages | NotEnoughPages:
        """Takes so many pages, RESERVED. ``NotEnoughPages``: fewer are free, and none is taken. Never evicts."""
        if count < 0:
            raise self._invalid("take", f"{count} pages", "at least 0 pages")
        with self._lock:
            if count > self._free_count:
                return NotEnoughPages(count - self._free_count)
            pages: Pages = self._free[self._free_count - count : self._free_count][::-1].copy()
            if np.any(self._state[pages] != PageState.FREE):
                raise self._invalid("take", "a page that is in use", "a free page")
            self._free_count -= count
            self._state[pages] = PageState.RESERVED
            return pages

    def commit(self, pages: Pages) -> None:
        """RESERVED pages are PRESENT from now on."""
        with self._lock:
            self._expect("commit", pages, (PageState.RESERVED,))
            self._state[pages] = PageState.PRESENT

    def settle(self, pages: Pages, filled: bool) -> None:
        """RESERVED pages are PRESENT, or those of them that still are RESERVED go back. An engine's own pages are in no
        state here, and stay so."""
        with self._lock:
            reserved: Pages = pages[self._state[pages] == PageState.RESERVED]
            self._expect("settle", reserved, (PageState.RESERVED,))
            if not filled:
                self._free_now(reserved)
            elif len(reserved) == len(pages):
                self._state[pages] = PageState.PRESENT

    def release(self, pages: Pages) -> None:
        """Gives back pages that nobody reads."""
        with self._lock:
            self._expect("free", pages, (PageState.RESERVED, PageState.PRESENT))
            if np.any(self._readers[pages] != 0):
                page = int(pages[np.flatnonzero(self._readers[pages])[0]])
                raise self._invalid("free", f"page {page}, which a copy reads", "pages that nobody reads")
            self._free_now(pages)

    def read(self, pages: Pages) -> None:
        """One reader more for each page, which must be PRESENT: it is not freed before ``end_read``."""
        with self._lock:
            self._expect("read", pages, (PageState.PRESENT,))
            self._readers[pages] += 1

    def end_read(self, pages: Pages) -> None:
        """One reader less."""
        with self._lock:
            self._expect("end the read of", pages, (PageState.PRESENT,))
            if np.any(self._readers[pages] < 1):
                raise self._invalid("end the read of", "a page without a reader", "pages with a reader")
            self._readers[pages] -= 1

    def unread(self, pages: Pages) -> Pages:
        """Those of them that are PRESENT and have no reader."""
        with self._lock:
            idle: Pages = pages[(self._state[pages] == PageState.PRESENT) & (self._readers[pages] == 0)]
            return idle

    def unread_count(self) -> int:
        """Pages that are PRESENT and have no reader."""
        with self._lock:
            return int(np.count_nonzero((self._state == PageState.PRESENT) & (self._readers == 0)))

    def state(self, page: int) -> PageState:
        return PageState(int(self._state[page]))

    def commit_reserved(self, pages: Pages) -> Pages:
        """Those of them that are RESERVED, which are PRESENT from now on; the others must be that already."""
        with self._lock:
            self._expect("commit", pages, (PageState.RESERVED, PageState.PRESENT))
            reserved: Pages = pages[self._state[pages] == PageState.RESERVED]
            self._state[reserved] = PageState.PRESENT
            return reserved

    def _free_now(self, pages: Pages) -> None:
        self._state[pages] = PageState.FREE
        self._free[self._free_count : self._free_count + len(pages)] = pages[::-1]
        self._free_count += len(pages)

    def _expect(self, verb: str, pages: Pages, states: tuple[PageState, ...]) -> None:
        if not len(pages):
            return
        ordered = np.sort(pages)
        if int(ordered[0]) < 0 or int(ordered[-1]) >= self.pages:
            raise self._invalid(verb, f"pages {int(ordered[0])} to {int(ordered[-1])}", f"0 to {self.pages - 1}")
        if (ordered[1:] == ordered[:-1]).any():
            raise self._invalid(verb, "a page twice in one call", "different pages")
        found = self._state[pages]
        wrong = np.flatnonzero(np.logical_and.reduce([found != state for state in states]))
        if len(wrong):
            page = int(pages[wrong[0]])
            wanted = " or ".join(state.name for state in states)
            raise self._invalid(verb, f"page {page}, which is {self.state(page).name}", f"{wanted} pages")

    def _invalid(self, verb: str, what: str, rule: str) -> PageStateInvalid:
        return PageStateInvalid(
            f"{self.name}: cannot {verb} {what}: it takes {rule}",
            metadata={"pool": self.name, "verb": verb, "what": what, "rule": rule},
        )
