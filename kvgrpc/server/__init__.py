"""Opens ranks, registries and indexes: the composition root, and the one import place for engines.

``open_prefill`` or ``open_decode`` with a ``RankConfig``; ``Pool.from_arrays`` says where the KV cache is; ``KVSender``
and ``KVReceiver`` over ``rank.transfer`` move it.
"""

from kvgrpc.dataplane import open_plane
from kvgrpc.model import Layout, ModelIdentity, Pool, PoolKind, Region, Role
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server.alone.events import EventServer
from kvgrpc.server.alone.index import IndexServer
from kvgrpc.server.alone.registry import RegistryServer, etcd_store
from kvgrpc.server.alone.relay import EventRelay
from kvgrpc.server.alone.serving import serve
from kvgrpc.server.cache.server import CacheServer, open_cache
from kvgrpc.server.config import RankConfig, settings
from kvgrpc.server.rank.rank import Closed, Rank, open_decode, open_prefill, open_rank
from kvgrpc.transfer import Align, KVPoll, KVReceiver, KVSender, room_from_transfer_id
from kvgrpc.transfer.aux_rows import AuxBuffer
from kvgrpc.transfer.runtime.boundary import DecodeRuntime, PrefillRuntime
from kvgrpc.transfer.runtime.decode_manager import DecodeManager
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager

__all__ = [
    "Align",
    "AuxBuffer",
    "CacheServer",
    "CallLimits",
    "ClientSecurity",
    "Closed",
    "DecodeManager",
    "DecodeRuntime",
    "EventRelay",
    "EventServer",
    "IndexServer",
    "KVPoll",
    "KVReceiver",
    "KVSender",
    "Layout",
    "ModelIdentity",
    "Pool",
    "PoolKind",
    "PrefillManager",
    "PrefillRuntime",
    "Rank",
    "RankConfig",
    "Region",
    "RegistryServer",
    "Role",
    "ServerSecurity",
    "etcd_store",
    "open_cache",
    "open_decode",
    "open_plane",
    "open_prefill",
    "open_rank",
    "room_from_transfer_id",
    "serve",
    "settings",
]
