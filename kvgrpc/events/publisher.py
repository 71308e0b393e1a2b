"""The publisher that keeps a journal, and the thread that encodes, sends live and records.

``publish`` on the engine's thread only appends. The thread encodes each batch once; the same bytes go live, into the
journal and to every Watch. One bad batch becomes a told hole, nothing ends the thread but ``shutdown``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvgrpc.events.base import SHUTDOWN_SECONDS, EventPublisher
from kvgrpc.events.codec import BatchEncoder
from kvgrpc.events.config import EventsConfig
from kvgrpc.events.log.batch_queue import BatchQueue, QueuedClear
from kvgrpc.events.log.journal import MAX_BATCH_BYTES, DroppedRange, Journal
from kvgrpc.events.log.recorder import Recorder
from kvgrpc.events.log.stream import EventStream
from kvgrpc.model import RankRef
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited, one_line

IDLE_SECONDS = 1.0
FAILED_PASS_SECONDS = 0.1
# A pass takes at most IDLE_SECONDS when nothing is wrong.
STUCK_SECONDS = 5.0
GROUP_BATCHES = 64
GROUP_BYTES = 256 * 1024

_log = logging.getLogger(__name__)


class LiveTransport(Protocol):
    """Takes batches as they are published. Used by the publisher's thread only."""

    @property
    def endpoint(self) -> str:
        """The endpoint that subscribers find it at; empty: none."""

    def send(self, sequence: int, payload: bytes, batch: object) -> None:
        """Sends one batch without blocking; may raise, which is counted. ``batch`` is what was published."""

    def close(self, deadline: float) -> None:
        """Ends within ``deadline`` seconds, with what was sent delivered as far as that goes."""


@dataclass(frozen=True, slots=True)
class PublisherCounts:
    """Counts of the batches of one publisher: kept, sent, dropped.

    ``dropped`` took a number and are told as holes, ``refused`` came after shutdown, ``failed_sends`` are in the
    journal although the live transport refused them, ``unsent`` wait.
    """

    accepted: int
    published: int
    dropped: int
    refused: int
    failed_sends: int
    unsent: int


