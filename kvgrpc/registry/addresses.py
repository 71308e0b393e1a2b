"""Which addresses may be advertised to a registry, and which a request may make this process dial. No DNS anywhere."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.model import ENGINE_NAME

DEFAULT_PORT = 8998

_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?")
# What the C library would read as an IPv4 address in one of its old spellings: "127.1", "0x7f000001".
_NUMERIC_NAME = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)\.?")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class BootstrapAddress:
    """A registry that a request names, and optionally the engine there. ``host`` is normalised, without brackets."""

    host: str
    port: int
    engine: str = ""

    @property
    def target(self) -> str:
        """What a channel dials: "host:port", IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_bootstrap_addr(text: str) -> BootstrapAddress:
    """Reads "host[:port][/engine]"; the port defaults to 8998.

    IPv6 may come without brackets, as SGLang's prefill writes it: then the last group is the port whenever what is
    left is an address ("fe80::1:8998"). Raises InvalidRequest.
    """
    address, slash, engine = text.strip().partition("/")
    host, port = _split(address)
    normal = _normal_host(host)
    if normal is None or port is None or (slash and not ENGINE_NAME.fullmatch(engine)):
        raise InvalidRequest.of("bootstrap_addr", text, "host[:port][/engine]")
    return BootstrapAddress(normal, port, engine)


class AddressPolicy:
    """What a request may make this process dial: loopback, the configured registries, and what ``allow`` lists.

    ``allow`` holds host names, IP addresses and CIDR networks; ``configured`` registries as "host[:port]", each allowed
    with its port only. Names are compared as names. Immutable; raises InvalidRequest for an entry that is neither.
    """

    def __init__(self, allow: Sequence[str] = (), configured: Sequence[str] = ()) -> None:
        self._names: set[str] = set()
        self._networks: list[_IpNetwork] = []
        for entry in allow:
            self._add(entry.strip())
        parsed = (parse_bootstrap_addr(address) for address in configured if address)
        self._configured = frozenset((address.host, address.port) for address in parsed)

    def check(self, address: BootstrapAddress) -> None:
        """Raises AddressNotAllowed, which names the configuration key ``bootstrap_allow``."""
        if (address.host, address.port) in self._configured or self._allows(address.host):
            return
        raise AddressNotAllowed(
            f"{address.target} may not be dialled: it is neither loopback nor a configured registry. List the host or "
            "its network in bootstrap_allow (KVGRPC_BOOTSTRAP_ALLOW) if it is to be trusted",
            metadata={"address": address.target, "configKey": "bootstrap_allow"},
        )

    def _allows(self, host: str) -> bool:
        ip = _ip(host)
        if ip is None:
            return is_loopback(host) or host in self._names
        return is_loopback(host) or any(ip.version == net.version and ip in net for net in self._networks)

    def _add(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
        except ValueError:
            name = _normal_host(entry)
            if name is None:
                raise InvalidRequest.of(
                    "bootstrap_allow", entry, "a host name, an IP address or a network (CIDR)"
                ) from None
            self._names.add(name)


def check_advertised(address: str, *, field: str, peer_is_local: bool) -> None:
    """Refuses a "host:port" that nobody else could dial.

    Raises InvalidRequest for bad syntax, AddressNotAllowed for a wildcard, and for loopback from another host.
    """
    host, port = _split(address, default_port=None)
    if host in ("", "*") and port is not None:
        raise _not_dialable(address, "a wildcard is no address to dial")
    normal = _normal_host(host)
    bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
    if normal is None or port is None or bare_ipv6:
        raise InvalidRequest.of(field, address, "host:port with a port from 1 to 65535, IPv6 in brackets")
    ip = _ip(normal)
    if ip is not None and ip.is_unspecified:
        raise _not_dialable(address, "a wildcard is no address to dial")
    if is_loopback(normal) and not peer_is_local:
        raise _not_dialable(address, "it is loopback, but the rank is on another host than the registry")


def check_events_endpoint(endpoint: str, *, field: str, peer_is_local: bool) -> None:
    """The same for a ZMQ endpoint: "tcp://host:port", or "ipc://" and "inproc://" from the registry's own host."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise InvalidRequest.of(field, endpoint, "tcp://host:port, ipc://path or inproc://name")
    if scheme == "tcp":
        check_advertised(rest, field=field, peer_is_local=peer_is_local)
    elif not peer_is_local:
        raise _not_dialable(endpoint, "it is local, but the rank is on another host than the registry")


def peer_is_local(peer: str) -> bool:
    """Whether ``ServicerContext.peer()`` names this host: loopback or a UNIX socket. Unknown forms do not."""
    scheme, _, rest = peer.partition(":")
    if scheme == "unix":
        return True
    if scheme not in ("ipv4", "ipv6"):
        return False
    host, _ = _split(urllib.parse.unquote(rest))
    return is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether a normalised host is loopback by its number or name."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _split(address: str, default_port: int | None = DEFAULT_PORT) -> tuple[str, int | None]:
    """Host without brackets, and the port; None for a port that is none."""
    if address.startswith("["):
        host, closing, rest = address[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else rest and "bad"
        # Brackets are for IPv6 only.
        host = host if closing and ":" in host else ""
    elif address.count(":") > 1:
        host, _, port = address.rpartition(":")
        if _ip(host) is None or not _PORT.fullmatch(port):
            host, port = address, ""
    else:
        host, colon, port = address.partition(":")
        port = port if port or not colon else "bad"
    if port == "":
        return host, default_port
    return host, int(port) if _PORT.fullmatch(port) and 0 < int(port) < 65_536 else None


def _normal_host(host: str) -> str | None:
    """Lower case, numbers in their one spelling; None for what is neither a number nor a name."""
    ip = _ip(host)
    if ip is not None:
        return str(ip)
    name = host.lower()
    if not _HOST_NAME.fullmatch(name) or _NUMERIC_NAME.fullmatch(name):
        return None
    return name.rstrip(".")


def _ip(host: str) -> _IpAddress | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else ip


def _not_dialable(address: str, why: str) -> AddressNotAllowed:
    return AddressNotAllowed(
        f"{address} cannot be advertised: {why}. "
        "Set advertise (KVGRPC_ADVERTISE) to a host and port that the other ranks can dial",
        metadata={"address": address, "configKey": "advertise"},
    )
