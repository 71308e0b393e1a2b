"""Live events over ZMQ PUB: three frames (topic, 8-byte big-endian sequence, msgpack batch), as the engines send."""

from __future__ import annotations

import zmq

from kvgrpc.events.config import EventsConfig
from kvgrpc.events.endpoints import Endpoint, check_apart, endpoint_of, on_this_host
from kvgrpc.events.live.listening import WATCHED, Listening
from kvgrpc.events.live.router import ReplayRouter
from kvgrpc.events.live.sockets import bound_address, close_delivered, open_socket
from kvgrpc.events.publisher import JournalingPublisher
from kvgrpc.model import RankId, RankRef, new_epoch


class ZmqEventPublisher(JournalingPublisher):
    """Publishes on ZMQ PUB and into the journal; replays over ROUTER where ``replay_endpoint`` is set.

    The rank comes as ``data_parallel_rank`` (vLLM's factory), ``attn_dp_rank`` (SGLang's) or ``rank``; ``settings`` are
    the keys of EventsConfig. Raises ValueError for a wrong setting, OSError when an endpoint cannot be bound.
    """

    def __init__(
        self,
        data_parallel_rank: int = 0,
        *,
        attn_dp_rank: int | None = None,
        rank: RankRef | None = None,
        **settings: object,
    ) -> None:
        config = EventsConfig.parse(settings)
        dp = data_parallel_rank if attn_dp_rank is None else attn_dp_rank
        rank = rank or RankRef(RankId("engine", dp=dp), new_epoch())
        check_apart(config.endpoint, config.replay_endpoint)
        live: PubSocket | None = None
        router: ReplayRouter | None = None
        if config.endpoint is not None:
            endpoint = endpoint_of(config.endpoint, rank.rank.dp, config.bind)
            live = PubSocket(endpoint, config.topic.encode(), config.hwm)
        if config.replay_endpoint is not None:
            try:
                # The engines bind it, whatever the host.
                replay = endpoint_of(config.replay_endpoint, rank.rank.dp, bind=True)
                router = ReplayRouter(replay, config.topic.encode(), config.shape_of_replay)
            except BaseException:
                if live is not None:
                    live.close(0.0)
                raise
        self._router = router
        self._pub = live
        super().__init__(
            rank,
            config,
            live,
            replay_endpoint=router.endpoint if router else "",
            connects_to=live.connects_to if live else "",
            listened_at=live.is_listened_at if live else lambda: None,
        )
        if router is not None:
            router.serve(self.stream)

    @property
    def healthy(self) -> bool:
        return super().healthy and (self._router is None or self._router.healthy)

    def fence(self) -> None:
        super().fence()
        if self._router is not None:
            self._router.stop()

    def shutdown(self, deadline: float = 1.0) -> None:
        super().shutdown(deadline)
        if self._router is not None:
            self._router.close(deadline)

    def _look(self) -> None:
        if self._pub is not None:
            self._pub.look()

    def describe_local_source(self, block_size: int) -> dict[str, object] | None:
        state = self.stream.state()
        endpoint, replay = on_this_host(state.pub_endpoint), on_this_host(state.replay_endpoint)
        if not endpoint:
            return None
        return {
            "dp_rank": self.stream.dp,
            "endpoint": endpoint,
            "topic": state.topic.decode(),
            "block_size": block_size,
        } | ({"replay_endpoint": replay} if replay else {})


class PubSocket:
    """A PUB socket, opened on one thread and from then on used by one other."""

    def __init__(self, endpoint: Endpoint, topic: bytes, hwm: int) -> None:
        self._topic = topic
        # libzmq reports nothing of inproc.
        monitored = 0 if endpoint.bind or endpoint.address.startswith("inproc:") else WATCHED
        self._socket = open_socket(zmq.PUB, endpoint, hwm, monitored)
        self._listening = Listening(self._socket, endpoint.address) if monitored else None
        self.endpoint = bound_address(self._socket) if endpoint.bind else ""
        self.connects_to = "" if endpoint.bind else endpoint.address

    def send(self, sequence: int, payload: bytes, batch: object) -> None:
        self._socket.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def look(self) -> None:
        """Now and then: whether anybody listens where it connects to."""
        if self._listening is not None:
            self._listening.look()

    def is_listened_at(self) -> bool | None:
        """On any thread: True while somebody listens where it connects to; None: it binds, or ZMQ cannot tell."""
        return None if self._listening is None else self._listening.is_heard

    def close(self, deadline: float) -> None:
        """Returns when all subscribers have what was sent, or after ``deadline`` seconds; what is left is dropped."""
        if self._listening is not None:
            self._listening.close()
        close_delivered(self._socket, deadline)
