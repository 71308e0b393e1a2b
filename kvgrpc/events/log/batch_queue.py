"""Batches between the engine's thread and the publisher's: here each takes its sequence number.

Pure but for the lock and the wake-up. A full queue never blocks: the batch becomes part of a hole, and the next number
after a hole goes to AllBlocksCleared, so that followers under-state the cache rather than lie.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
from collections import deque
from dataclasses import dataclass

from kvgrpc.events.log.journal import DroppedRange

# A batch is put within microseconds.
_MOMENT_SECONDS = 0.1


class QueuedClear(enum.Enum):
    """Stands for an AllBlocksCleared that the publisher owes its followers."""

    CLEAR = enum.auto()


@dataclass(frozen=True, slots=True)
class Taken:
    """Work for the publisher: items in sequence from ``first``. A DroppedRange spans its numbers, others have one."""

    first: int
    items: deque[object]


class BatchQueue:
    """A bounded queue for many writers and one reader that numbers what is put into it. Thread-safe."""

    def __init__(self, limit: int, *, clear_first: bool = False) -> None:
        """``clear_first``: number 0 goes to AllBlocksCleared, also when nothing follows."""
        self._limit = limit
        self._lock = threading.Lock()
        self._items: deque[object] = deque()
        self._next = 0
        self._items_first = 0
        self._taken = 0
        self._clear_owed = clear_first
        self._closed = False
        self._asleep = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._accepted = 0
        self._dropped = 0
        self._refused = 0

    @property
    def next_sequence(self) -> int:
        """Sequence that the next batch gets."""
        return self._next

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def unsent(self) -> int:
        """Items that were put and not yet settled, with an AllBlocksCleared that is owed."""
        return len(self._items) + self._taken + self._clear_owed

    @property
    def accepted(self) -> int:
        """Batches that were put."""
        return self._accepted

    @property
    def idle(self) -> bool:
        """Nothing waits to be taken."""
        return not self._items

    @property
    def dropped(self) -> int:
        """Batches that found it full, or that the reader could not publish."""
        return self._dropped

    @property
    def refused(self) -> int:
        """Batches that found it closed; they took no number."""
        return self._refused

    def put(self, batch: object) -> bool:
        """Numbers a batch, appends it and wakes the reader; never blocks. False: it is full, or closed."""
        with self._lock:
            if self._closed:
                self._refused += 1
                return False
            if len(self._items) + self._taken >= self._limit:
                self._put_hole()
                return False
            if self._clear_owed:
                self._put_clear()
            self._items.append(batch)
            self._next += 1
            self._accepted += 1
            wake, self._asleep = self._asleep, False
        if wake:
            self._wake.put(None)
        return True

    def drop(self, batches: int) -> None:
        """The reader could not publish so many: the next number goes to AllBlocksCleared."""
        with self._lock:
            self._dropped += batches
            self._clear_owed = True

    def take(self, timeout: float) -> Taken:
        """Everything that waits; waits for it up to ``timeout`` seconds. What was taken before is settled by this."""
        with self._lock:
            self._taken = 0
            self._asleep = not (self._items or self._clear_owed or self._closed)
            asleep = self._asleep
        if asleep:
            # A token that comes late is taken by a later call, which then finds nothing.
            self._wait(timeout)
        with self._lock:
            self._asleep = False
            if self._clear_owed:
                self._put_clear()
            taken = Taken(self._items_first, self._items)
            self._items, self._items_first = deque(), self._next
            self._taken = len(taken.items)
            return taken

    def settle(self, items: int) -> None:
        """The reader has done with so many of what it took."""
        with self._lock:
            self._taken -= items

    def close(self) -> None:
        """Refuses every batch from now on and wakes the reader, which finds what was put before. Waits a moment only:
        the lock may be that of a thread that a signal interrupted, and whose handler closes the publisher."""
        held = self._lock.acquire(timeout=_MOMENT_SECONDS)
        self._closed = True
        if held:
            self._lock.release()
        self._wake.put(None)

    def discard(self) -> None:
        """Closes it and forgets what waits."""
        with self._lock:
            self._closed = True
            self._items.clear()
            self._clear_owed = False
        self._wake.put(None)

    def abandon(self) -> None:
        """Closes it in a forked child, where the reader does not live and the lock may be held by nobody."""
        self._lock = threading.Lock()
        self._closed = True

    def _wait(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=timeout)

    def _put_clear(self) -> None:
        self._items.append(QueuedClear.CLEAR)
        self._next += 1
        self._clear_owed = False

    def _put_hole(self) -> None:
        first = self._next
        if self._items and isinstance(self._items[-1], DroppedRange):
            first = self._items.pop().first  # type: ignore[attr-defined]  # it is a DroppedRange
        self._items.append(DroppedRange(first, self._next, "queue_full"))
        self._next += 1
        self._dropped += 1
        self._clear_owed = True
