"""The Python client of every kvgrpc service, for operators, consumers and tests. Needs neither torch nor Mooncake.

``Client`` is asynchronous, ``SyncClient`` has the same methods for plain code. ``EventFollower`` keeps the exact
contents of one cache, ``PrefixIndex`` those of many, ``NativePrefixIndex`` in a process beside this one; ``Indexes``
asks several index servers, of which any may be away, and ``Pulls`` does what they plan.
``SyncEventFollower``, ``SyncPrefixIndex``, ``SyncIndexes`` and ``SyncPulls`` are the same for plain code. Errors are
those of ``kvgrpc.errors``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvgrpc.client.aio import Client
from kvgrpc.client.engines import Engines
from kvgrpc.client.indexes import Indexes, SyncIndexes
from kvgrpc.client.pulls import Pulled, Pulls, SyncPulls
from kvgrpc.client.sources import Sources
from kvgrpc.client.sync import SyncClient
from kvgrpc.client.watch import Begin, Dropped, Heartbeat, Payloads, Snapshot, TypedBatches, WatchPart
from kvgrpc.rpc.security import ClientSecurity

if TYPE_CHECKING:
    from kvgrpc.client.following.follower import EventFollower
    from kvgrpc.client.following.prefix_index import (
        PlanQuestion,
        PrefixIndex,
        Question,
        Wanted,
        sglang_hashes,
        sglang_lora_id,
        vllm_hashes,
    )
    from kvgrpc.client.following.sync_follower import SyncEventFollower, SyncPrefixIndex
    from kvgrpc.client.native_index import NativePrefixIndex

__all__ = [
    "Begin",
    "Client",
    "ClientSecurity",
    "Dropped",
    "Engines",
    "EventFollower",
    "Heartbeat",
    "Indexes",
    "NativePrefixIndex",
    "Payloads",
    "PlanQuestion",
    "PrefixIndex",
    "Pulled",
    "Pulls",
    "Question",
    "Snapshot",
    "Sources",
    "SyncClient",
    "SyncEventFollower",
    "SyncIndexes",
    "SyncPrefixIndex",
    "SyncPulls",
    "TypedBatches",
    "Wanted",
    "WatchPart",
    "sglang_hashes",
    "sglang_lora_id",
    "vllm_hashes",
]

_LOADED_WHEN_NAMED = {
    "EventFollower": "following.follower",
    "NativePrefixIndex": "native_index",
    "PlanQuestion": "following.prefix_index",
    "PrefixIndex": "following.prefix_index",
    "Question": "following.prefix_index",
    "Wanted": "following.prefix_index",
    "sglang_lora_id": "following.prefix_index",
    "SyncEventFollower": "following.sync_follower",
    "SyncPrefixIndex": "following.sync_follower",
    "sglang_hashes": "following.prefix_index",
    "vllm_hashes": "following.prefix_index",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_NAMED:
        return getattr(importlib.import_module(f"kvgrpc.client.{_LOADED_WHEN_NAMED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
