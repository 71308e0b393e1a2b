"""A process's description of itself: its limits, settings, security, and the versions of what it runs on."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import Any

from kvgrpc.dataplane.base import Bounded, DataPlane
from kvgrpc.errors import InvalidRequest
from kvgrpc.model import RankRef, Role
from kvgrpc.registry.client.registration import Registration
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server.config import KINDS, SECURITY, RankConfig
from kvgrpc.settings import layered
from kvgrpc.transfer.protocol.types import Bounds
from kvgrpc.v1 import server_service_pb2 as pb

_ALWAYS = ("grpcio", "protobuf")
_IF_LOADED = ("torch", "mooncake", "sglang", "vllm", "nixl", "msgspec", "pyzmq")
_DISTRIBUTIONS = {"mooncake": "mooncake-transfer-engine", "pyzmq": "pyzmq"}
_MODULES = {"pyzmq": "zmq"}
_SECRETS = ("token", "storage_config")
_LONGEST_VALUE = 512


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The answer of GetServerInfo. ``registration``: as it is when somebody asks; None: it registers nowhere."""

    version: str
    services: Sequence[str]
    rank: RankRef | None = None
    role: Role | None = None
    limits: pb.ServerLimits = field(default_factory=pb.ServerLimits)
    security: ServerSecurity = field(default_factory=ServerSecurity)
    settings: Sequence[pb.Setting] = ()
    data_plane_endpoints: Sequence[str] = ()
    registration: Callable[[], Registration | None] = lambda: None


def rank_limits(max_frame_bytes: int, bounds: Bounds, plane: DataPlane) -> pb.RankLimits:
    """The bounds of a rank, and of what is on its way to one peer."""
    message = pb.RankLimits(max_frame_bytes=max_frame_bytes)
    for each in fields(Bounds):
        setattr(message, f"max_{each.name}", min(getattr(bounds, each.name), 2**32 - 1))
    if isinstance(plane, Bounded):
        writes, nbytes = plane.limits_of_a_peer
        message.max_peer_writes_in_flight, message.max_peer_bytes_in_flight = writes, min(nbytes, 2**32 - 1)
    return message


def limits_to_pb(limits: CallLimits) -> pb.CallLimits:
    """The bounds of a server's calls."""
    return pb.CallLimits(**{each.name: min(getattr(limits, each.name), 2**32 - 1) for each in fields(CallLimits)})


def settings_in_force(config: RankConfig, environment: Mapping[str, str] | None = None) -> list[pb.Setting]:
    """The settings of a rank with where each comes from, in the order of their names. ``environment``: that of the
    process unless given. A value that environment and file agree with counts as theirs, whoever passed it on."""
    environment = os.environ if environment is None else environment
    file = {name: value for name, value in environment.items() if name == "KVGRPC_CONFIG"}
    layers = (
        (pb.SETTING_SOURCE_ENVIRONMENT, _read({name: text for name, text in environment.items() if name not in file})),
        (pb.SETTING_SOURCE_FILE, _read(file)),
    )
    defaults = _flat(RankConfig(engine="", role=config.role, pools=()))
    found = []
    for name, value in sorted(_flat(config).items()):
        of_layer = (source for source, layer in layers if name in layer and layer[name] == value)
        default = pb.SETTING_SOURCE_DEFAULT if defaults.get(name) == value else pb.SETTING_SOURCE_ENGINE
        source = next(of_layer, default)
        found += [pb.Setting(name=part, value=text, source=source) for part, text in _texts(name, value)]
    return found


def port_security(security: ServerSecurity, certificate_end: float | None) -> pb.PortSecurity:
    """``certificate_end``: Unix seconds; None: there is no certificate."""
    message = pb.PortSecurity(
        tls=security.tls,
        client_certificates=bool(security.client_ca_file),
        tokens=bool(security.tokens or security.token_file),
    )
    if certificate_end is not None:
        message.certificate_end_time.FromNanoseconds(round(certificate_end * 1e9))
    return message


def versions() -> dict[str, str]:
    """Of Python, of what every process needs, and of what else it has loaded."""
    names = (*_ALWAYS, *(name for name in _IF_LOADED if _MODULES.get(name, name) in sys.modules))
    found = {name: _version(_DISTRIBUTIONS.get(name, name)) for name in names}
    return {"python": sys.version.split()[0], **{name: version for name, version in found.items() if version}}


@functools.cache
def _version(distribution: str) -> str:
    """Empty: it is not installed. To find it takes a millisecond, and anybody may ask at any time."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _read(environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Settings of one layer. The rank was opened with others if they cannot be read now."""
    try:
        return layered(KINDS, {}, environment)
    except InvalidRequest:
        return {}


def _flat(config: RankConfig) -> dict[str, Any]:
    """Every setting by its name; TLS and tokens by their flat names."""
    found = {name: getattr(config, name) for name in KINDS if name not in SECURITY and hasattr(config, name)}
    for name, (of_server, of_client) in SECURITY.items():
        security, attribute = (config.client_security, of_client) if of_client else (config.server_security, of_server)
        if name in ("cert_file", "key_file", "insecure"):
            security, attribute = config.server_security, of_server
        found[name] = getattr(security, attribute)
    found["prefetch"] = config.prefetch
    return found


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A line for each part of a table. Neither a secret nor what an engine keeps in memory is told."""
    if name.rpartition(".")[2] in _SECRETS:
        yield name, "set" if value else ""
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _texts(f"{name}.{each.name}", getattr(value, each.name))
    elif value is None or isinstance(value, (str, int, float)):
        text = getattr(value, "name", None) or ("" if value is None else value)
        yield name, str(text)[:_LONGEST_VALUE]
    elif isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
        yield name, ",".join(value)[:_LONGEST_VALUE]
    elif name == "data_plane":
        yield name, value.name
    else:
        yield name, "set"
