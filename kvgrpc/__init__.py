"""kvgrpc: the control plane for KV-cache transfer, events and prefetch between LLM engines.

Importing it loads nothing heavy: neither grpc nor torch, mooncake or zmq (tests/architecture).
"""

__version__ = "0.1.0.dev0"
