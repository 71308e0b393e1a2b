"""The ZMQ endpoint of a data-parallel rank, which it binds or connects to. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from kvgrpc.net import joined, split_with_port

WILDCARD_HOSTS = ("*", "::", "0.0.0.0")
FREE_PORTS = ("0", "*")
# Of what subscribers and askers send us, which is a topic or a number: ZMQ makes room for what a frame says that it
# has, before a byte of it came, and asks nobody who they are.
LARGEST_QUESTION = 64 * 1024
# What libzmq takes to connect to; it refuses the rest only then.
_REACHED = re.compile(r"[0-9A-Za-z\[:][0-9A-Za-z.:%;_\[\]-]*")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint for a PUB socket, to bind or to connect to."""

    address: str
    bind: bool
    ipv6: bool = False


def endpoint_of(endpoint: str, dp: int, bind: bool | None = None) -> Endpoint:
    """The endpoint of rank ``dp``: tcp adds dp to the port unless any free one is asked for, others append ``_dpN``.

    ``bind`` None: wildcard hosts, free ports, ipc and inproc bind, a concrete address connects. Raises ValueError for
    what is no endpoint.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise ValueError(f"endpoint {endpoint!r}: must be tcp://host:port, ipc://path or inproc://name")
    if scheme == "tcp":
        return _tcp(endpoint, rest, dp, bind)
    suffix = f"_dp{dp}" if dp and rest != "*" else ""
    return Endpoint(f"{scheme}://{rest}{suffix}", bind is not False)


def _tcp(endpoint: str, rest: str, dp: int, bind: bool | None) -> Endpoint:
    host, port = split_with_port(rest)
    if not host or not (port in FREE_PORTS or (port.isascii() and port.isdigit())):
        raise ValueError(f"endpoint {endpoint!r}: must be tcp://host:port, and the port a number or *")
    if port not in FREE_PORTS:
        port = str(int(port) + dp)
        if int(port) > 65535:
            raise ValueError(f"endpoint {endpoint!r}: the port of dp {dp} would be {port}")
    anywhere = host in WILDCARD_HOSTS or port in FREE_PORTS
    if bind is False and anywhere:
        raise ValueError(f"endpoint {endpoint!r}: nothing to connect to, and bind is false")
    return Endpoint(f"tcp://{joined(host, port)}", anywhere if bind is None else bind, ipv6=":" in host)


def check_reached(endpoint: str) -> Endpoint:
    """An endpoint that others bound, to connect to. Raises ValueError for what is none."""
    reached = endpoint_of(endpoint, 0, bind=False)
    if endpoint.startswith("tcp://") and not _REACHED.fullmatch(endpoint.removeprefix("tcp://")):
        raise ValueError(f"endpoint {endpoint!r}: must be tcp://host:port, the host of ASCII letters, digits, . - _ :")
    return reached


def check_apart(pub: str | None, replay: str | None) -> None:
    """Raises ValueError when PUB and ROUTER would be bound to one address."""
    if pub is not None and pub == replay and split_with_port(pub)[1] not in FREE_PORTS:
        raise ValueError(f"replay_endpoint {replay!r}: must be another than endpoint, by as many ports as there are dp")


def is_open_to_others(address: str) -> bool:
    """True if other hosts reach what is bound there."""
    if not address.startswith("tcp://"):
        return False
    host = split_with_port(address.removeprefix("tcp://"))[0]
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        # "*", or the name of an interface or a host.
        return True


def on_this_host(address: str) -> str:
    """Returns how another process of this host connects to a bound address; empty: it cannot."""
    if not address.startswith("tcp://"):
        return address if address.startswith("ipc://") else ""
    host, port = split_with_port(address.removeprefix("tcp://"))
    local = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"tcp://{joined(local, port)}"
