"""Lets a call pass whose caller may make it (``kvgrpc.rpc.methods``)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvgrpc.errors import (
    CredentialsExpired,
    CredentialsInvalid,
    IdentityMismatch,
    KvGrpcError,
    PermissionDenied,
    WrongAudience,
)
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.rpc.callers import CALLER, PEER, Caller, caller, origin
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.credentials.token_table import TokenTable
from kvgrpc.rpc.credentials.tokens import AUTHORIZATION
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Layer, Method
from kvgrpc.rpc.methods import HEALTH_CHECK, roles_of
from kvgrpc.rpc.security import CallerRole, ServerSecurity

_REFUSALS = (CredentialsInvalid, WrongAudience, CredentialsExpired, PermissionDenied, IdentityMismatch)


def auth(security: ServerSecurity, refused: RateLimited, audiences: Audiences) -> Layer:
    """Lets a call pass whose caller's role may make it. A method that nobody was given is for nobody.

    ``refused`` hears of each call that was not the caller's to make: what its servicer refuses for the rank, too.
    """
    tokens = security.token_table()

    def layer(method: Method, inner: Behaviour) -> Behaviour:
        if not security.authenticates or (method.path == HEALTH_CHECK and security.health_without_token):
            return _named(inner)
        allowed = roles_of(method.path)

        async def call(request: Any, context: Context) -> Any:
            try:
                CALLER.set(_authenticated(context, tokens, audiences))
                _check_role(method, allowed)
                return await inner(request, context)
            except _REFUSALS as error:
                refused.warning(error.reason.name, partial(_line, method, error))
                raise

        return call

    return layer


def _check_role(method: Method, allowed: frozenset[CallerRole]) -> None:
    known = caller().role
    if known not in allowed:
        names = ", ".join(sorted(each.value for each in allowed)) or "nobody"
        role = known.value if known is not None else "nobody"
        raise PermissionDenied(
            f"{method.path} is for {names}, not for {role}",
            metadata={"method": method.path, "role": role, "allowed": names},
        )


def _line(method: Method, error: KvGrpcError) -> str:
    """For the log: it has what the caller sent of names, never of secrets."""
    name, host = caller().name, origin()[0]
    who = host if name in ("", host) else f"{host} ({name})"
    return one_line(f"{who} was refused {method.path}: {error}")


def _named(inner: Behaviour) -> Behaviour:
    """Names the caller by its host, if nobody proves anything here."""

    async def call(request: Any, context: Context) -> Any:
        CALLER.set(Caller(origin()[0]))
        return await inner(request, context)

    return call


def _authenticated(context: Context, tokens: TokenTable, audiences: Audiences) -> Caller:
    """By the address that was noted when the call came: of one that is over the library knows none any more."""
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION:
            header = value if isinstance(value, str) else value.decode(errors="replace")
            return Caller.with_token(tokens.check(header, audiences, PEER.get()), origin()[0])
    names = list(_names_in_certificate(context))
    known = Caller.with_certificate(names)
    if known is not None:
        return known
    if names:
        raise CredentialsInvalid(
            "no bearer token, and no name in the client certificate ends in .rank, .consumer or .operator: "
            + ", ".join(names),
            metadata={"scheme": "bearer"},
        )
    raise CredentialsInvalid(
        "no credentials: send the header that `kvgrpc token TARGET` prints, or a client certificate with a name that "
        "ends in .rank, .consumer or .operator",
        metadata={"scheme": "bearer"},
    )


def _names_in_certificate(context: Context) -> Iterator[str]:
    properties: Any = context.auth_context()
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        for name in properties.get(key, ()):
            yield name.decode(errors="replace")
