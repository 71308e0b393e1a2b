"""Checks the addresses that ranks advertise."""

from __future__ import annotations

from kvgrpc.errors import InvalidRequest
from kvgrpc.net import check_advertised, not_dialable, peer_is_local

__all__ = ["check_advertised", "check_events_endpoint", "peer_is_local"]


def check_events_endpoint(endpoint: str, *, field: str, peer_is_local: bool) -> None:
    """Checks a ZMQ endpoint: "tcp://host:port", or "ipc://" and "inproc://" from the registry's own host."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise InvalidRequest.of(field, endpoint, "tcp://host:port, ipc://path or inproc://name")
    if scheme == "tcp":
        check_advertised(rest, field=field, peer_is_local=peer_is_local)
    elif not peer_is_local:
        raise not_dialable(endpoint, "it is local, but the rank is on another host than the registry")
