"""Opens ranks and registries: the composition root. An engine needs ``open_rank`` and ``RankConfig`` only."""

from kvgrpc.server.app import Closed, Rank, open_rank
from kvgrpc.server.config import RankConfig, settings
from kvgrpc.server.registry import RegistryServer, serve_registry
from kvgrpc.transfer.aux import AuxBuffer

__all__ = ["AuxBuffer", "Closed", "Rank", "RankConfig", "RegistryServer", "open_rank", "serve_registry", "settings"]
