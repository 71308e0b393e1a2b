"""The hostile payloads that are kept: bytes, and what a reader makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

GOLDEN = Path(__file__).parents[1] / "conformance" / "events"


class Hostile(NamedTuple):
    """``events``: the kinds of the events that are read, in order; None: it is no batch."""

    name: str
    payload: bytes
    events: tuple[str, ...] | None


def hostile() -> list[Hostile]:
    """Those of hostile.json. A payload is written as parts, each hex digits and how often they come."""
    cases = json.loads((GOLDEN / "hostile.json").read_text())
    return [
        Hostile(name, payload_of(case["parts"]), None if case["events"] is None else tuple(case["events"]))
        for name, case in cases.items()
    ]


def payload_of(parts: list[list[str | int]]) -> bytes:
    return b"".join(bytes.fromhex(str(digits)) * int(times) for digits, times in parts)
