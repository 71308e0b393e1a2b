"""Addresses and names of engines, as every adapter writes them. Pure."""

from __future__ import annotations

import re

from kvgrpc.net import check_listen, joined, split

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def engine_name(address: str) -> str:
    """A stable name of the engine at "host:port" or "host-port", of the characters that names may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", address.replace("[", "").replace("]", ""))[-128:]


def registry_of(bootstrap_addr: str, external: str) -> str:
    """The registry that decode asks for the prefill engine of a request: there, or the external one by its name."""
    return f"{external}/{engine_name(bootstrap_addr)}" if external else bootstrap_addr


def is_wildcard(host: str) -> bool:
    return host in _WILDCARDS


def loopback_for(host: str) -> str:
    """An address by which this machine reaches what listens on ``host``."""
    return _WILDCARDS.get(host, host)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def for_rank(listen: str, dp: int, field: str = "events_listen") -> str:
    """Each dp rank has its own port: that of dp 0 plus dp, unless any free one is asked for. Raises InvalidRequest."""
    check_listen(listen, field, unix=not dp)
    host, port = split(listen)
    if port == "0" or not dp:
        return listen
    return check_listen(joined(host, int(port) + dp), field)
