"""Reads what an engine's own publisher sends, and publishes the same bytes again where they have a journal.

For engines that are left as they are: their PUB, and their ROUTER for what PUB lost. What neither brings is told as
AllBlocksCleared, so that followers under-state the cache rather than lie; so is a publisher that begins again. Nothing
names its log: whether it is the same is seen by the connection, and by the last batch, which the ROUTER must have.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Generator, Iterator
from socket import AF_INET, getaddrinfo

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvgrpc.events.base import EventPublisher
from kvgrpc.events.endpoints import Endpoint, check_reached
from kvgrpc.events.model import LARGEST_MESSAGE, AllBlocksCleared, KVEventBatch
from kvgrpc.net import split_with_port
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited

END = b"\xff" * 8
POLL_MS = 200
ASK_SECONDS = 1.0
ANSWER_MS = 5_000
AGAIN_SECONDS = 1.0
STUCK_SECONDS = 3 * ANSWER_MS / 1000
# So long an engine whose connection broke may be away before its cache counts as empty, and so long a connection may be
# silent before it counts as broken.
GONE_SECONDS = 30.0
PING_MS = 10_000
CONNECT_SECONDS = 10.0
_OVER = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OVER |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# Batches of a replay that PUB may bring once more.
MOST_AHEAD = 100_000
MOST_QUEUED = 100_000

_log = logging.getLogger(__name__)


class Relay:
    """One engine's events into ``publisher``, which stays its owner's. Its thread runs from ``open`` to ``close``.

    ``endpoint``: of the engine's PUB, "tcp://10.0.0.1:5557", or "inproc://name" in ``zmq.Context.instance()``, whose
    end only a ROUTER tells; ``replay``: of its ROUTER, "" where it has none, and then what PUB loses is lost;
    ``topic``: only messages whose topic begins so.
    """

    def __init__(self, endpoint: str, publisher: EventPublisher, *, replay: str = "", topic: str = "") -> None:
        self._endpoint, self._replay, self._topic = endpoint, replay, topic.encode()
        self._publisher = publisher
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        # Sequence and CRC of the batch that was taken last.
        self._last: tuple[int, int] | None = None
        self._unsure_since: float | None = None
        # What waits in the subscriber may be of a log that is over.
        self._connect_anew = False
        self._ahead: dict[int, int] = {}
        # What ZMQ did not take when it was last tried.
        self._refused: set[str] = set()
        self.asked = threading.Event()
        """Set once the ROUTER has said all that it had."""
        self._asked_at = float("-inf")
        self._moved_at = time.monotonic()
        self._lines = RateLimited(_log, seconds=60.0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvgrpc-events-relay", daemon=True)

    @property
    def healthy(self) -> bool:
        """False when its thread ended or hangs, ZMQ refuses an endpoint, or its publisher is not healthy."""
        moves = time.monotonic() - self._moved_at < STUCK_SECONDS
        return self._thread.is_alive() and moves and not self._refused and self._publisher.healthy

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
                self._ask()
                with self._context.socket(zmq.SUB) as subscriber:
                    subscriber.set(zmq.LINGER, 0)
                    subscriber.set(zmq.RCVHWM, MOST_QUEUED)
                    subscriber.set(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
                    subscriber.set(zmq.SUBSCRIBE, self._topic)
                    subscriber.set(zmq.HEARTBEAT_IVL, PING_MS)
                    subscriber.set(zmq.HEARTBEAT_TIMEOUT, int(GONE_SECONDS * 1000))
                    # A socket has one connection, so that nothing in it is of another log than the rest.
                    subscriber.set(zmq.RECONNECT_IVL, -1)
                    subscriber.set(zmq.CONNECT_TIMEOUT, int(CONNECT_SECONDS * 1000))
                    monitor = subscriber.get_monitor_socket(_OVER | zmq.EVENT_CONNECTED)
                    try:
                        self._reach(subscriber, self._endpoint)
                        self._relay_connection(subscriber, monitor)
                    finally:
                        subscriber.disable_monitor()
            except _Refused:
                self._moved_at = time.monotonic()
                self._stopping.wait(AGAIN_SECONDS)
            except Exception:
                self._lines.exception("a relay that failed", f"events: the relay of {self._endpoint} failed")
                metrics.TASK_FAILURES.labels("kvgrpc-relay").inc()
                self._stopping.wait(AGAIN_SECONDS)

    def _relay_connection(self, subscriber: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Until the connection is over, or none came about: of a name that does not resolve nothing is heard."""
        poller = zmq.Poller()
        poller.register(subscriber, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        self._connect_anew = False
        connected = self._endpoint.startswith("inproc:")  # of which libzmq reports neither a beginning nor an end
        until = time.monotonic() + CONNECT_SECONDS
        while not self._stopping.is_set() and not self._connect_anew and (connected or time.monotonic() < until):
            self._moved_at = time.monotonic()
            ready = dict(poller.poll(POLL_MS))
            if monitor in ready:
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_CONNECTED:
                    connected = True
                    continue
                if event == zmq.EVENT_DISCONNECTED:
                    self._disconnected()
                self._stopping.wait(POLL_MS / 1000)
                return
            message = _read(subscriber.recv_multipart()) if ready else None
            if message is not None:
                self._on_live(*message)
            elif not ready:
                self._ask()

    def _ask(self) -> None:
        """PUB may have lost the last ones, and says nothing of it."""
        if time.monotonic() - self._asked_at > ASK_SECONDS:
            self._fill()

    def _disconnected(self) -> None:
        if not self._replay:
            self._begin_again("its connection broke, and nothing tells whether the same log goes on")
        elif self._last is not None:
            self._unsure_since = time.monotonic()

    def _on_live(self, sequence: int, payload: bytes) -> None:
        if self._unsure_since is not None:
            self._fill()
            if self._connect_anew:
                return
            if self._unsure_since is not None:
                self._begin_again("its connection broke, and its ROUTER does not say what was lost")
        if self._ahead.pop(sequence, None) == zlib.crc32(payload):
            return  # the replay was quicker
        if sequence < self._next:
            self._begin_again(f"it begins again at {sequence}")
        if self._last is None or sequence > self._next:
            self._fill()
            if self._connect_anew:
                return
        if sequence < self._next:
            self._ahead.pop(sequence, None)
            return
        self._publish(sequence, payload)

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last[0] + 1

    def _fill(self) -> None:
        """All that the ROUTER has after the last batch. That one is asked for too: a log that has another, or none, in
        its place is another log."""
        if not self._replay:
            return
        try:
            if self._last is not None:
                with contextlib.closing(self._replayed(self._last[0])) as answer:
                    sequence, payload = next(answer, (-1, b""))
                    if (sequence, zlib.crc32(payload)) == self._last:
                        self._unsure_since = None
                        self._take(answer)
                        self.asked.set()
                        return
                self._connect_anew = True
                self._begin_again(f"its ROUTER does not have batch {self._last[0]} as it was")
            with contextlib.closing(self._replayed(0)) as answer:
                self._take(answer)
            self.asked.set()
        except TimeoutError:
            if not self._stopping.is_set():
                text = f"events: the replay at {self._replay} did not answer to its end"
                self._lines.warning("replays that did not end", text)
            if self._unsure_since is not None and time.monotonic() - self._unsure_since > GONE_SECONDS:
                self._begin_again("it is gone")
        finally:
            self._asked_at = time.monotonic()

    def _take(self, answer: Iterator[tuple[int, bytes]]) -> None:
        for sequence, payload in answer:
            if sequence >= self._next:
                self._publish(sequence, payload)
                self._ahead[sequence] = zlib.crc32(payload)
        while len(self._ahead) > MOST_AHEAD:
            del self._ahead[next(iter(self._ahead))]

    def _publish(self, sequence: int, payload: bytes) -> None:
        if sequence > self._next:
            self._lost(f"batches {self._next} to {sequence - 1} are missing")
        self._publisher.publish_raw(payload)
        self._last = (sequence, zlib.crc32(payload))

    def _begin_again(self, why: str) -> None:
        if self._last is not None:
            self._lost(why)
        self._last = self._unsure_since = None
        self._ahead.clear()

    def _lost(self, why: str) -> None:
        text = f"events: relay of {self._endpoint}: {why}; the cache counts as empty"
        self._lines.warning("losses", text)
        rank = self._publisher.data_parallel_rank
        self._publisher.publish(KVEventBatch(time.time(), [AllBlocksCleared()], rank))

    def _replayed(self, first: int) -> Generator[tuple[int, bytes], None, None]:
        """Raises TimeoutError where the answer does not come to its end."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, 0)
            dealer.set(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
            self._reach(dealer, self._replay)
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            while dealer.poll(ANSWER_MS) and not self._stopping.is_set():
                self._moved_at = time.monotonic()
                frames = dealer.recv_multipart()
                if END in frames[1:]:
                    return
                message = _read(frames)
                if message is not None:
                    yield message
        raise TimeoutError

    def _reach(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Raises _Refused for what ZMQ does not take, such as a path that is too long; said once."""
        try:
            _connect(socket, endpoint)
        except (ValueError, zmq.ZMQError) as error:
            if endpoint not in self._refused:
                _log.error("events: the relay cannot connect to %s: %s", endpoint, error)
            self._refused.add(endpoint)
            raise _Refused from None
        self._refused.discard(endpoint)


class _Refused(Exception):
    """ZMQ does not take an endpoint."""


def _connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    # Without it an IPv6 address is taken, and nothing ever comes.
    socket.set(zmq.IPV6, int(_needs_ipv6(check_reached(endpoint))))
    socket.connect(endpoint)


def _needs_ipv6(endpoint: Endpoint) -> bool:
    """True if it is an IPv6 address, or a name that has no other: of one that has both, ZMQ would take the IPv6 one,
    where an engine that bound "*" does not listen."""
    if endpoint.ipv6 or not endpoint.address.startswith("tcp:"):
        return endpoint.ipv6
    host, port = split_with_port(endpoint.address.removeprefix("tcp://"))
    try:
        return AF_INET not in {found[0] for found in getaddrinfo(host, port)}
    except OSError:
        return False  # ZMQ says so, as often as it tries


def _read(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Sequence and payload, which come last whatever stands before them; None for what is no batch."""
    if len(frames) < 3 or len(frames[-2]) != 8:
        _log.debug("events: a message of %d frames is no batch", len(frames))
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
