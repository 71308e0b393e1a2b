"""Live KV-cache events of one rank, as any subscriber of the engines gets them: three frames from ZMQ PUB."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

TOLD_AGAIN_SECONDS = 0.05


class LiveEvents:
    """Subscribes to everything at ``endpoint``, on a thread of its own, and keeps what comes."""

    def __init__(self, endpoint: str) -> None:
        self._payloads: dict[int, bytes] = {}
        self._malformed = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(endpoint,), name="demo-events", daemon=True)
        self._thread.start()

    def heard(self, provoke: Callable[[], None], seconds: float) -> bool:
        """Calls ``provoke``, which makes the rank publish, until a batch came: only then the subscription stands."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._payloads and time.monotonic() < deadline:
                provoke()
                self._changed.wait(TOLD_AGAIN_SECONDS)
            return bool(self._payloads)

    def up_to(self, sequence: int, seconds: float) -> dict[int, bytes]:
        """Returns what came by sequence, once the batch ``sequence`` is among it or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: sequence in self._payloads, seconds)
            return dict(self._payloads)

    @property
    def malformed(self) -> int:
        """Messages that were not three frames with a sequence of eight bytes."""
        return self._malformed

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2.0)

    def _read(self, endpoint: str) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(endpoint)
            while not self._closing.is_set():
                if socket.poll(100):
                    self._keep_payload(socket.recv_multipart())

    def _keep_payload(self, frames: list[bytes]) -> None:
        with self._changed:
            if len(frames) == 3 and len(frames[1]) == 8:
                self._payloads[int.from_bytes(frames[1], "big")] = frames[2]
            else:
                self._malformed += 1
            self._changed.notify_all()
