"""Things that a forked child must not keep: the sockets of its parent's ranks.

A death is proven by a refused dial and by connections that ended (session.md rule 4, proof of death; rule 8, pages by
evidence). A child that has copies of the sockets keeps the port listening and the connections open after its parent
died. It cannot use them: what kvgrpc opened before a fork refuses to work in the child. Others' sockets stay.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable

Endpoint = tuple[str, int]
ANY_HOST = ""


def listens(owner: object, ports: Iterable[int]) -> None:
    """``owner``, while it lives, listens on these ports of this host: they and what was accepted there are its own."""
    _listening[owner] = frozenset(ports)


def dials(owner: object, endpoints: Iterable[Endpoint]) -> None:
    """``owner``, while it lives, has connections to these addresses (IP, port); ``ANY_HOST``: to the port, anywhere."""
    _dialled[owner] = frozenset(endpoints)


def _close_in_child() -> None:
    listening = frozenset(port for ports in _listening.values() for port in ports)
    dialled = frozenset(endpoint for endpoints in _dialled.values() for endpoint in endpoints)
    _listening.clear()
    _dialled.clear()
    if listening or dialled:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _sockets():
            if _is_ours(descriptor, listening, dialled):
                # Not closed: gRPC's and Mooncake's objects still have the number, which must not be another file's.
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def _sockets() -> list[int]:
    found: list[int] = []
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:  # that of the listing itself
            continue
    return found


def _is_ours(descriptor: int, listening: frozenset[int], dialled: frozenset[Endpoint]) -> bool:
    with socket.socket(fileno=descriptor) as one:
        try:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return False
            if one.getsockname()[1] in listening:
                return True
            host, port = one.getpeername()[:2]
            return (host.removeprefix("::ffff:"), port) in dialled or (ANY_HOST, port) in dialled
        except OSError:  # not connected
            return False
        finally:
            one.detach()


_listening: weakref.WeakKeyDictionary[object, frozenset[int]] = weakref.WeakKeyDictionary()
_dialled: weakref.WeakKeyDictionary[object, frozenset[Endpoint]] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_close_in_child)
