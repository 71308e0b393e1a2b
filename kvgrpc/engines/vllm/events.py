"""vLLM's KV events published by kvgrpc: the same bytes at the same endpoint, and a journal that is replayed over gRPC.

vLLM's configuration admits the names of its own publishers only. But its scheduler makes the connector first and then
the publisher, of the same configuration: there the connector puts the name under which ours is registered.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, ClassVar

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory

from kvgrpc.engines.vllm.rank import Place
from kvgrpc.events import EventsConfig, open_publisher
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.server.events import EventServer

logger = logging.getLogger("vllm." + __name__)
_NAME = "kvgrpc"


def publish_with_kvgrpc(config: Any) -> None:
    """Called before vLLM's scheduler makes its publisher: it will make ours, where it would make its ZMQ one and
    ``events_listen`` says where to serve the replay."""
    events, place = config.kv_events_config, Place(config, 0, os.environ)
    if not place.events_listen or not events.enable_kv_cache_events or events.publisher != "zmq":
        return
    KvGrpcPublisher.place = place
    with contextlib.suppress(KeyError):  # registered already, in a process that makes a second scheduler
        EventPublisherFactory.register_publisher(_NAME, KvGrpcPublisher)
    events.publisher = _NAME


class KvGrpcPublisher(EventPublisher):
    """Made and called by vLLM's scheduler, on the EngineCore's thread; ``publish`` neither blocks nor raises."""

    place: ClassVar[Place]

    def __init__(self, data_parallel_rank: int, **settings: Any) -> None:
        """``settings``: vLLM's, as its own publisher takes them. Raises what open_publisher and EventServer raise."""
        super().__init__(data_parallel_rank)
        place = self.place
        ref = RankRef(RankId(place.name, data_parallel_rank), new_epoch())
        config = EventsConfig.parse({"publisher": "zmq", **settings, **place.events})
        self._publisher = open_publisher(config, ref)
        security, limits = place.configured.get("server_security"), place.configured.get("call_limits")
        listen = [place.events_listen]
        self._server = EventServer(self._publisher, listen, security, limits, config.max_watches).open()
        stream = self._publisher.stream
        endpoint = settings["endpoint"] if stream is None else stream.state().pub_endpoint
        self._config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", **{**settings, "endpoint": endpoint}
        )
        logger.info("kvgrpc: events of %s are published at %s, replayed at %s", ref, endpoint, self._server.address)

    def publish(self, events: Any) -> None:
        self._publisher.publish(events)

    def get_publisher_config(self) -> KVEventsConfig:
        """What vLLM tells its API server, and that who asks for its sources of events."""
        return self._config

    def shutdown(self) -> None:
        self._server.close()
        self._publisher.shutdown()
