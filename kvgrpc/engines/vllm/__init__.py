"""vLLM's prefill/decode disaggregation over kvgrpc: a KV connector, loaded by module path. docs/engines/vllm.md.

vLLM imports this module in every process it starts, and forks some of them afterwards: nothing heavy is imported, and
nothing starts, before a worker registers its KV caches.
"""

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvgrpc.engines.vllm.connector import KvGrpcConnector

__all__ = ["KvGrpcConnector"]

# MultiConnector finds the statistics of its connectors by their names alone.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("KvGrpcConnector", __name__, "KvGrpcConnector")
