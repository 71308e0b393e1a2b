"""vLLM's KV events published by kvgrpc in an engine without our connector: an entry point of vLLM's general plug-ins.

vLLM loads it in each of its processes, and dies of what ``register`` raises. It lies beside the connector's package,
whose import loads the connector, and imports nothing of vLLM unless there is something to do. docs/engines/vllm.md.
"""

from __future__ import annotations

import os
from typing import Any

LISTEN = "KVGRPC_EVENTS_LISTEN"


def register() -> None:
    """vLLM's plug-in function: where ``KVGRPC_EVENTS_LISTEN`` is set, vLLM's publisher ``zmq`` is ours.

    vLLM may call it again. Raises FeatureDisabled for a vLLM that this adapter was not made for.
    """
    if not os.environ.get(LISTEN):
        return
    from kvgrpc.engines.compatibility import EVENTS, VLLM, check

    check(VLLM, EVENTS)
    from vllm.distributed.kv_events import EventPublisherFactory

    # The only name besides "null" that vLLM's configuration admits.
    EventPublisherFactory._registry["zmq"] = publisher


def publisher(data_parallel_rank: int, **vllm: Any) -> Any:
    """Made by vLLM's scheduler, of its configuration. Raises what KvGrpcPublisher raises."""
    from kvgrpc.engines.vllm.events import KvGrpcPublisher, of_environment

    return KvGrpcPublisher(data_parallel_rank, of_environment(os.environ), **vllm)
