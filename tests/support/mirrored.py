"""What a mirror of WatchEngines knows, as the registry itself has it, and the changes that it is told."""

from __future__ import annotations

from collections.abc import Iterable

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.model import RankRef
from kvgrpc.registry import wire
from kvgrpc.registry.model import ResolvedEngine
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.wire import rank_ref_to_pb


def known_engines(mirror: EngineMirror) -> dict[str, ResolvedEngine]:
    """Every engine by its name, read as the registry reads registrations."""
    pools = wire.PoolCache()
    return {name: wire.engine_from_pb(engine, pools) for name, engine in mirror.engines.items()}


def change_message(engine: ResolvedEngine, rows: Iterable[pb.RankRow], gone: Iterable[RankRef]) -> pb.EngineChange:
    return pb.EngineChange(engine=wire.engine_to_pb(engine, rows), gone=map(rank_ref_to_pb, gone))