class JournalingPublisher(EventPublisher):
    """Publishes into a journal and, where one is given, over a live transport. Thread-safe.

    Its thread runs from construction to ``shutdown``, which also runs at a normal exit of the process. In a forked
    child it is closed: the thread lives in the parent.
    """

    def __init__(
        self,
        rank: RankRef,
        config: EventsConfig,
        live: LiveTransport | None = None,
        *,
        replay_endpoint: str = "",
        connects_to: str = "",
        listened_at: Callable[[], bool | None] = lambda: None,
    ) -> None:
        """The endpoints are said to readers; see ``EventStream``."""
        super().__init__(rank.rank.dp)
        self._live = live
        self._queue = BatchQueue(config.max_queue_size, clear_first=config.clear_first)
        self._journal = Journal(config.journal_limits)
        self._max_batch_bytes = min(MAX_BATCH_BYTES, config.journal_bytes)
        self._encoder = BatchEncoder(config.dialect, config.encoding, rank.rank.dp)
        self._recorder = Recorder(config.dialect, rank.rank.dp) if config.snapshots else None
        self._stream = EventStream(
            rank,
            self._queue,
            self._journal,
            self._recorder,
            pub_endpoint=live.endpoint if live else "",
            topic=config.topic.encode(),
            replay_endpoint=replay_endpoint,
            connects_to=connects_to,
            listened_at=listened_at,
        )
        self._published = self._failed_sends = 0
        self._lines = RateLimited(_log)
        self._measured_bytes = 0
        self._healthy = True
        self._fenced = False
        self._moved_at = time.monotonic()
        self._give_up_at = float("inf")
        self._thread = threading.Thread(target=self._serve, name=f"kvgrpc-events-dp{rank.rank.dp}", daemon=True)
        self._thread.start()
        _queues.add(self._queue)
        atexit.register(self.shutdown)

    @property
    def stream(self) -> EventStream:
        return self._stream

    @property
    def healthy(self) -> bool:
        """False when it was fenced, its thread has ended without a shutdown, the last pass failed, or it hangs in a
        live transport."""
        if self._fenced:
            return False
        if self._queue.closed:
            return True
        return self._healthy and self._thread.is_alive() and time.monotonic() - self._moved_at < STUCK_SECONDS

    @property
    def counts(self) -> PublisherCounts:
        return PublisherCounts(
            self._queue.accepted,
            self._published,
            self._queue.dropped,
            self._queue.refused,
            self._failed_sends,
            self._queue.unsent,
        )

    def publish(self, batch: object) -> bool:
        return self._queue.put(batch)

    def publish_raw(self, payload: bytes | bytearray | memoryview) -> bool:
        # A view would show what its owner writes later. What is no bytes at all is told as a hole.
        if isinstance(payload, bytearray | memoryview):
            with contextlib.suppress(ValueError):  # of a view that was released nothing is left
                payload = bytes(payload)
        return self._queue.put(payload)

    def fence(self) -> None:
        self._fenced = True
        self._give_up_at = 0.0
        self._queue.discard()

    def shutdown(self, deadline: float = SHUTDOWN_SECONDS) -> None:
        if self._fenced:
            deadline = 0.0
        self._give_up_at = time.monotonic() + deadline
        self._queue.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline)
        atexit.unregister(self.shutdown)
        if self._queue.unsent:
            _log.warning("events: %d batches were not sent within %g s", self._queue.unsent, deadline)

    def _serve(self) -> None:
        while time.monotonic() <= self._give_up_at:
            try:
                if not self._pass():
                    break
                self._healthy = True
            except Exception:
                self._healthy = False
                metrics.TASK_FAILURES.labels("kvgrpc-publisher").inc()
                self._lines.exception("a publisher that failed", "events: the publisher failed and goes on")
                time.sleep(FAILED_PASS_SECONDS)
                # What it had taken is lost; the next pass, which this makes begin at once, says so.
                self._queue.drop(0)
        self._close()

    def _pass(self) -> bool:
        """One round over what waits; False: nothing waits and nothing comes."""
        taken = self._queue.take(IDLE_SECONDS)
        self._moved_at = time.monotonic()
        self._fill_hole(taken.first)
        while taken.items:
            if time.monotonic() > self._give_up_at:
                return False
            self._publish_group(taken.items)
        self._journal.evict_old()
        self._measure()
        self._look()
        if self._recorder is not None:
            while self._queue.idle and self._recorder.fold():
                pass
        return not self._queue.closed or self._queue.unsent > 0

    def _fill_hole(self, first: int) -> None:
        """Says that the numbers of a pass that failed half-way are missing in the journal."""
        recorded = self._journal.next_sequence
        if recorded < first:
            self._record([self._hole(recorded, first - 1, "encode", "a failed pass")])

    def _record(self, entries: list[bytes | DroppedRange]) -> None:
        self._journal.extend(entries)
        if self._recorder is not None:
            self._recorder.add(entries)

    def _publish_group(self, items: deque[object]) -> None:
        """Publishes some of them, and records them together."""
        entries: list[bytes | DroppedRange] = []
        sequence, size = self._journal.next_sequence, 0
        while items and len(entries) < GROUP_BATCHES and size < GROUP_BYTES:
            entry = self._publish_one(sequence, items.popleft())
            entries.append(entry)
            if isinstance(entry, DroppedRange):
                sequence = entry.last + 1
            else:
                sequence, size = sequence + 1, size + len(entry)
        self._record(entries)
        self._queue.settle(len(entries))
        self._stream.announce()
        if self._recorder is not None:
            self._recorder.catch_up()
        self._moved_at = time.monotonic()
        metrics.EVENT_BYTES.inc(size)
        metrics.EVENT_BATCHES.inc(sum(not isinstance(entry, DroppedRange) for entry in entries))

    def _publish_one(self, sequence: int, item: object) -> bytes | DroppedRange:
        if isinstance(item, DroppedRange):
            metrics.EVENTS_DROPPED.labels(item.cause).inc(item.last - item.first + 1)
            return item
        try:
            payload = self._encoder.clear() if item is QueuedClear.CLEAR else self._encoder.encode(item)
        except msgspec.DecodeError as error:
            return self._hole(sequence, sequence, "not_a_batch", str(error))
        except Exception as error:
            return self._hole(sequence, sequence, "encode", str(error))
        if len(payload) > self._max_batch_bytes:
            return self._hole(sequence, sequence, "too_large", f"{len(payload)} bytes")
        self._send(sequence, payload, item)
        self._published += 1
        return payload

    def _hole(self, first: int, last: int, cause: str, why: str) -> DroppedRange:
        batches = last - first + 1
        self._lines.warning(
            f"drops ({cause})", lambda: f"events: {batches} batches from {first} are dropped ({cause}): {one_line(why)}"
        )
        self._queue.drop(batches)
        metrics.EVENTS_DROPPED.labels(cause).inc(batches)
        return DroppedRange(first, last, cause)

    def _send(self, sequence: int, payload: bytes, batch: object) -> None:
        if self._live is None:
            return
        try:
            self._live.send(sequence, payload, batch)
        except Exception as error:
            self._failed_sends += 1
            self._lines.warning("live sends", f"events: a live send failed; replay has it: {error}")

    def _look(self) -> None:
        """For a live transport that has something to look at between batches; on the publisher's thread."""

    def _measure(self) -> None:
        kept = self._journal.kept_bytes
        metrics.JOURNAL_BYTES.inc(kept - self._measured_bytes)
        self._measured_bytes = kept

    def _close(self) -> None:
        self._stream.end()
        metrics.JOURNAL_BYTES.dec(self._measured_bytes)
        if self._live is None:
            return
        try:
            self._live.close(max(0.0, self._give_up_at - time.monotonic()))
        except Exception:
            _log.exception("events: the live transport could not be closed")


def _close_in_child() -> None:
    for queue in _queues:
        queue.abandon()


_queues: weakref.WeakSet[BatchQueue] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
