"""Says how deep a payload nests: counted, so that it is the same on any stack, and not where recursion ends. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgspec

# Of a value within its event, which is 0. Events are four deep; readers of all languages take what nests to here.
DEEPEST = 500

# Bytes that follow a header, and the bytes of the number that says how many more, or how many values.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_EXTENSIONS = (0xC7, 0xC8, 0xC9)
_NUMBERS = {1: ">B", 2: ">H", 4: ">I"}


def holds_deeper(value: Any, depth: int) -> bool:
    """True if a decoded value, which lies at ``depth`` of its event, holds one below DEEPEST."""
    level = [value]
    while level and depth <= DEEPEST:
        level = [inner for each in level if isinstance(each, list | tuple | dict) for inner in _within(each)]
        depth += 1
    return bool(level)


def nests_deeper(raw: bytes) -> bool:
    """True if an event, as it was written, holds a value below DEEPEST. Raises msgspec.DecodeError where it ends too
    early."""
    at, left = 0, [1]
    while left:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        if len(left) - 1 > DEEPEST:
            return True
        at, values = _header(raw, at)
        left.append(values)
    return False


def split(payload: bytes) -> tuple[float, list[bytes], list[bytes]]:
    """Time, events and what follows of a batch, however deep they nest.

    Raises msgspec.DecodeError for what is no batch.
    """
    at, parts = _list_header(payload, 0)
    if parts < 2:
        raise msgspec.DecodeError("a batch has a time and events")
    end = _end_of(payload, at)
    ts: float = msgspec.msgpack.decode(payload[at:end], type=float)
    at, count = _list_header(payload, end)
    values = []
    for _ in range(count + parts - 2):
        end = _end_of(payload, at)
        values.append(payload[at:end])
        at = end
    if at != len(payload):
        raise msgspec.DecodeError("bytes behind the batch")
    return ts, values[:count], values[count:]


def _within(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterable[Any]:
    return (*value, *value.values()) if isinstance(value, dict) else value


def _end_of(payload: bytes, at: int) -> int:
    """Returns where the value that begins at ``at`` ends."""
    left = 1
    while left:
        at, values = _header(payload, at)
        left += values - 1
        if left > len(payload) - at:  # each value has at least one byte
            raise msgspec.DecodeError("it ends too early")
    return at


def _list_header(payload: bytes, at: int) -> tuple[int, int]:
    code = payload[at] if at < len(payload) else 0
    if not (0x90 <= code <= 0x9F or code in _LISTS):
        raise msgspec.DecodeError("a list was expected")
    return _header(payload, at)


def _header(payload: bytes, at: int) -> tuple[int, int]:
    """Returns where the values behind a header and its own bytes begin, and how many they are."""
    if at >= len(payload):
        raise msgspec.DecodeError("it ends too early")
    code, size, values = payload[at], 0, 0
    at += 1
    if code <= 0x7F or code >= 0xE0:
        return at, 0
    if code <= 0x8F:
        return at, 2 * (code & 0x0F)
    if code <= 0x9F:
        return at, code & 0x0F
    if code <= 0xBF:
        size = code & 0x1F
    elif code in _FIXED:
        size = _FIXED[code]
    elif (width := _SIZED.get(code) or _LISTS.get(code) or _MAPS.get(code)) is not None:
        if at + width > len(payload):
            raise msgspec.DecodeError("it ends too early")
        (number,) = struct.unpack_from(_NUMBERS[width], payload, at)
        at += width
        size, values = (number, 0) if code in _SIZED else (0, number * (2 if code in _MAPS else 1))
        size += code in _EXTENSIONS
    else:
        raise msgspec.DecodeError("a byte that begins no value")
    if at + size > len(payload):
        raise msgspec.DecodeError("it ends too early")
    return at + size, values
