"""SGLang's KV events published by kvgrpc: ``--kv-events-config '{"publisher": "kvgrpc", ...}'``.
docs/publish-events.md.

The same bytes at the same endpoint and the same ROUTER replay; besides them a journal and snapshots, which EventService
serves where ``KVGRPC_EVENTS_LISTEN`` says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

from sglang.srt.disaggregation.kv_events import EventPublisher

from kvgrpc.engines.addresses import engine_name, for_rank
from kvgrpc.engines.compatibility import EVENTS, SGLANG, check
from kvgrpc.events import EventsConfig, open_publisher
from kvgrpc.events.config import keys_of
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.server import EventServer, settings

logger = logging.getLogger("sglang." + __name__)
LISTEN = "KVGRPC_EVENTS_LISTEN"


class KvGrpcPublisher(EventPublisher):
    """Made and called by SGLang's scheduler, on its thread; ``publish`` neither blocks nor raises.

    SGLang's configuration admits no key of ours: those of ``KVGRPC_EVENTS``, a JSON object, come over it.
    Raises what open_publisher and EventServer raise.
    """

    def __init__(self, attn_dp_rank: int, **sglang: Any) -> None:
        check(SGLANG, EVENTS)
        configured = settings()
        more = configured.get("events")
        keys = {"publisher": "zmq", **sglang, **keys_of(more)}
        config = EventsConfig.parse(keys)
        name = configured.get("engine") or engine_name(socket.gethostname())
        self._server: EventServer | None = None
        listen = os.environ.get(LISTEN, "")
        with contextlib.ExitStack() as opened:
            self._publisher = open_publisher(config, RankRef(RankId(name, attn_dp_rank), new_epoch()))
            opened.callback(self._publisher.shutdown)
            if listen:
                self._server = EventServer(
                    self._publisher,
                    [for_rank(listen, attn_dp_rank)],
                    configured.get("server_security"),
                    configured.get("call_limits"),
                    config.max_watches,
                ).open()
                opened.callback(self._server.close)
            self._opened = opened.pop_all()
        stream = self._publisher.stream
        logger.info(
            "kvgrpc: events of %s dp %d are published at %s, served at %s",
            name,
            attn_dp_rank,
            None if stream is None else stream.pub_endpoint,
            None if self._server is None else self._server.address,
        )

    def publish(self, events: Any) -> None:
        self._publisher.publish(events)

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        return self._publisher.describe_local_source(block_size)

    def shutdown(self) -> None:
        self._opened.close()
