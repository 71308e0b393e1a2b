"""One event stream as others see it: where it stands, what it keeps, who is told that there is more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.events.log.batch_queue import BatchQueue
from kvgrpc.events.log.digest import StateDigest
from kvgrpc.events.log.journal import Journal
from kvgrpc.events.log.recorder import Recorder
from kvgrpc.model import RankRef


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a stream, as in the EventStream of the proto. ``listened_at``: None where nobody can tell."""

    publisher: RankRef
    log_id: str
    oldest_sequence: int
    next_sequence: int
    dropped_batches: int
    journal_bytes: int
    pub_endpoint: str
    topic: bytes
    replay_endpoint: str
    state: StateDigest | None
    connects_to: str = ""
    listened_at: bool | None = None


class EventStream:
    """The stream that one publisher writes. Thread-safe; nothing here blocks.

    ``journal`` is what can be replayed, ``recorder`` what snapshots are cut from, None where none are kept.
    ``connects_to``: where live events are sent to, if nothing is bound for them; ``listened_at()``: whether anybody
    takes them there.
    """

    def __init__(
        self,
        publisher: RankRef,
        queue: BatchQueue,
        journal: Journal,
        recorder: Recorder | None = None,
        *,
        pub_endpoint: str = "",
        topic: bytes = b"",
        replay_endpoint: str = "",
        connects_to: str = "",
        listened_at: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self.publisher = publisher
        self.journal = journal
        self.recorder = recorder
        self.pub_endpoint = pub_endpoint
        self.topic = topic
        self.replay_endpoint = replay_endpoint
        self.connects_to = connects_to
        self._listened_at = listened_at
        self._queue = queue
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._end_listeners: tuple[Callable[[], None], ...] = ()
        self._listeners_lock = threading.Lock()
        self._ended = False

    @property
    def engine(self) -> str:
        return self.publisher.rank.engine

    @property
    def dp(self) -> int:
        return self.publisher.rank.dp

    @property
    def log_id(self) -> str:
        """Names the numbering: 32 hexadecimal digits."""
        return self.journal.log_id

    @property
    def next_sequence(self) -> int:
        """Sequence that the next batch gets; those before it may still be on their way into the journal."""
        return self._queue.next_sequence

    @property
    def ended(self) -> bool:
        """Nothing follows any more: the publisher was shut down, or replaced."""
        return self._ended

    def digest(self, next_sequence: int) -> StateDigest | None:
        """Returns what is cached, as a reader who has all before ``next_sequence`` can compare it; None where nothing
        is recorded."""
        return None if self.recorder is None else self.recorder.digest(next_sequence)

    def state(self) -> StreamState:
        """The state of this moment."""
        # The oldest first: read later it could pass the next.
        oldest, upcoming = self.journal.oldest_sequence, self.next_sequence
        return StreamState(
            self.publisher,
            self.log_id,
            oldest,
            upcoming,
            self._queue.dropped,
            self.journal.kept_bytes,
            self.pub_endpoint,
            self.topic,
            self.replay_endpoint,
            self.digest(upcoming),
            self.connects_to,
            self._listened_at(),
        )

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls it on the publisher's thread after each change, until what is returned is called. It must not block."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        return lambda: self._forget(listener)

    def listen_for_end(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Adds a listener that is called once nothing follows any more."""
        with self._listeners_lock:
            self._end_listeners = (*self._end_listeners, listener)
        return lambda: self._forget(listener)

    def announce(self) -> None:
        """Tells the listeners that there is more. For the publisher's thread."""
        for listener in self._listeners:
            listener()

    def end(self) -> None:
        """Nothing follows. For the publisher's thread."""
        self._ended = True
        for listener in (*self._listeners, *self._end_listeners):
            listener()

    def _forget(self, listener: Callable[[], None]) -> None:
        with self._listeners_lock:
            # Bound methods are equal, and not the same.
            self._listeners = tuple(other for other in self._listeners if other != listener)
            self._end_listeners = tuple(other for other in self._end_listeners if other != listener)
