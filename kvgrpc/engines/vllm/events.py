"""vLLM's KV events published by kvgrpc: the same bytes at the same endpoint, and a journal that is replayed over gRPC.

vLLM's configuration admits the names of its own publishers only. But its scheduler makes the connector first and then
the publisher, of the same configuration: there the connector puts the name under which ours is registered. Without our
connector kvgrpc.engines.vllm_plugin puts ours under vLLM's own name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory

from kvgrpc.engines.addresses import engine_name, for_rank
from kvgrpc.engines.compatibility import EVENTS, VLLM, check
from kvgrpc.engines.vllm.rank import WorkerProcess
from kvgrpc.engines.vllm_plugin import LISTEN
from kvgrpc.events import EventsConfig, open_publisher
from kvgrpc.events.config import keys_of
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.server import EventServer, settings

logger = logging.getLogger("vllm." + __name__)
_NAME = "kvgrpc"


@dataclass(frozen=True, slots=True)
class Serving:
    """The publisher of events, and the address of their replay.

    ``listen``: "host:port" of dp rank 0. ``keys``: of EventsConfig, which vLLM's configuration does not admit.
    ``configured``: keywords of RankConfig, of which security and limits of calls count.
    """

    engine: str
    listen: str
    keys: Mapping[str, Any]
    configured: Mapping[str, Any]


def of_environment(environment: Mapping[str, str]) -> Serving:
    """For an engine without our connector. Raises InvalidRequest for a variable that cannot be."""
    configured = settings({}, environment)
    keys = configured.get("events")
    return Serving(
        configured.get("engine") or engine_name(socket.gethostname()),
        environment[LISTEN],
        keys_of(keys),
        configured,
    )


def publish_with_kvgrpc(config: Any) -> None:
    """Called before vLLM's scheduler makes its publisher: it will make ours, where it would make its ZMQ one and
    ``events_listen`` says where to serve the replay."""
    events, place = config.kv_events_config, WorkerProcess(config, 0, os.environ)
    if not place.events_listen or not events.enable_kv_cache_events or events.publisher != "zmq":
        return
    check(VLLM, EVENTS)
    serving = Serving(place.name, place.events_listen, place.events, place.configured)
    # Anew in a process that makes a second scheduler.
    EventPublisherFactory._registry[_NAME] = functools.partial(KvGrpcPublisher, serving=serving)
    events.publisher = _NAME


class KvGrpcPublisher(EventPublisher):
    """Made and called by vLLM's scheduler, on the EngineCore's thread; ``publish`` neither blocks nor raises."""

    def __init__(self, data_parallel_rank: int, serving: Serving, **vllm: Any) -> None:
        """``vllm``: as its own publisher takes them. Raises what open_publisher and EventServer raise."""
        super().__init__(data_parallel_rank)
        ref = RankRef(RankId(serving.engine, data_parallel_rank), new_epoch())
        config = EventsConfig.parse({"publisher": "zmq", **vllm, **serving.keys})
        security, limits = serving.configured.get("server_security"), serving.configured.get("call_limits")
        listen = [for_rank(serving.listen, data_parallel_rank)]
        with contextlib.ExitStack() as opened:
            self._publisher = open_publisher(config, ref)
            opened.callback(self._publisher.shutdown)
            self._server = EventServer(self._publisher, listen, security, limits, config.max_watches).open()
            opened.callback(self._server.close)
            stream = self._publisher.stream
            endpoint = vllm["endpoint"] if stream is None else stream.state().pub_endpoint
            told = {**vllm, "endpoint": endpoint}
            self._config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **told)
            self._opened = opened.pop_all()
        logger.info("kvgrpc: events of %s are published at %s, replayed at %s", ref, endpoint, self._server.address)

    def publish(self, events: Any) -> None:
        self._publisher.publish(events)

    def get_publisher_config(self) -> KVEventsConfig:
        """Returns what vLLM tells its API server, and that who asks for its sources of events."""
        return self._config

    def shutdown(self) -> None:
        self._opened.close()
