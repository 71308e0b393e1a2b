"""Opens ranks, registries and indexes: the composition root. Engines need ``open_prefill`` or ``open_decode``."""

from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.server.app import Closed, Rank, open_decode, open_prefill, open_rank
from kvgrpc.server.config import RankConfig, settings
from kvgrpc.server.index import IndexServer, serve_index
from kvgrpc.server.registry import RegistryServer, serve_registry
from kvgrpc.transfer.aux import AuxBuffer

__all__ = [
    "AuxBuffer",
    "CallLimits",
    "Closed",
    "IndexServer",
    "Rank",
    "RankConfig",
    "RegistryServer",
    "open_decode",
    "open_prefill",
    "open_rank",
    "serve_index",
    "serve_registry",
    "settings",
]
