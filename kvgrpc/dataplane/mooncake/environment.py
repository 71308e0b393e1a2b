"""The variables that Mooncake reads from the environment, and those with which this data plane refuses to start.

Mooncake reads its variables while it is imported and while an engine is made. Most only tune it; some change what
"done" means, outlast our own deadlines, or end the process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from kvgrpc.errors import Violation
from kvgrpc.model import raise_if

logger = logging.getLogger(__name__)

DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    # The engine's own 1,024 make it fail, and sometimes stay failed, with 2,048 descriptors in flight to a peer.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    # Below the transfer time-out, so that a write to a hung peer ends by losing its connection.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
    # Not MC_TE_METADATA_REFRESH_INTERVAL_SECONDS: it asks every peer that ever was, dead ones too, with a line on
    # stderr each time. MooncakeDataPlane gives a new process on an old port a new name instead.
}
# Variable -> the only values that it may have.
_ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "MC_TCP_PROTO": (("2",), "a write would count as done while its bytes are on their way"),
    "MC_TCP_ENABLE_CONNECTION_POOL": (("1", "true", "on"), "each write would make a connection of its own"),
    "MC_USE_TENT": (("0", "false", "off", ""), "that is another engine, whose outcomes mean something else"),
    "MC_USE_TEV1": (("0", "false", "off", ""), "that is another engine, whose outcomes mean something else"),
    "MC_SLICE_TIMEOUT": (("0", "-1"), "it gives up writes that still go on"),
}
# Variable -> least, most. Whole numbers; a submission is given up after 45 s, so that every write must end before.
_BETWEEN: dict[str, tuple[int, int]] = {
    "MC_TRANSFER_TIMEOUT": (5, 40),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": (1, 39),
    "MC_TCP_STATUS_TIMEOUT_SEC": (1, 40),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": (1, 40),
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": (4_096, 1 << 30),
    "MC_TCP_LANES_PER_PEER": (1, 16),
    "MC_MIN_RPC_PORT": (1, 65_535),
    "MC_MAX_RPC_PORT": (1, 65_535),
}
_ABORTS = "MC_LOG_DIR"
_PORTS = "15000", "17000"


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises InvalidRequest for a variable that would break a promise of the data plane."""
    violations = [
        Violation(name, f"left out, or {' or '.join(filter(None, values))}: {why}", environment[name])
        for name, (values, why) in _ONLY.items()
        if name in environment and environment[name].strip().lower() not in values
    ]
    for name, (least, most) in _BETWEEN.items():
        if name in environment and not least <= _whole(environment[name]) <= most:
            violations.append(Violation(name, f"a whole number from {least} to {most}", environment[name]))
    raise_if(violations)
    _check_below(environment, "MC_TCP_PROGRESS_TIMEOUT_SEC", DEFAULTS, "MC_TRANSFER_TIMEOUT", least_apart=1)
    lowest, highest = _PORTS
    ports = {"MC_MIN_RPC_PORT": lowest, "MC_MAX_RPC_PORT": highest}
    _check_below(environment, "MC_MIN_RPC_PORT", ports, "MC_MAX_RPC_PORT", least_apart=1)


def prepare_environment(host: str) -> None:
    """Sets our defaults in this process, where nothing is set. Raises what ``check_environment`` raises."""
    check_environment(os.environ)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if ":" in host:
        os.environ.setdefault("MC_USE_IPV6", "1")
    if os.environ.pop(_ABORTS, None) is not None:
        logger.warning("%s was removed from the environment: Mooncake aborts the process when it is set", _ABORTS)


def for_a_process_of_ours(environment: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that runs nothing but Mooncake: without the variables that would be refused."""
    kept = {name: value for name, value in environment.items() if name != _ABORTS and name not in _ONLY}
    return {**defaults, **kept}


def ports() -> tuple[int, int]:
    """The lowest and the highest port that an engine takes."""
    lowest, highest = _PORTS
    return int(os.environ.get("MC_MIN_RPC_PORT", lowest)), int(os.environ.get("MC_MAX_RPC_PORT", highest))


def _whole(text: str) -> int:
    return int(text) if text.strip().isdecimal() else -1


def _check_below(
    environment: Mapping[str, str], low: str, defaults: Mapping[str, str], high: str, *, least_apart: int
) -> None:
    below, above = (int(environment.get(name, defaults[name])) for name in (low, high))
    if below + least_apart > above:
        name = low if low in environment else high
        raise_if([Violation(name, f"such that {low} is below {high} = {above}", environment[name])])
