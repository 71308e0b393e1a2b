"""The live frames of one stream: a ZMQ SUB socket on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Callable
from typing import Any

from kvgrpc.errors import FeatureDisabled
from kvgrpc.events.model import LARGEST_MESSAGE
from kvgrpc.net import joined, split, split_with_port
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.turns import PIECE_SECONDS

# What waits here is read again where it is lost; a reader that is so far behind should not hold more.
RECEIVED_FRAMES = 10_000
_POLL_MILLISECONDS = 1000
_log = logging.getLogger(__name__)
_SEQUENCE = struct.Struct(">Q")


class LiveFrames:
    """Calls ``on_frame`` with the sequence and payload of each frame. All methods belong to one event loop.

    Frames that are none of ours are passed over. Raises FeatureDisabled where ZMQ is not installed.
    """

    def __init__(self, address: str, on_frame: Callable[[int, bytes], None]) -> None:
        try:
            import zmq.asyncio
        except ImportError as error:
            raise FeatureDisabled(
                "live events need pyzmq", metadata={"feature": "live", "howToEnable": "pip install pyzmq"}
            ) from error
        self._zmq: Any = zmq
        self._address = address
        self._on_frame = on_frame
        self._target: tuple[str, bytes] | None = None
        self._reading: asyncio.Task[None] | None = None

    def subscribe(self, endpoint: str, topic: bytes) -> None:
        """Takes frames from there from now on; nothing happens where it does so already, or the endpoint is empty."""
        target = (endpoint, topic)
        if endpoint and target != self._target:
            self._target = target
            self.reset()

    def reset(self) -> None:
        """Subscribes anew, and forgets what waits."""
        if self._reading is not None:
            self._reading.cancel()
        if self._target is not None:
            self._reading = background(self._read(*self._target), "live-events")

    async def close(self) -> None:
        """Takes no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, endpoint: str, topic: bytes) -> None:
        zmq = self._zmq
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = RECEIVED_FRAMES
        socket.maxmsgsize = LARGEST_MESSAGE
        socket.ipv6 = True
        try:
            socket.subscribe(topic)
            try:
                socket.connect(reachable(endpoint, self._address))
            except zmq.ZMQError as error:
                # A publisher says it, so it may be anything; Watches bring what would have come from there.
                _log.warning("%s: no live frames from %r: %s", self._address, endpoint[:200], error)
                return
            while True:
                # A recv that is cancelled may drop what it had taken; a poll does not.
                if await socket.poll(_POLL_MILLISECONDS):
                    self._take_some(socket)
                    await asyncio.sleep(0)  # a poll that finds frames waits for nothing
        finally:
            socket.close()

    def _take_some(self, socket: Any) -> None:
        """Reads as many as a turn of the loop has time for: a publisher that floods leaves turns to others."""
        end = time.monotonic() + PIECE_SECONDS
        with contextlib.suppress(self._zmq.Again):
            while time.monotonic() < end:
                self._take(socket.recv_multipart(self._zmq.NOBLOCK).result())

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == _SEQUENCE.size:
            self._on_frame(_SEQUENCE.unpack(frames[1])[0], frames[2])


def reachable(endpoint: str, address: str) -> str:
    """The endpoint as others reach it: in place of a wildcard, the host at which the publisher's gRPC is reached."""
    scheme, _, place = endpoint.partition("://")
    host, port = split_with_port(place)
    if scheme != "tcp" or host not in ("*", "0.0.0.0", "::"):
        return endpoint
    return f"tcp://{joined(split(address)[0], port)}"
