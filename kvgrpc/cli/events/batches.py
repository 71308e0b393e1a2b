"""A batch of events as people and programs read it: one line of text or of JSON, whatever engine wrote it."""

from __future__ import annotations

import base64
import json
import math
import time
from typing import Any

from kvgrpc.observability.logging import one_line

_SHOWN_HASHES = 4


def show_batch(sequence: int, payload: bytes, *, as_json: bool, raw: bool = False) -> None:
    """To stdout. ``raw``: as JSON with the payload in base64 instead of the events."""
    line = batch_as_json(sequence, payload, raw) if as_json else one_line(batch_as_text(sequence, payload))
    print(line, flush=True)


def batch_as_json(sequence: int, payload: bytes, raw: bool) -> str:
    moment, rank, listed = read_batch(payload)
    if raw:
        return json.dumps({"sequence": sequence, "rank": rank, "payload": base64.b64encode(payload).decode()})
    return json.dumps({"sequence": sequence, "time": for_json(moment), "rank": rank, "events": for_json(listed)})


def batch_as_text(sequence: int, payload: bytes) -> str:
    moment, _, listed = read_batch(payload)
    return f"{sequence:>8}  {clock_of(moment)}  " + "; ".join(map(event_as_text, listed))


def clock_of(moment: float) -> str:
    """The time of day; dashes where an engine wrote what no clock shows."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--.---"


def event_as_text(event: Any) -> str:
    """Name and hashes of an event."""
    name, hashes = name_and_hashes(event)
    if hashes is None:
        return name
    shown = " ".join(plain(value) if isinstance(value, bytes) else str(value) for value in hashes[:_SHOWN_HASHES])
    return f"{name} {len(hashes)}: {shown}" + (" …" if len(hashes) > _SHOWN_HASHES else "")


def name_and_hashes(event: Any) -> tuple[str, list[Any] | None]:
    """Of an event in either form: a positional array, or a tagged map. None: it has no hashes."""
    name, hashes = (
        (event.get("type", "?"), event.get("block_hashes"))
        if isinstance(event, dict)
        else (event[0], event[1] if len(event) > 1 else None)
        if isinstance(event, list) and event
        else ("?", None)
    )
    return str(name), hashes if isinstance(hashes, list) else None


def read_batch(payload: bytes) -> tuple[float, int | None, list[Any]]:
    """Time, rank and events of a batch of any dialect. A payload that is no batch is one event that says so, and so is
    an event that cannot be read beside others that can."""
    import msgspec

    try:
        moment, listed, *more = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
        rank = msgspec.msgpack.decode(more[0]) if more else None
        events = [read_event(bytes(raw)) for raw in msgspec.msgpack.decode(listed, type=list[msgspec.Raw])]
        return msgspec.msgpack.decode(moment, type=float), rank if isinstance(rank, int) else None, events
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return 0.0, None, [["not a batch", [payload]]]


def read_event(raw: bytes) -> Any:
    """An event as plain values; one of a shape that nobody reads (nested without end, no UTF-8) as its bytes."""
    import msgspec

    try:
        event = msgspec.msgpack.decode(raw)
        for_json(event)
        return event
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return ["not readable", [raw]]


def for_json(value: Any) -> Any:
    """The same in what every JSON parser takes: bytes as hexadecimal text, a number that is none (NaN, inf) as null."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else plain(key): for_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else plain(value)


def plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
