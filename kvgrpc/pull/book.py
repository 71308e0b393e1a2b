"""The pulls that this rank took and lent: those in flight, and the last that ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from kvgrpc.errors import Failure
from kvgrpc.model import RankRef
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited
from kvgrpc.pull.model import PullDirection, PullRow

REMEMBERED = 256
MAX_OPEN_SHOWN = 1_024
LEAST_MEASURED_PAGES, REMEMBERED_RATES = 8, 256
_NEWEST_SHARE = 0.3

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Entry:
    """One pull while it runs. ``done`` may be written without a lock: it only grows. ``page_bytes``: of a page, 0: as
    the book says."""

    room: int
    direction: PullDirection
    peer: RankRef
    address: str
    asked: int
    lent: int
    page_bytes: int = 0
    done: int = 0
    began_at: float = field(default_factory=time.time)
    _began: float = field(default_factory=time.monotonic)
    _took: float | None = None
    _failure: Failure | None = None

    def row(self, page_bytes: int) -> PullRow:
        took = time.monotonic() - self._began if self._took is None else self._took
        return PullRow(
            self.room,
            self.direction,
            self.peer,
            self.address,
            self.asked,
            self.lent,
            self.done,
            self.done * (self.page_bytes or page_bytes),
            self.began_at,
            took,
            self._took is not None,
            self._failure,
        )

    def end(self, failure: Failure | None) -> None:
        self._took, self._failure = time.monotonic() - self._began, failure


class PullBook:
    """Thread-safe. ``page_bytes``: of the pages that are pulled; ``page_seconds``: that the engine takes to compute
    one, 0: nobody said."""

    def __init__(self, page_bytes: int, page_seconds: Callable[[], float] = lambda: 0.0) -> None:
        self._page_bytes, self._page_seconds = page_bytes, page_seconds
        self._lock = threading.Lock()
        # Oldest first. Not by room: whoever asks for a loan names it, also a number that another one has.
        self._open: dict[Entry, None] = {}
        self._ended: deque[Entry] = deque(maxlen=REMEMBERED)
        self._rates: OrderedDict[str, float] = OrderedDict()
        self._lines = RateLimited(_log)

    def in_flight(self) -> tuple[int, int]:
        """Pulls that were lent and that were taken, of those that run."""
        with self._lock:
            lent = sum(entry.direction is PullDirection.LENT for entry in self._open)
            return lent, len(self._open) - lent

    def rates(self) -> tuple[tuple[str, float], ...]:
        """Bytes in a second from each engine that pages came from, the newest first."""
        with self._lock:
            return tuple(reversed(self._rates.items()))

    def note_taken(self, engine: str, pages: int, seconds: float) -> None:
        """So many pages came from an engine in this time, questions and copies included. Few of them say little of its
        rate."""
        each = self._page_seconds()
        if each:
            metrics.PULL_SAVED.inc(pages * each)
            metrics.PULL_SPENT.inc(seconds)
        if pages < LEAST_MEASURED_PAGES or seconds <= 0:
            return
        rate = pages * self._page_bytes / seconds
        with self._lock:
            before = self._rates.pop(engine, rate)
            self._rates[engine] = before + _NEWEST_SHARE * (rate - before)
            if len(self._rates) > REMEMBERED_RATES:
                self._rates.popitem(last=False)

    def begin(self, entry: Entry) -> None:
        with self._lock:
            self._open[entry] = None

    def end(self, entry: Entry, failure: Failure | None = None) -> None:
        entry.end(failure)
        with self._lock:
            self._open.pop(entry, None)
            self._ended.appendleft(entry)
        direction = entry.direction.name.lower()
        reason = "OK" if failure is None else failure.reason.name
        metrics.PULLS.labels(direction, reason).inc()
        metrics.PULLED_BYTES.labels(direction).inc(entry.done * (entry.page_bytes or self._page_bytes))
        if failure is not None:
            what = f"{entry.done} of {entry.lent} pages {direction} ({entry.peer})"
            self._lines.warning(f"pulls that failed {direction}", f"pull {entry.room}: {what}: {failure.message}")

    def rows(self, *, open_only: bool = False) -> list[PullRow]:
        """Those in flight, oldest first, 1,024 of them at most, then those that ended, newest first."""
        with self._lock:
            entries = [*islice(self._open, MAX_OPEN_SHOWN), *(() if open_only else self._ended)]
        return [entry.row(self._page_bytes) for entry in entries]
