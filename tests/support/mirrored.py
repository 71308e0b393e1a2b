"""What a mirror of WatchEngines knows, as the registry itself has it."""

from __future__ import annotations

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.registry import wire
from kvgrpc.registry.model import ResolvedEngine


def known_engines(mirror: EngineMirror) -> dict[str, ResolvedEngine]:
    """Every engine by its name, read as the registry reads registrations."""
    pools = wire.PoolCache()
    return {name: wire.engine_from_pb(engine, pools) for name, engine in mirror.engines.items()}
