"""One event stream as others see it: where it stands, how it is read, who is told that there is more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.errors import EventsSequenceInFuture, StaleLog
from kvgrpc.events.journal import Batches, Dropped, Journal, compacted
from kvgrpc.events.outbox import Outbox
from kvgrpc.model import RankRef


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where a stream stands, as in the EventStream of the proto."""

    publisher: RankRef
    log: str
    oldest_sequence: int
    next_sequence: int
    dropped_batches: int
    journal_bytes: int
    pub_endpoint: str
    topic: bytes


class EventStream:
    """The stream that one publisher writes. Thread-safe; nothing here blocks."""

    def __init__(
        self, publisher: RankRef, outbox: Outbox, journal: Journal, pub_endpoint: str = "", topic: bytes = b""
    ) -> None:
        self.publisher = publisher
        self.pub_endpoint = pub_endpoint
        self.topic = topic
        self._outbox = outbox
        self._journal = journal
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._listeners_lock = threading.Lock()
        self._failed_batches = 0
        self._ended = False

    @property
    def engine(self) -> str:
        return self.publisher.rank.engine

    @property
    def dp(self) -> int:
        return self.publisher.rank.dp

    @property
    def log(self) -> str:
        """Id of the numbering: 32 hexadecimal digits."""
        return self._journal.log

    @property
    def next_sequence(self) -> int:
        """Sequence that the next batch gets; those before it may still be on their way into the journal."""
        return self._outbox.next_sequence

    @property
    def ended(self) -> bool:
        """Nothing follows any more: the publisher was shut down."""
        return self._ended

    def state(self) -> StreamState:
        # The oldest first: read later it could pass the next.
        oldest = self._journal.oldest_sequence
        return StreamState(
            self.publisher,
            self.log,
            oldest,
            self.next_sequence,
            self._outbox.dropped + self._failed_batches,
            self._journal.kept_bytes,
            self.pub_endpoint,
            self.topic,
        )

    def check_log(self, log: str) -> None:
        """Raises StaleLog unless it is the current one."""
        if log != self.log:
            raise StaleLog(
                f"log {log!r} is not the current one, {self.log}: rebuild from the current log",
                metadata={"requestLog": log, "currentLog": self.log},
            )

    def check_cursor(self, first: int) -> None:
        """Raises EventsCompacted or EventsSequenceInFuture unless a reader may begin at ``first``."""
        if first > self.next_sequence:
            raise self._future(first)
        self._check_kept(first)

    def check_end(self, last: int) -> None:
        """Raises EventsCompacted or EventsSequenceInFuture unless a reader may end with ``last``."""
        if last >= self.next_sequence:
            raise self._future(last)
        self._check_kept(last)

    def read(self, first: int, last: int | None = None) -> Batches | Dropped | None:
        """One chunk from a cursor, as ``Journal.read``."""
        return self._journal.read(first, last)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls it on the publisher's thread after each change, until what is returned is called. It must not block."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        return lambda: self._forget(listener)

    def count_failed(self, batches: int) -> None:
        """The publisher could not publish so many. For the publisher's thread."""
        self._failed_batches += batches

    def announce(self) -> None:
        """Tells the listeners that there is more. For the publisher's thread."""
        for listener in self._listeners:
            listener()

    def end(self) -> None:
        """Nothing follows. For the publisher's thread."""
        self._ended = True
        self.announce()

    def _check_kept(self, sequence: int) -> None:
        oldest = self._journal.oldest_sequence
        if sequence < oldest:
            raise compacted(self.log, sequence, oldest, self.next_sequence)

    def _future(self, sequence: int) -> EventsSequenceInFuture:
        return EventsSequenceInFuture(
            f"sequence {sequence} was not published yet, the next is {self.next_sequence}: is the cursor of this log?",
            metadata={"log": self.log, "requestedSequence": sequence, "nextSequence": self.next_sequence},
        )

    def _forget(self, listener: Callable[[], None]) -> None:
        with self._listeners_lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
