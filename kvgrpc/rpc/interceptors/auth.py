"""Who may call what. The table repeats the "Roles:" lines of the protos; a test compares them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvgrpc.errors import CredentialsInvalid, PermissionDenied
from kvgrpc.net import caller_address, is_unix, split
from kvgrpc.rpc.callers import CALLER, Caller
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Layer, Method
from kvgrpc.rpc.security import AUTHORIZATION, CallerRole, ServerSecurity, TokenTable

RANK, CONSUMER, OPERATOR = CallerRole.RANK, CallerRole.CONSUMER, CallerRole.OPERATOR
EVERYBODY = frozenset(CallerRole)

ALLOWED: dict[str, frozenset[CallerRole]] = {
    "/kvgrpc.v1.RegistryService/Register": frozenset({RANK}),
    "/kvgrpc.v1.RegistryService/KeepAlive": frozenset({RANK}),
    "/kvgrpc.v1.RegistryService/Deregister": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.RegistryService/GetEngine": EVERYBODY,
    "/kvgrpc.v1.RegistryService/ListEngines": EVERYBODY,
    "/kvgrpc.v1.RegistryService/ResolveRanks": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.RegistryService/WatchEngines": EVERYBODY,
    "/kvgrpc.v1.TransferService/Session": frozenset({RANK}),
    "/kvgrpc.v1.TransferService/ListSessions": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.TransferService/ListRooms": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.TransferService/GetRoom": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.TransferService/LocateRooms": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.TransferService/CancelRoom": frozenset({OPERATOR}),
    "/kvgrpc.v1.TransferService/GetRank": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.EventService/ListStreams": EVERYBODY,
    "/kvgrpc.v1.EventService/Watch": EVERYBODY,
    "/kvgrpc.v1.IndexService/Score": EVERYBODY,
    "/kvgrpc.v1.IndexService/ListSources": EVERYBODY,
    "/kvgrpc.v1.PrefetchService/Lookup": EVERYBODY,
    "/kvgrpc.v1.PrefetchService/StartPrefetch": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.PrefetchService/WatchOperations": EVERYBODY,
    "/kvgrpc.v1.PrefetchService/TerminatePrefetch": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.PrefetchService/StartBackup": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.PrefetchService/ListOperations": EVERYBODY,
    "/kvgrpc.v1.PrefetchService/GetCacheInfo": EVERYBODY,
    "/kvgrpc.v1.PrefetchService/PurgePages": frozenset({OPERATOR}),
    "/kvgrpc.v1.PrefetchService/PinPages": frozenset({RANK, OPERATOR}),
    "/kvgrpc.v1.PrefetchService/JoinAgreement": frozenset({RANK}),
    "/kvgrpc.v1.ServerService/GetServerInfo": EVERYBODY,
    "/kvgrpc.v1.ServerService/Drain": frozenset({OPERATOR}),
}
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
# For every authenticated caller.
_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")


def auth(security: ServerSecurity) -> Layer:
    """Lets a call pass whose caller's role may make it. A method that nobody was given is for nobody."""
    tokens = TokenTable(security)

    def layer(method: Method, inner: Behaviour) -> Behaviour:
        if not security.authenticates or (method.path == HEALTH_CHECK and security.health_without_token):
            return _named(inner)
        allowed = EVERYBODY if method.path.startswith(_OPEN) else ALLOWED.get(method.path, frozenset())

        async def call(request: Any, context: Context) -> Any:
            known = _authenticated(context, tokens)
            if known.role not in allowed:
                names = ", ".join(sorted(each.value for each in allowed)) or "nobody"
                role = known.role.value if known.role is not None else "nobody"
                raise PermissionDenied(
                    f"{method.path} is for {names}, not for {role}",
                    metadata={"method": method.path, "role": role, "allowed": names},
                )
            CALLER.set(known)
            return await inner(request, context)

        return call

    return layer


def _named(inner: Behaviour) -> Behaviour:
    """Where nobody proves anything, callers are told apart by their hosts."""

    async def call(request: Any, context: Context) -> Any:
        CALLER.set(Caller(_host(context)))
        return await inner(request, context)

    return call


def _authenticated(context: Context, tokens: TokenTable) -> Caller:
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION:
            token = tokens.find(value if isinstance(value, str) else value.decode(errors="replace"))
            if token is not None:
                return Caller.with_token(token, _host(context))
            raise CredentialsInvalid("the bearer token is not one of this server's", metadata={"scheme": "bearer"})
    known = Caller.with_certificate(_names_in_certificate(context))
    if known is not None:
        return known
    raise CredentialsInvalid(
        "no credentials: send 'authorization: Bearer TOKEN', or a client certificate with a name that ends in "
        ".rank, .consumer or .operator",
        metadata={"scheme": "bearer"},
    )


def _host(context: Context) -> str:
    address = caller_address(context.peer())
    return address if is_unix(address) else split(address)[0]


def _names_in_certificate(context: Context) -> Iterator[str]:
    properties: Any = context.auth_context()
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        for name in properties.get(key, ()):
            yield name.decode(errors="replace")
