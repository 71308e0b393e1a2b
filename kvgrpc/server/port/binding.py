"""Binds listen addresses so that one address is one server: the library alone lets two share some of them."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import grpc

from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import is_unix, joined, port_of, split, unix_path

_UNIX_MODE = 0o600


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """Binds "host:port" or "unix:/path"; the address with the port that was taken for port 0.

    Looks names up (the library does so too). Raises AddressNotAllowed for an address that is taken or not of this host.
    """
    path = unix_path(address)
    if _somebody_listens(path) if path else not _all_free(address):
        raise _taken(address)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise _unusable(address, path) if path else _taken(address)
    if path:
        os.chmod(path, _UNIX_MODE)
    return address if is_unix(address) else joined(split(address)[0], port)


def _somebody_listens(path: str) -> bool:
    """The library replaces the file of a Unix socket without asking: so_reuseport does not guard it."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue of connections is full
        except OSError:
            return False
    return True


def _all_free(address: str) -> bool:
    """A name may have several addresses ("localhost" has), and the library is content when one of them is free.

    It also takes a port above 65535 for another one. Unix sockets in the abstract namespace pass.
    """
    if is_unix(address):
        return True
    host, text = split(address)
    port = port_of(text, lowest=0)
    if port is None:
        return False
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(_is_free(family, where) for family, _, _, _, where in found)


def _is_free(family: int, where: Any) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # an address family that this host does not have: nobody can listen there
    with probe:
        # As the library does it: ports of connections that have ended are free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(where)
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
    return True


def _unusable(address: str, path: str) -> AddressNotAllowed:
    """The library writes to stderr why a file cannot be a socket, and does not say it."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(path)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            why = "it is a directory" if os.path.isdir(path) else why  # "Address already in use" means a socket
        else:
            os.unlink(path)
            why = "the library refused it"
    return AddressNotAllowed(
        f"cannot listen on {address}: {why}; name a file in a folder that this process may write to",
        metadata={"address": address, "configKey": "listen"},
    )


def _taken(address: str) -> AddressNotAllowed:
    return AddressNotAllowed(
        f"cannot listen on {address}: it is taken, or not an address of this host; port 0 takes a free one",
        metadata={"address": address, "configKey": "listen"},
    )
