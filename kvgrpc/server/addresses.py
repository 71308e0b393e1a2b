"""What a rank tells its peers to dial, from where it listens and what it advertises. IPv6 with and without brackets."""

from __future__ import annotations


def advertised(bound: str, advertise: str) -> str:
    """What peers dial: the advertised host with the bound port, unless the advertised one names its own."""
    if not advertise:
        return bound
    host, port = split(advertise)
    return f"[{host}]:{port or split(bound)[1]}" if ":" in host else f"{host}:{port or split(bound)[1]}"


def split(address: str) -> tuple[str, str]:
    """Host without brackets, and port; no port in "fd00::5", where the last group is a part of the address."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port
