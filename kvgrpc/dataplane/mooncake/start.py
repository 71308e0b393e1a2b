"""Starts a Mooncake engine so that it runs the transport that was asked for, or not at all.

Mooncake ignores its ``protocol`` argument, reads its settings from the environment while it is imported and while an
engine is made, and ends the process over some of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kvgrpc.dataplane.mooncake.connections import LISTEN, read_table
from kvgrpc.dataplane.mooncake.environment import check_environment, ports, prepare_environment
from kvgrpc.dataplane.mooncake.glog import quiet
from kvgrpc.dataplane.shm.process import socket_inodes
from kvgrpc.errors import FeatureDisabled

logger = logging.getLogger(__name__)

LOWEST_VERSION = (0, 3, 12)
PACKAGES = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
)
_INSTALL = "pip install 'kvgrpc[mooncake-cpu]' (or 'kvgrpc[mooncake]' with CUDA)"
_LIBRARIES = "apt-get install libibverbs1 libnuma1 libcurl4"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that runs. ``session``: what peers call it; ``data_ports``: where their bytes arrive (TCP only)."""

    engine: Any
    session: str
    transport: str
    data_ports: frozenset[int]


def start_engine(load: Callable[[], type[Any]], host: str, device: str) -> StartedEngine:
    """Starts an engine that peers reach at ``host``; ``load`` imports its class.

    ``device``: "" (the host channel adapters of the machine, or TCP where it has none), "tcp", or names of adapters
    with commas. Raises FeatureDisabled with the remedy, InvalidRequest for a variable
    of the environment, ValueError for a host or a device that cannot be.
    """
    name = _session_host(host)
    with _starting:
        prepare_environment(host)
        _check_versions()
        kind = _loaded(load)
        engine = kind()
        transport, adapters = _choose(_adapters(engine), device)
        before = _listening()
        with _forced(transport), quiet():
            code = engine.initialize(name, "P2PHANDSHAKE", transport, ",".join(adapters))
        if code != 0:
            # Once more, so that it says why.
            engine = kind()
            with _forced(transport):
                code = engine.initialize(name, "P2PHANDSHAKE", transport, ",".join(adapters))
        if code != 0:
            what = f"Mooncake did not start on {host} over {transport} (initialize returned {code})"
            raise _disabled(what, "is the host one of this machine, and a port from 15000 to 17000 free?")
        rpc_port = engine.get_rpc_port()
        data_ports = _listening() - before - {rpc_port}
    if transport == "tcp" and not data_ports:
        raise _disabled("Mooncake opened no TCP data port although TCP was forced", "unset MC_FORCE_HCA")
    _warn_of_ports(rpc_port, data_ports)
    return StartedEngine(engine, f"{name}:{rpc_port}", transport, data_ports if transport == "tcp" else frozenset())


def adopt_engine(engine: Any, host: str) -> StartedEngine:
    """Takes over an engine that the caller initialised; one that was not initialised ends the process.

    Raises ValueError for what is no engine, InvalidRequest for a variable of the environment that it was made with.
    """
    missing = [each for each in ("transfer_submit_write", "transfer_check_status") if not hasattr(engine, each)]
    if missing:
        raise ValueError(f"not a mooncake.engine.TransferEngine: {', '.join(missing)} missing")
    _check_versions()
    check_environment(os.environ)
    rpc_port = engine.get_rpc_port()
    data_ports = _listening() - {rpc_port}
    transport = "tcp" if data_ports else "rdma"
    return StartedEngine(engine, f"{_session_host(host)}:{rpc_port}", transport, data_ports)


def _warn_of_ports(rpc_port: int, data_ports: frozenset[int] | set[int]) -> None:
    """It has no setting that binds them to one address, and proves nobody."""
    data = ", ".join(map(str, sorted(data_ports))) or "none"
    logger.warning(
        "Mooncake listens on every address of this host: port %d (handshakes), data ports %s. Whoever reaches them "
        "reads and writes all registered memory, or ends this process: let engines only through (docs/security.md)",
        rpc_port,
        data,
    )


def _session_host(host: str) -> str:
    """The host as Mooncake writes it: IPv6 in brackets. Raises ValueError for what no peer can reach."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"host {host!r} is neither an IP address nor a name (without port)") from None
        return host
    if address.is_unspecified:
        raise ValueError(f"host {host!r} is no address that a peer can reach: name one of this machine")
    return f"[{address}]" if address.version == 6 else str(address)


def _check_versions() -> None:
    """Older engines check no addresses: a peer could write anywhere in this process."""
    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < LOWEST_VERSION:
            lowest = ".".join(map(str, LOWEST_VERSION))
            raise _disabled(f"{package} {version} does not check addresses, {lowest} is needed", _INSTALL)


def _loaded(load: Callable[[], type[Any]]) -> type[Any]:
    try:
        engine = load()
    except ModuleNotFoundError as error:
        raise _disabled(f"data plane 'mooncake' needs Mooncake ({error})", _INSTALL) from error
    except ImportError as error:
        raise _disabled(f"Mooncake is installed but cannot be loaded ({error})", _LIBRARIES) from error
    # Built from source there may be no package; locations came with the address checks.
    if "location" not in (getattr(engine, "register_memory", None).__doc__ or ""):
        raise _disabled("this Mooncake is too old, 0.3.12 is needed", _INSTALL)
    return engine


def _disabled(what: str, remedy: str) -> FeatureDisabled:
    return FeatureDisabled(f"{what}: {remedy}", metadata={"feature": "dataplane.mooncake", "howToEnable": remedy})


def _adapters(engine: Any) -> list[str]:
    """Names of the host channel adapters here. Asking Mooncake takes a second, so the kernel is asked first."""
    if not _has_adapters():
        return []
    try:
        topology = json.loads(engine.get_local_topology() or "{}")
        names = {name for lists in topology.values() for names in lists for name in names}
    except (ValueError, AttributeError, TypeError) as error:
        logger.warning("Mooncake's topology was not understood (%s): no adapters assumed", error)
        return []
    return sorted(names)


def _has_adapters() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def _choose(adapters: list[str], device: str) -> tuple[str, list[str]]:
    """The transport and the adapters to use. Raises ValueError for an adapter that is not there."""
    if device == "tcp" or (not device and (not adapters or os.environ.get("MC_FORCE_TCP"))):
        return "tcp", []
    asked = [name.strip() for name in device.split(",") if name.strip()]
    if missing := sorted(set(asked) - set(adapters)):
        here = ", ".join(adapters) or "none (set device to tcp, KVGRPC_DEVICE=tcp)"
        raise ValueError(f"no adapter {', '.join(missing)} here, only: {here}")
    return "rdma", asked


@contextlib.contextmanager
def _forced(transport: str) -> Iterator[None]:
    """Mooncake looks at these two while an engine starts; others that start later in this process are not ours."""
    name = "MC_FORCE_TCP" if transport == "tcp" else "MC_FORCE_HCA"
    before = {each: os.environ.pop(each, None) for each in ("MC_FORCE_TCP", "MC_FORCE_HCA")}
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({each: value for each, value in before.items() if value is not None})


def _listening() -> frozenset[int]:
    """Ports on which this process listens, of those that Mooncake chooses from."""
    lowest, highest = ports()
    inodes = socket_inodes(os.getpid()) or frozenset()
    listening = {each.local[1] for each in read_table() if each.state == LISTEN and each.inode in inodes}
    return frozenset(port for port in listening if lowest <= port <= highest)
