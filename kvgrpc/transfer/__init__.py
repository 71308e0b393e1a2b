"""Hand-offs of KV caches: rooms, sessions and plans. docs/session.md has the rules.

Engines use ``KVSender`` and ``KVReceiver`` over ``rank.transfer`` (kvgrpc.server.open_rank). They are loaded when first
named, so that ``protocol`` and ``layout`` can be used without grpc and asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvgrpc.transfer.protocol.types import Align, KVPoll, room_from_transfer_id

if TYPE_CHECKING:
    from kvgrpc.transfer.receiver import KVReceiver
    from kvgrpc.transfer.sender import KVSender

__all__ = ["Align", "KVPoll", "KVReceiver", "KVSender", "room_from_transfer_id"]

_LOADED_WHEN_NAMED = {"KVReceiver": "kvgrpc.transfer.receiver", "KVSender": "kvgrpc.transfer.sender"}


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_NAMED:
        found = globals()[name] = getattr(importlib.import_module(_LOADED_WHEN_NAMED[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
