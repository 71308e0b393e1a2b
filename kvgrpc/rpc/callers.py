"""Who calls, as the library says it."""

from __future__ import annotations

from urllib.parse import unquote


def caller_address(peer: str) -> str:
    """ "host:port" of ServicerContext.peer(), IPv6 in brackets; "unix:…" and what is not known stay as they are."""
    scheme, _, address = peer.partition(":")
    return unquote(address) if scheme in ("ipv4", "ipv6") else peer
