"""Sees if anybody listens where a PUB connects to: ZMQ drops what it sends to nobody, and says nothing."""

from __future__ import annotations

import logging
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvgrpc.events.live.sockets import end_monitor
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited

# Both are rare, so that a monitor that nobody reads for a while does not fill up.
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# A proxy may start beside the engine, or begin again.
GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.25

_log = logging.getLogger(__name__)


class Listening:
    """Of a socket that was opened with a monitor of ``WATCHED``. For the thread that sends on it."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket, self._address = socket, address
        self._monitor = socket.get_monitor_socket()
        self._alone_since: float | None = time.monotonic()
        self._said = False
        self._looked_at = 0.0
        self._lines = RateLimited(_log)

    @property
    def is_heard(self) -> bool:
        """True while somebody listens, by the last look; on any thread."""
        return self._alone_since is None

    def look(self) -> None:
        """Says in the log when nobody has listened for a while, and when somebody does again. For every pass."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._alone_since = None
            elif self._alone_since is None:  # a front without a backend takes connections and closes them
                self._alone_since = now
        alone = self._alone_since is not None and now - self._alone_since >= GRACE_SECONDS
        if alone and not self._said:
            self._say(True)
        elif self._alone_since is None and self._said:
            self._say(False)

    def close(self) -> None:
        """Before its socket is closed."""
        if self._said:
            metrics.EVENTS_UNHEARD.dec()
        self._said = False
        end_monitor(self._socket)

    def _say(self, alone: bool) -> None:
        self._said = alone
        if alone:
            metrics.EVENTS_UNHEARD.inc()
            self._lines.warning(
                "endpoints where nobody listens",
                f"events: nobody listens at {self._address}, which live batches are sent to; "
                'Watch and replay have them. To listen there itself: "bind": true',
            )
        else:
            metrics.EVENTS_UNHEARD.dec()
            self._lines.say(logging.INFO, "endpoints where somebody listens", f"events: {self._address} is listened at")
