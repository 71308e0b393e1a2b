"""What a registry answers that is asked for its engines."""

from __future__ import annotations

from kvgrpc.v1 import registry_service_pb2


class Engines(list[registry_service_pb2.Engine]):
    """A list of engines. ``warming_up``: the registry started less than one lease time ago, and may not know all."""

    warming_up = False
