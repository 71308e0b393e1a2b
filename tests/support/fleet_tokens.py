"""A fleet whose callers have tokens, and how its servers take a header."""

from __future__ import annotations

from typing import Any

import grpc

from kvgrpc.errors import Reason
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from tests.support.secrets import tokens_of

TOKENS = tokens_of(
    """
rank honest-p role=prefill:prefill
rank decode-7 role=decode:seven
rank prefill-evil role=prefill:evil
consumer index:index
operator boss:boss
"""
)


SECURITY = ServerSecurity(tokens=TOKENS)


def sent(address: str, path: str, header: str) -> Reason | None:
    """What the server says to an empty call with that header; None: it let the caller in."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(path)
        try:
            call(b"", metadata=(("authorization", header),), timeout=10)
        except grpc.RpcError as error:
            known = error_from(error)
            refused = (Reason.CREDENTIALS_INVALID, Reason.WRONG_AUDIENCE, Reason.CREDENTIALS_EXPIRED)
            return known.reason if known.reason in refused else None
    return None
