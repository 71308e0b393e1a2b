"""Reads what an engine's own publisher sends, and publishes the same bytes again where they have a journal.

For engines that are left as they are: their PUB, and their ROUTER for what PUB lost. What neither brings is told as
AllBlocksCleared, so that followers under-state the cache rather than lie; so is a publisher that begins again.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Iterator

import zmq

from kvgrpc.events.base import EventPublisher
from kvgrpc.events.model import AllBlocksCleared, KVEventBatch
from kvgrpc.observability import metrics

END = b"\xff" * 8
POLL_MS = 200
ASK_SECONDS = 1.0
ANSWER_MS = 5_000
AGAIN_SECONDS = 1.0
STUCK_SECONDS = 3 * ANSWER_MS / 1000
# Batches of a replay that PUB may bring once more.
MOST_AHEAD = 100_000
MOST_QUEUED = 100_000

_log = logging.getLogger(__name__)


class Relay:
    """One engine's events into ``publisher``, which stays its owner's. Its thread runs from ``open`` to ``close``.

    ``endpoint``: of the engine's PUB, "tcp://10.0.0.1:5557"; ``replay``: of its ROUTER, "" where it has none, and then
    what PUB loses is lost; ``topic``: only messages whose topic begins so.
    """

    def __init__(self, endpoint: str, publisher: EventPublisher, *, replay: str = "", topic: str = "") -> None:
        self._endpoint, self._replay, self._topic = endpoint, replay, topic.encode()
        self._publisher = publisher
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._next: int | None = None
        self._ahead: dict[int, int] = {}
        self._asked_at = self._moved_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvgrpc-events-relay", daemon=True)

    @property
    def healthy(self) -> bool:
        """False when its thread ended or hangs, or its publisher is not healthy."""
        moves = time.monotonic() - self._moved_at < STUCK_SECONDS
        return self._thread.is_alive() and moves and self._publisher.healthy

    def open(self) -> Relay:
        self._thread.start()
        return self

    def close(self, timeout: float = 1.0) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._context.socket(zmq.SUB) as subscriber:
                    subscriber.set(zmq.LINGER, 0)
                    subscriber.set(zmq.RCVHWM, MOST_QUEUED)
                    subscriber.set(zmq.SUBSCRIBE, self._topic)
                    subscriber.connect(self._endpoint)
                    self._follow(subscriber)
            except Exception:
                _log.exception("events: the relay of %s failed and begins again", self._endpoint)
                metrics.TASK_FAILURES.labels("kvgrpc-relay").inc()
                self._stopping.wait(AGAIN_SECONDS)

    def _follow(self, subscriber: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            self._moved_at = time.monotonic()
            if subscriber.poll(POLL_MS):
                message = _read(subscriber.recv_multipart())
                if message is not None:
                    self._on_live(*message)
            elif self._replay and time.monotonic() - self._asked_at > ASK_SECONDS:
                self._fill()  # PUB may have lost the last ones, and says nothing of it

    def _on_live(self, sequence: int, payload: bytes) -> None:
        if self._ahead.pop(sequence, None) == zlib.crc32(payload):
            return  # the replay was quicker
        if self._next is not None and sequence < self._next:
            self._lost(f"it begins again at {sequence}")
            self._next = 0
            self._ahead.clear()
        if self._next is None or sequence > self._next:
            self._fill()
        if self._next is not None and sequence < self._next:
            self._ahead.pop(sequence, None)
            return
        self._publish(sequence, payload)

    def _fill(self) -> None:
        """All that the ROUTER has from the next batch on."""
        self._next = self._next or 0
        if self._replay:
            for sequence, payload in self._replayed(self._next):
                if sequence >= self._next:
                    self._publish(sequence, payload)
                    self._ahead[sequence] = zlib.crc32(payload)
            while len(self._ahead) > MOST_AHEAD:
                del self._ahead[next(iter(self._ahead))]
        self._asked_at = time.monotonic()

    def _publish(self, sequence: int, payload: bytes) -> None:
        if sequence > (self._next or 0):
            self._lost(f"batches {self._next or 0} to {sequence - 1} are missing")
        self._publisher.publish_raw(payload)
        self._next = sequence + 1

    def _lost(self, why: str) -> None:
        _log.warning("events: relay of %s: %s; the cache counts as empty", self._endpoint, why)
        rank = self._publisher.data_parallel_rank
        self._publisher.publish(KVEventBatch(time.time(), [AllBlocksCleared()], rank))

    def _replayed(self, first: int) -> Iterator[tuple[int, bytes]]:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, 0)
            dealer.connect(self._replay)
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            while not self._stopping.is_set() and dealer.poll(ANSWER_MS):
                self._moved_at = time.monotonic()
                frames = dealer.recv_multipart()
                if END in frames[1:]:
                    return
                message = _read(frames)
                if message is not None:
                    yield message
        if not self._stopping.is_set():
            _log.warning("events: the replay at %s did not answer to its end", self._replay)


def _read(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Sequence and payload, which come last whatever stands before them; None for what is no batch."""
    if len(frames) < 3 or len(frames[-2]) != 8:
        _log.debug("events: a message of %d frames is no batch", len(frames))
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
