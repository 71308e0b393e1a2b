"""The engines' own replay: a ZMQ ROUTER that answers a sequence with everything from there on, and an end mark.

Request: [delimiter,] sequence (8 bytes, big-endian). Reply, for each batch: delimiter, [topic,] sequence, payload;
then the same with the sequence 2^64 - 1 and nothing as payload.

It runs on a thread of its own and reads the journal, so that live events never wait for it. A client that does not read
is waited for, and its batches are not dropped on the way.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import zmq

from kvgrpc.errors import EventsCompacted
from kvgrpc.events.config import ReplayShape
from kvgrpc.events.endpoints import Endpoint
from kvgrpc.events.live.sockets import bound_address, open_socket
from kvgrpc.events.log.journal import DroppedRange
from kvgrpc.events.log.stream import EventStream
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited

END = b"\xff" * 8
MAX_REPLAYS = 64
# Messages that may be on their way to one client.
CLIENT_MESSAGES = 1_000
CHUNK_BYTES = 256 * 1024
IDLE_MS = 100
BLOCKED_MS = 2
# A client that takes nothing for so long gets no more.
STUCK_SECONDS = 30.0
FAILED_PASS_SECONDS = 0.1

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replay:
    """The rest of one client's replay: from ``next`` to ``last``; ``ready`` was read already."""

    next: int
    last: int
    ready: list[tuple[int, bytes]]
    moved_at: float


class ReplayRouter:
    """Opened on one thread; its own serves the socket, from ``serve`` to ``close``."""

    def __init__(self, endpoint: Endpoint, topic: bytes, shape: ReplayShape) -> None:
        self._prefix: tuple[bytes, ...] = (b"", topic) if shape is ReplayShape.TOPIC else (b"",)
        self._end: tuple[bytes, ...] = (b"", b"", END, b"") if shape is ReplayShape.TOPIC else (b"", END, b"")
        self._socket = open_socket(zmq.ROUTER, endpoint, CLIENT_MESSAGES)
        # What cannot be sent is an error and not dropped: the client is full, or gone.
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = bound_address(self._socket)
        self._replays: dict[bytes, _Replay] = {}
        self._stopping = threading.Event()
        self._healthy = True
        self._lines = RateLimited(_log)
        self._thread: threading.Thread | None = None

    @property
    def healthy(self) -> bool:
        """Its thread runs and its last pass went well; also after it was stopped."""
        alive = self._thread is not None and self._thread.is_alive()
        return self._stopping.is_set() or (alive and self._healthy)

    def serve(self, stream: EventStream) -> None:
        """Answers with what the journal of ``stream`` keeps, from now on."""
        self._stream = stream
        self._thread = threading.Thread(target=self._serve, name=f"kvgrpc-replay-dp{stream.dp}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answers nobody any more. Does not wait."""
        self._stopping.set()

    def close(self, deadline: float) -> None:
        """Stops and waits for its thread, ``deadline`` seconds at most; harmless when repeated."""
        self.stop()
        if self._thread is not None:
            self._thread.join(deadline)

    def _serve(self) -> None:
        with self._socket:
            while not self._stopping.is_set():
                try:
                    self._pass()
                    self._healthy = True
                except Exception:
                    metrics.TASK_FAILURES.labels("kvgrpc-replay").inc()
                    self._lines.exception("a replay that failed", "events: the replay failed and goes on")
                    self._healthy = False
                    self._replays.clear()
                    time.sleep(FAILED_PASS_SECONDS)

    def _pass(self) -> None:
        moved = [self._advance(client, replay) for client, replay in list(self._replays.items())]
        timeout = IDLE_MS if not moved else 0 if any(moved) else BLOCKED_MS
        if self._socket.poll(timeout):
            self._begin(self._socket.recv_multipart(zmq.NOBLOCK))

    def _begin(self, frames: list[bytes]) -> None:
        client, *request = frames
        # A DEALER may leave the delimiter out, which REQ sends by itself.
        first = request[-1] if len(request) == 1 or (len(request) == 2 and not request[0]) else b""
        if len(first) != 8:
            return self._refuse(client, f"a request is 8 bytes of sequence, not {len(request)} frames, {first[:20]!r}")
        sequence, stream = int.from_bytes(first, "big"), self._stream
        oldest, upcoming = stream.journal.oldest_sequence, stream.journal.next_sequence
        if sequence < oldest:
            return self._refuse(
                client, f"from {sequence}: the oldest that is kept is {oldest}; EventService.Watch heals"
            )
        if len(self._replays) >= MAX_REPLAYS and client not in self._replays:
            return self._refuse(client, f"{MAX_REPLAYS} are replayed to already")
        self._replays[client] = _Replay(sequence, upcoming - 1, [], time.monotonic())

    def _refuse(self, client: bytes, why: str) -> None:
        self._replays.pop(client, None)
        self._lines.warning("refusals", f"events: nothing is replayed to a client of {self.endpoint}: {why}")
        self._send(client, self._end)

    def _advance(self, client: bytes, replay: _Replay) -> bool:
        """Sends what the client takes now; False: it takes nothing."""
        try:
            self._read_more(replay)
        except EventsCompacted as error:
            self._refuse(client, f"the log overtook it: {error}")
            return True
        sent = 0
        for sequence, payload in replay.ready:
            if not self._send(client, (*self._prefix, sequence.to_bytes(8, "big"), payload)):
                break
            sent += 1
        del replay.ready[:sent]
        if client not in self._replays:
            return True
        if not replay.ready and replay.next > replay.last:
            if not self._send(client, self._end):
                return self._wait_for(client, replay)
            self._replays.pop(client, None)
            return True
        if not sent and replay.ready:
            return self._wait_for(client, replay)
        replay.moved_at = time.monotonic()
        return True

    def _wait_for(self, client: bytes, replay: _Replay) -> bool:
        if time.monotonic() - replay.moved_at > STUCK_SECONDS and self._replays.pop(client, None) is not None:
            text = f"events: a client of {self.endpoint} took nothing for {STUCK_SECONDS:g} s, and is left"
            self._lines.warning("clients that take nothing", text)
        return False

    def _read_more(self, replay: _Replay) -> None:
        while not replay.ready and replay.next <= replay.last:
            part = self._stream.journal.read(replay.next, replay.last, CHUNK_BYTES)
            if part is None:
                replay.next = replay.last + 1
                return
            if not isinstance(part, DroppedRange):
                replay.ready = list(enumerate(part.payloads, part.first))
            replay.next = part.last + 1

    def _send(self, client: bytes, frames: tuple[bytes, ...]) -> bool:
        """True if it is on its way. A client that is gone is forgotten."""
        try:
            self._socket.send_multipart((client, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._replays.pop(client, None)
            return False
        return True
