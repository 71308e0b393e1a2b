"""Secrets of callers by short names, and what proves them."""

from __future__ import annotations

import time

from kvgrpc.net import target_of
from kvgrpc.rpc.credentials.secrets import parse_tokens
from kvgrpc.rpc.credentials.tokens import authorization
from kvgrpc.rpc.security import ClientSecurity, Token


def secret(name: str) -> str:
    """As long as a tokens file wants it."""
    return f"{name}-as-a-secret-of-tests"


def tokens_of(text: str) -> tuple[Token, ...]:
    """Lines of a tokens file with the names of secrets in place of secrets."""
    heads = (line.rpartition(":") for line in text.splitlines() if line)
    return parse_tokens("\n".join(f"{head}:{secret(name)}" for head, _, name in heads))


def proof(name: str) -> ClientSecurity:
    """Of a client that has that secret."""
    return ClientSecurity(token=secret(name))


def bearer(name: str, address: str) -> str:
    """The header that proves it to a server, for a call that begins now."""
    return authorization(secret(name), target_of(address), int(time.time()))
