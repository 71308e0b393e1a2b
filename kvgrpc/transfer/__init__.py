"""Hand-offs of KV caches: rooms, sessions and plans. docs/session.md has the rules.

Engines use ``KVSender`` and ``KVReceiver`` over ``rank.transfer`` (kvgrpc.server.open_rank).
"""

from kvgrpc.transfer.protocol.types import Align, KVPoll, room_from_transfer_id
from kvgrpc.transfer.receiver import KVReceiver
from kvgrpc.transfer.sender import KVSender

__all__ = ["Align", "KVPoll", "KVReceiver", "KVSender", "room_from_transfer_id"]
