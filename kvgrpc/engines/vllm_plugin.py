"""vLLM's KV events published by kvgrpc in an engine without our connector: an entry point of vLLM's general plug-ins.

vLLM loads it in each of its processes, and dies of what ``register`` raises. It lies beside the connector's package,
whose import loads the connector, and imports nothing of vLLM unless there is something to do. docs/engines/vllm.md.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

LISTEN = "KVGRPC_EVENTS_LISTEN"


def register() -> None:
    """vLLM's plug-in function: where ``KVGRPC_EVENTS_LISTEN`` is set, vLLM's publisher ``zmq`` is ours.

    Raises FeatureDisabled for a vLLM that this adapter was not made for.
    """
    if not os.environ.get(LISTEN):
        return
    from kvgrpc.engines.compatibility import EVENTS, VLLM, check

    check(VLLM, EVENTS)
    from vllm.distributed.kv_events import EventPublisherFactory

    take_over(EventPublisherFactory._registry)


def take_over(publishers: MutableMapping[str, Any]) -> None:
    """Puts ours under vLLM's own name, the only one that its configuration admits; harmless when repeated."""
    from kvgrpc.engines.compatibility import EVENTS, VLLM, check

    check(VLLM, EVENTS)
    publishers["zmq"] = publisher


def publisher(data_parallel_rank: int, **vllm: Any) -> Any:
    """Made by vLLM's scheduler, of its configuration. Raises what KvGrpcPublisher raises."""
    from kvgrpc.engines.vllm.events import KvGrpcPublisher, of_environment

    return KvGrpcPublisher(data_parallel_rank, of_environment(os.environ), **vllm)
