"""The names of a server: the targets of the tokens that it takes."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from kvgrpc.net import is_local, is_loopback, is_unix, is_wildcard, peer_is_local, split, target_of

_LINK_LOCAL = ("169.254.", "fe8", "fe9", "fea", "feb")


class Audiences:
    """The addresses by which clients dial one server: what it bound, what it advertises, what it was told.

    One that binds a wildcard is called by every number of its host, with its port, but for link-local ones, which every
    network has. A loopback address or a Unix socket is one of many hosts: it counts for callers of this host alone.
    """

    def __init__(self, configured: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._wildcard_ports: set[str] = set()
        for address in configured:
            self.add(address)

    def __str__(self) -> str:
        wild = [f"any address of this host, port {port}" for port in sorted(self._wildcard_ports)]
        return ", ".join([*sorted(self._names), *wild]) or "nothing"

    def add(self, address: str) -> None:
        """An address that was bound, is advertised or was configured."""
        host, port = split(address)
        if not is_unix(address) and is_wildcard(host):
            self._wildcard_ports.add(port)
        else:
            self._names.add(target_of(address))

    def include(self, target: str, peer: str) -> bool:
        """True if a token for ``target`` is meant for this server; ``peer``: ``ServicerContext.peer()``."""
        if is_local(target) and not peer_is_local(peer):
            return False
        if target in self._names:
            return True
        host, port = split(target)
        return not is_unix(target) and port in self._wildcard_ports and _is_of_this_host(host)


def _is_of_this_host(host: str) -> bool:
    """True if a number is one of ours: only then can it be bound. No name is, however it resolves."""
    if host == "localhost" or is_loopback(host):
        return True
    if host.lower().startswith(_LINK_LOCAL):
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        raw = socket.inet_pton(family, host)
    except (OSError, ValueError):
        return False
    if not any(raw):
        return False  # the wildcard itself is nobody's address
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
