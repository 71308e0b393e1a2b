"""The log of one event stream: encoded batches in sequence, bounded by batches, bytes and age.

Pure: no thread of its own, the clock is injected. One thread extends it, any thread reads: only for that it has a lock,
the one thing of ``threading`` in a pure module. Batches that were not sent yet wait in the queue, so that nothing
unsent can be evicted here.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock

from kvgrpc.errors import EventsCompacted

# One gRPC message of a replay: at 256 KiB large batches are read at 0.7 times the speed, above 1 MiB nothing is gained,
# and encoding it holds up the event loop for about half a millisecond.
CHUNK_BYTES = 2**20
# What a gRPC client of any language takes in one message without being configured is 4 MiB. The last part of a snapshot
# may be as large as a batch, and has the digest of the state beside it, which is below 256 KiB.
MAX_BATCH_BYTES = 4 * 2**20 - 320 * 1024
# By default 10,000 batches of 27 KB are kept, the largest that engines send on average.
KEPT_BATCHES = 10_000
KEPT_BYTES = 512 * 2**20
KEPT_SECONDS = 86_400.0
_COMPACT_AT = 1024


@dataclass(frozen=True, slots=True)
class DroppedRange:
    """Sequences that were taken but have no batch, both ends inclusive."""

    first: int
    last: int
    cause: str


@dataclass(frozen=True, slots=True)
class Batches:
    """Payloads in sequence without a gap; ``payloads[0]`` has the sequence ``first``."""

    first: int
    payloads: list[bytes]

    @property
    def last(self) -> int:
        return self.first + len(self.payloads) - 1


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """The bounds of a journal: entries, bytes of payload, seconds since an entry was made."""

    batches: int = KEPT_BATCHES
    bytes: int = KEPT_BYTES
    age: float = KEPT_SECONDS


class Journal:
    """A bounded log. Thread-safe; each entry costs about 150 bytes beside its payload."""

    def __init__(self, limits: JournalLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.log_id = secrets.token_hex(16)
        self._limits = limits
        self._clock = clock
        self._lock = Lock()
        self._next = 0
        # One entry is one batch or one hole. The lists run in parallel; what lies before _head is evicted.
        self._entries: list[bytes | DroppedRange] = []
        self._sequences: list[int] = []
        self._ends: list[int] = []
        self._times: list[float] = []
        self._head = 0
        self._holes: list[int] = []
        self._written = 0
        self._evicted = 0

    @property
    def next_sequence(self) -> int:
        """Sequence of the entry that is written next."""
        return self._next

    @property
    def oldest_sequence(self) -> int:
        """Sequence of the oldest entry that is kept; ``next_sequence`` when none is."""
        with self._lock:
            return self._oldest()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the payloads that are kept."""
        return self._written - self._evicted

    def extend(self, entries: Iterable[bytes | DroppedRange]) -> None:
        """Appends payloads and holes, then evicts what is past a limit. A hole begins at ``next_sequence``."""
        now = self._clock()
        with self._lock:
            for entry in entries:
                self._append(entry, now)
            self._evict(now)

    def evict_old(self) -> None:
        """Evicts what is past the age limit, for a log to which nothing is appended."""
        with self._lock:
            self._evict(self._clock())

    def read(self, first: int, last: int | None = None, limit: int = CHUNK_BYTES) -> Batches | DroppedRange | None:
        """Returns what follows a cursor, up to ``last`` inclusive: a hole, or batches of at most ``limit`` bytes (but
        one).

        None: nothing is there yet. Raises EventsCompacted when ``first`` is not kept any more.
        """
        with self._lock:
            oldest = self._oldest()
            if first < oldest:
                raise compacted(self.log_id, first, oldest, self._next)
            if first >= self._next:
                return None
            index = bisect_right(self._sequences, first, lo=self._head) - 1
            entry = self._entries[index]
            if isinstance(entry, DroppedRange):
                until = entry.last if last is None else min(entry.last, last)
                return DroppedRange(max(entry.first, first), until, entry.cause)
            stop = self._end_of_chunk(index, first, last, limit)
            # No hole lies between index and stop.
            return Batches(first, self._entries[index:stop])  # type: ignore[arg-type]

    def _end_of_chunk(self, index: int, first: int, last: int | None, limit: int) -> int:
        before = self._ends[index] - len(self._entries[index])  # type: ignore[arg-type]  # a payload
        stop = max(index + 1, bisect_right(self._ends, before + limit, lo=index))
        hole = bisect_left(self._holes, first)
        if hole < len(self._holes):
            stop = min(stop, index + self._holes[hole] - first)
        if last is not None:
            stop = min(stop, index + last - first + 1)
        return stop

    def _oldest(self) -> int:
        return self._sequences[self._head] if self._head < len(self._sequences) else self._next

    def _append(self, entry: bytes | DroppedRange, now: float) -> None:
        first = self._next
        if isinstance(entry, DroppedRange):
            if entry.first != first or entry.last < first:
                raise ValueError(f"a hole at {first} cannot be {entry.first} to {entry.last}")
            self._holes.append(first)
            self._next = entry.last + 1
        else:
            self._written += len(entry)
            self._next = first + 1
        self._entries.append(entry)
        self._sequences.append(first)
        self._ends.append(self._written)
        self._times.append(now)

    def _evict(self, now: float) -> None:
        head, length, limits = self._head, len(self._entries), self._limits
        while head < length and (
            length - head > limits.batches
            or self._written - self._evicted > limits.bytes
            or now - self._times[head] > limits.age
        ):
            if isinstance(self._entries[head], DroppedRange):
                self._holes.pop(0)
            self._evicted = self._ends[head]
            self._entries[head] = b""
            head += 1
        self._head = head
        if head >= _COMPACT_AT and 2 * head >= length:
            for column in (self._entries, self._sequences, self._ends, self._times):
                del column[:head]
            self._head = 0


def compacted(log_id: str, requested: int, oldest: int, upcoming: int) -> EventsCompacted:
    """The error of a reader whose next batch is not kept any more."""
    return EventsCompacted(
        f"sequence {requested} is not kept any more, the oldest is {oldest}: rebuild, then read from the oldest",
        metadata={
            "log": log_id,
            "requestedSequence": requested,
            "oldestSequence": oldest,
            "nextSequence": upcoming,
        },
    )
