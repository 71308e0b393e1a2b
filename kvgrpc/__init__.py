"""kvgrpc: the control plane for KV-cache transfer, events and prefetch between LLM engines.

Importing it loads nothing heavy: neither grpc nor torch, mooncake or zmq (tests/architecture).
"""

__version__ = "0.1.0.dev0"

from kvgrpc.grpc_experiments import leave_out_event_engine as _leave_out_event_engine

_leave_out_event_engine()
