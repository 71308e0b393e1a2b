"""Every RPC of the contract: who may call it, how large a request may be, what bounds the calls of one caller.

The comment of each in the proto says its roles too, for readers of other languages; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES, MAX_MESSAGE_BYTES, SMALL_BYTES
from kvgrpc.rpc.security import CallerRole

PACKAGE = "kvgrpc.v1"
RANK, CONSUMER, OPERATOR = EVERYBODY = CallerRole.RANK, CallerRole.CONSUMER, CallerRole.OPERATOR
HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection."
SESSION = f"/{PACKAGE}.TransferService/Session"


@dataclass(frozen=True, slots=True)
class Rpc:
    """The demands of the server on one RPC."""

    roles: frozenset[CallerRole]
    """The roles that may call it."""
    largest: int = SMALL_BYTES
    """Bytes of one request: parsing it holds the event loop."""
    of_one: str = ""
    """The field of CallLimits that bounds the calls of one caller which wait or stream; empty: none but that of all."""


def rpc(*roles: CallerRole, largest: int = SMALL_BYTES, of_one: str = "") -> Rpc:
    return Rpc(frozenset(roles), largest, of_one)


_OF_SERVICES = {
    "RegistryService/Register": rpc(RANK, largest=MAX_MESSAGE_BYTES),
    "RegistryService/KeepAlive": rpc(RANK, of_one="keepalives_per_caller"),
    "RegistryService/Deregister": rpc(RANK, OPERATOR, largest=1 << 20),
    "RegistryService/GetEngine": rpc(*EVERYBODY),
    "RegistryService/ListEngines": rpc(*EVERYBODY),
    "RegistryService/ResolveRanks": rpc(RANK, OPERATOR, largest=1 << 20),
    "RegistryService/WatchEngines": rpc(*EVERYBODY, of_one="watches_per_caller"),
    "TransferService/Session": rpc(RANK),
    "TransferService/ListSessions": rpc(RANK, OPERATOR),
    "TransferService/ListRooms": rpc(RANK, OPERATOR),
    "TransferService/GetRoom": rpc(RANK, OPERATOR),
    "TransferService/LocateRooms": rpc(RANK, OPERATOR, largest=256 << 10, of_one="locates_per_caller"),
    "TransferService/CancelRoom": rpc(OPERATOR),
    "TransferService/GetRank": rpc(RANK, OPERATOR),
    "TransferService/GetTopology": rpc(RANK, OPERATOR),
    "EventService/ListStreams": rpc(*EVERYBODY),
    "EventService/Watch": rpc(*EVERYBODY, of_one="watches_per_caller"),
    "IndexService/Score": rpc(*EVERYBODY, largest=LARGEST_REQUEST_BYTES),
    "IndexService/Plan": rpc(*EVERYBODY, largest=LARGEST_REQUEST_BYTES),
    "IndexService/ListSources": rpc(*EVERYBODY),
    "PrefetchService/Lookup": rpc(*EVERYBODY, largest=LARGEST_REQUEST_BYTES),
    "PrefetchService/StartPrefetch": rpc(*EVERYBODY, largest=LARGEST_REQUEST_BYTES),
    "PrefetchService/WatchOperations": rpc(*EVERYBODY, of_one="watches_per_caller"),
    "PrefetchService/TerminatePrefetch": rpc(*EVERYBODY),
    "PrefetchService/StartBackup": rpc(RANK, OPERATOR, largest=LARGEST_REQUEST_BYTES),
    "PrefetchService/ListOperations": rpc(*EVERYBODY),
    "PrefetchService/GetCacheInfo": rpc(*EVERYBODY),
    "PrefetchService/PurgePages": rpc(OPERATOR),
    "PrefetchService/PinPages": rpc(RANK, OPERATOR, largest=LARGEST_REQUEST_BYTES),
    "PrefetchService/JoinAgreement": rpc(RANK),
    "PullService/CountPages": rpc(RANK, largest=LARGEST_REQUEST_BYTES),
    "PullService/LendPages": rpc(RANK, largest=LARGEST_REQUEST_BYTES),
    "PullService/ListPulls": rpc(RANK, OPERATOR),
    "ServerService/GetServerInfo": rpc(*EVERYBODY),
    "ServerService/Drain": rpc(OPERATOR),
    "ServerService/Undrain": rpc(OPERATOR),
    "ServerService/ListCallers": rpc(OPERATOR),
}
RPCS: dict[str, Rpc] = {f"/{PACKAGE}.{name}": each for name, each in _OF_SERVICES.items()}
ALLOWED: dict[str, frozenset[CallerRole]] = {path: each.roles for path, each in RPCS.items()}
SERVICES = {path.rpartition("/")[0] for path in RPCS}


def roles_of(path: str) -> frozenset[CallerRole]:
    """The roles that may call "/package.Service/Method": all for health and reflection, none for what has no line."""
    if path.startswith(("/grpc.health.v1.Health/", REFLECTION)):
        return frozenset(EVERYBODY)
    return ALLOWED.get(path, frozenset())


def largest_request(path: str) -> int:
    """Bytes of one request of a method. Services that are not ours have a bound of their own at the server."""
    if path in RPCS:
        return RPCS[path].largest
    is_ours = path.startswith("/grpc.") or path.rpartition("/")[0] in SERVICES
    return SMALL_BYTES if is_ours else MAX_MESSAGE_BYTES


def bound_of_one(path: str) -> tuple[str, str] | None:
    """The field of CallLimits that bounds the calls of one caller, and what they are; None: only that of all holds."""
    if path.startswith(REFLECTION):
        return "reflections_per_caller", "reflection streams"
    name = "health_watches_per_caller" if path == HEALTH_WATCH else RPCS[path].of_one if path in RPCS else ""
    return (name, path.rpartition("/")[2]) if name else None
