"""Live events over ZMQ PUB: three frames (topic, 8-byte big-endian sequence, msgpack batch), as the engines send."""

from __future__ import annotations

import errno

import zmq

from kvgrpc.events.config import EventsConfig
from kvgrpc.events.endpoints import Endpoint, endpoint_of
from kvgrpc.events.journaling import JournalingPublisher
from kvgrpc.model import RankId, RankRef, new_epoch

# zmq lingers for this part of a deadline, and reports a little later.
LINGER_SHARE = 0.9
GRACE_SECONDS = 0.5

_unstopped: list[zmq.Socket[bytes]] = []


class ZmqEventPublisher(JournalingPublisher):
    """Publishes on ZMQ PUB and into the journal. ``settings`` are the keys of EventsConfig.

    Raises ValueError for a wrong setting, FeatureDisabled for a replay_endpoint, OSError when the endpoint cannot be
    bound.
    """

    def __init__(self, data_parallel_rank: int = 0, *, rank: RankRef | None = None, **settings: object) -> None:
        config = EventsConfig.parse(settings)
        config.refuse_replay_endpoint()
        rank = rank or RankRef(RankId("engine", dp=data_parallel_rank), new_epoch())
        live = None
        if config.endpoint is not None:
            endpoint = endpoint_of(config.endpoint, rank.rank.dp, config.bind)
            live = PubSocket(endpoint, config.topic.encode(), config.hwm)
        super().__init__(rank, config, live)


class PubSocket:
    """A PUB socket, opened on one thread and from then on used by one other."""

    def __init__(self, endpoint: Endpoint, topic: bytes, hwm: int) -> None:
        self._topic = topic
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, hwm)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, int(endpoint.ipv6))
        try:
            self._open(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(error.errno or errno.EINVAL, error.strerror, endpoint.address) from None
        self.endpoint = self._socket.last_endpoint.decode().rstrip("\0") if endpoint.bind else ""

    def send(self, sequence: int, payload: bytes, batch: object) -> None:
        self._socket.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def close(self, deadline: float) -> None:
        """Returns when all subscribers have what was sent, or after ``deadline`` seconds; what is left is dropped."""
        # A closed socket lives on until it has delivered, and says then that its monitor stops.
        monitor = self._socket.get_monitor_socket(zmq.EVENT_MONITOR_STOPPED)
        self._socket.close(linger=round(deadline * LINGER_SHARE * 1000))
        if monitor.poll(round((deadline + GRACE_SECONDS) * 1000)):
            monitor.close(linger=0)
        else:
            # Closing it first would block zmq's reaper thread, and with it every socket of the process, for good.
            _unstopped.append(monitor)

    def _open(self, endpoint: Endpoint) -> None:
        if endpoint.bind:
            self._socket.bind(endpoint.address)
        else:
            self._socket.connect(endpoint.address)
