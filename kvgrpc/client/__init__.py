"""The Python client of every kvgrpc service, for operators, consumers and tests. Needs neither torch nor Mooncake.

``Client`` is asynchronous, ``SyncClient`` has the same methods for plain code. Errors are those of ``kvgrpc.errors``.
"""

from kvgrpc.client.aio import Client
from kvgrpc.client.sync import SyncClient
from kvgrpc.client.watch import Begin, Dropped, Heartbeat, Payloads, WatchPart
from kvgrpc.rpc.security import ClientSecurity

__all__ = ["Begin", "Client", "ClientSecurity", "Dropped", "Heartbeat", "Payloads", "SyncClient", "WatchPart"]
