"""The time that a hand-off may take: SGLang's own variables as the deadlines of a rank. Imports nothing of SGLang."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Role
from kvgrpc.transfer.protocol.types import Timing

logger = logging.getLogger(__name__)

BOOTSTRAP_TIMEOUT = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
WAITING_TIMEOUT = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
# A request that went to a decode which is dead, and which no other decode knows, is given up after so long.
UNNAMED_MS = 10_000
# Prefill answers a second before decode's deadline (Timing.welcome_within): with less it would answer at once.
_SHORTEST, _LONGEST = 2, 86_400
_LONGEST_TEXT = 20


def deadlines(role: Role, configured: dict[str, Any], environment: Mapping[str, str]) -> Timing:
    """The timing of a rank, which the log tells: kvgrpc's own ``timing`` where it is set, else SGLang's variables.

    Raises InvalidRequest for a time that cannot be.
    """
    own = configured.pop("timing", None)
    timing: Timing = own or timing_of(role, environment)
    name = _variable(role)
    source = "default"
    if own is not None:
        source = "timing of kvgrpc's settings" + (f", {name} does not count" if name in environment else "")
    elif name in environment:
        source = name
    seconds = timing.room_deadline * timing.tick_seconds
    logger.info("kvgrpc: %s rooms fail after %g s (%s)", role.name.lower(), seconds, source)
    return timing


def timing_of(role: Role, environment: Mapping[str, str]) -> Timing:
    """SGLang's own backends wait so long: prefill for decode's pages, decode for prefill's bytes.

    Prefill waits with decode for the request of its own half, never for longer than that decode says it waits.
    Raises InvalidRequest for a time that cannot be, where SGLang would warn and take 300 s.
    """
    default = Timing()
    waiting = _ticks(environment, WAITING_TIMEOUT, default)
    if role is Role.DECODE:
        return Timing(room_deadline=waiting)
    bootstrap = _ticks(environment, BOOTSTRAP_TIMEOUT, default)
    # SGLang's routers ask both sides at once, and decode names a request as soon as its scheduler has it.
    return Timing(
        room_deadline=bootstrap, unclaimed=waiting, unnamed_after_loss=min(bootstrap, default.ticks(UNNAMED_MS))
    )


def _variable(role: Role) -> str:
    return BOOTSTRAP_TIMEOUT if role is Role.PREFILL else WAITING_TIMEOUT


def _ticks(environment: Mapping[str, str], name: str, default: Timing) -> int:
    text = environment.get(name)
    if text is None:
        return default.room_deadline
    try:
        seconds = int(text) if len(text) <= _LONGEST_TEXT else 0
    except ValueError:
        seconds = 0
    if not _SHORTEST <= seconds <= _LONGEST:
        rule = f"a whole number of seconds, {_SHORTEST} to {_LONGEST}"
        raise InvalidRequest.of(name, text[:_LONGEST_TEXT], rule)
    return default.ticks(seconds * 1000)
