"""Hosts and ports: the one parser of addresses, and which may be advertised and dialled. Pure: no DNS anywhere."""

from __future__ import annotations

import functools
import ipaddress
import re
import secrets
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.model import ENGINE_NAME

DEFAULT_PORT = 8998

_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_UNIX = ("unix:", "unix-abstract:")
# A socket of ours in the abstract namespace, between a port and a server behind it: "…/RANDOM/ipv4:host:port".
_PASSED_ON = "kvgrpc-passed-on/"
_WILDCARDS = ("", "*", "0.0.0.0", "::")
_LONGEST_HOST = 253  # characters; what DNS allows
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?")
# What the C library would read as an IPv4 address in one of its old spellings: "127.1", "0x7f000001".
_NUMERIC_NAME = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)\.?")
_PORT = re.compile(r"[0-9]{1,5}")


def split(address: str) -> tuple[str, str]:
    """Host without brackets, and port; no port in "fd00::5", where the last group is a part of the address."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def split_with_port(address: str) -> tuple[str, str]:
    """Splits an address whose port is always there: of IPv6 without brackets (":::5557") the last group is the port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def joined(host: str, port: int | str) -> str:
    """ "host:port", with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_of(text: str, lowest: int = 1) -> int | None:
    """The number of a port from ``lowest`` to 65535; None for anything else."""
    number = int(text) if _PORT.fullmatch(text) else -1
    return number if lowest <= number < 65_536 else None


def is_unix(address: str) -> bool:
    """True if it is a Unix socket: "unix:/path", "unix-abstract:name"."""
    return address.startswith(_UNIX)


def unix_path(address: str) -> str:
    """The file of "unix:path" or "unix:///path"; empty for any other address."""
    if not address.startswith("unix:"):
        return ""
    path = address.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("//") else path


def is_wildcard(host: str) -> bool:
    """True if binding it means every address of this host."""
    return host in _WILDCARDS


def is_local(address: str) -> bool:
    """True if only this host reaches "host:port" or "unix:/path". Wildcards and unknown names are not local."""
    if is_unix(address):
        return True
    host = split(address)[0]
    return host == "localhost" or is_loopback(host)


def check_target(address: object, field: str = "address") -> str:
    """Returns what a client is to dial: "host:port" with a port from 1 to 65535, or a Unix socket. Raises
    InvalidRequest."""
    if isinstance(address, str):
        if is_unix(address) and len(address) > len("unix:"):
            return address
        host, port = split(address)
        brackets = address.startswith("[") == (":" in host)
        if host and brackets and _normal_host(host) is not None and port_of(port) is not None:
            return address
    raise InvalidRequest.of(
        field, address, "host:port with a port from 1 to 65535, IPv6 in brackets, or unix:/path of a socket"
    )


def check_listen(address: object, field: str = "listen", *, unix: bool = True) -> str:
    """Returns what a server is to bind: "host:port", port 0 for a free one, or a Unix socket. Raises InvalidRequest."""
    if isinstance(address, str) and unix and is_unix(address):
        return address
    if isinstance(address, str) and port_of(split(address)[1], lowest=0) is not None:
        return address
    rule = "host:port with a port from 0 to 65535, IPv6 in brackets"
    raise InvalidRequest.of(field, address, f"{rule}, or unix:/path" if unix else rule)


def target_of(address: str) -> str:
    """Returns what a token names that is sent to ``address``: the address in its one spelling (docs/tokens.md,
    target)."""
    path = unix_path(address)
    if path or is_unix(address):
        return f"unix:{path}" if path else address
    host, port = split_with_port(address)
    number = port_of(port, lowest=0)
    return joined(_normal_host(host) or host, port if number is None else number)


def advertised(bound: str, advertise: str) -> str:
    """Returns what peers dial: the advertised host with the bound port, unless the advertised one names its own."""
    if not advertise:
        return bound
    host, port = split(advertise)
    return joined(host, port or split(bound)[1])


def caller_address(peer: str) -> str:
    """ "host:port" of ServicerContext.peer(), IPv6 in brackets; "unix:…" and what is not known stay as they are.

    Where a port of ours passed the connection on, it is who came to that port.
    """
    scheme, _, address = _who_came(peer).partition(":")
    return urllib.parse.unquote(address) if scheme in ("ipv4", "ipv6") else peer


def socket_passing_on(host: str, port: int) -> str:
    """Address of a new Unix socket over which a server behind a port of ours sees who came to that port."""
    family = "ipv6" if ":" in host else "ipv4"
    return f"\0{_PASSED_ON}{secrets.token_hex(8)}/{family}:{joined(host, port)}"


def _who_came(peer: str) -> str:
    passed_on = peer.removeprefix(f"unix-abstract:{_PASSED_ON}")
    return peer if passed_on == peer else passed_on.partition("/")[2]


@dataclass(frozen=True, slots=True)
class BootstrapAddress:
    """A registry that a request names, and optionally the engine there. ``host`` is normalised, without brackets."""

    host: str
    port: int
    engine: str = ""

    @property
    def target(self) -> str:
        """The address that a channel dials: "host:port", IPv6 in brackets."""
        return joined(self.host, self.port)


def parse_bootstrap_addr(text: str) -> BootstrapAddress:
    """Reads "host[:port][/engine]"; the port defaults to 8998.

    IPv6 may come without brackets, as SGLang's prefill writes it: then the last group is the port whenever what is
    left is an address ("fe80::1:8998"). Raises InvalidRequest.
    """
    address, slash, engine = text.strip().partition("/")
    host, port = _with_default_port(address)
    normal = _normal_host(host)
    if normal is None or port is None or (slash and not ENGINE_NAME.fullmatch(engine)):
        raise InvalidRequest.of("bootstrap_addr", text, "host[:port][/engine]")
    return BootstrapAddress(normal, port, engine)


def replicas(text: str) -> list[str]:
    """Reads "host[:port]", or several replicas of a registry with commas between them. Raises InvalidRequest."""
    return [parse_bootstrap_addr(address).target for address in text.split(",")]


class AddressPolicy:
    """Addresses that a request may have dialled: loopback, the configured registries, and what ``allow`` lists.

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

    def trusts(self, target: str) -> bool:
        """True if "host:port" was configured or listed: loopback by itself is only what a request named."""
        address = parse_bootstrap_addr(target)
        return (address.host, address.port) in self._configured or self._lists(address.host)

    def _allows(self, host: str) -> bool:
        return is_loopback(host) or self._lists(host)

    def _lists(self, host: str) -> bool:
        ip = _ip(host)
        if ip is None:
            return host in self._names
        return any(ip.version == net.version and ip in net for net in self._networks)

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
    host, port = _with_default_port(address, default_port=None)
    if host in ("", "*") and port is not None and not address.startswith("["):
        raise not_dialable(address, "a wildcard is no address to dial")
    normal = _normal_host(host)
    bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
    if normal is None or port is None or bare_ipv6:
        raise InvalidRequest.of(field, address, "host:port with a port from 1 to 65535, IPv6 in brackets")
    ip = _ip(normal)
    if ip is not None and ip.is_unspecified:
        raise not_dialable(address, "a wildcard is no address to dial")
    if is_loopback(normal) and not peer_is_local:
        raise not_dialable(address, "it is loopback, but the rank is on another host than the registry")


def not_dialable(address: str, why: str) -> AddressNotAllowed:
    """The refusal of an address that others could not dial."""
    return AddressNotAllowed(
        f"{address} cannot be advertised: {why}. "
        "Set advertise (KVGRPC_ADVERTISE) to a host and port that the other ranks can dial",
        metadata={"address": address, "configKey": "advertise"},
    )


def peer_is_local(peer: str) -> bool:
    """True if ``ServicerContext.peer()`` names this host: loopback or a UNIX socket. Unknown forms do not."""
    came = _who_came(peer)
    return came.startswith("unix:") or (came.startswith(("ipv4:", "ipv6:")) and is_local(caller_address(came)))


def is_loopback(host: str) -> bool:
    """True if a normalised host is loopback by its number or name."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _with_default_port(address: str, default_port: int | None = DEFAULT_PORT) -> tuple[str, int | None]:
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
    return host, port_of(port)


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
    return _parsed_ip(host) if len(host) <= _LONGEST_HOST else None  # what a peer says must not fill the cache


@functools.lru_cache(maxsize=4_096)  # a quarter of what a registration costs, and ranks share their hosts
def _parsed_ip(host: str) -> _IpAddress | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else ip
