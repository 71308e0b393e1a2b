"""The answers of a registry that is asked for its engines."""

from __future__ import annotations

from kvgrpc.errors import EngineNotFound
from kvgrpc.v1 import registry_service_pb2


class Engines(list[registry_service_pb2.Engine]):
    """A list of engines. ``warming_up``: the registry started less than one lease time ago, and may not know all."""

    warming_up = False


def cache_address(engine: registry_service_pb2.Engine, dp: int = 0) -> str:
    """The address that takes orders for the cache of an engine: pp0/cp0/tp0 of that dp rank. Raises EngineNotFound."""
    for row in engine.rows:
        rank = row.rank.rank
        if rank.dp == dp and rank.pp == rank.cp == rank.tp == 0 and row.endpoints.grpc:
            return str(row.endpoints.grpc)
    name = f"{engine.name}/dp{dp}/pp0/cp0/tp0"
    raise EngineNotFound(
        f"the registry has no address of {name}",
        metadata={"engine": engine.name, "role": "", "missingRanks": name},
    )
