"""Payload -> batch: one reader for every version that engines have written.

A payload in which all events have one form and known fields takes the typed way. Whatever that refuses is read again,
event by event, so that one strange event costs nobody else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvgrpc.events.codec.depth import holds_deeper, nests_deeper, split
from kvgrpc.events.codec.map import read_map
from kvgrpc.events.codec.positional import AnyArray, AnyStored, event_of, read_array
from kvgrpc.events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    TierBlocksCleared,
    UnknownEvent,
)

# Mooncake writes milliseconds; as seconds they would lie in the year 5138 or later.
_LATEST_SECONDS = 1e11
_NAME_CHARACTERS = 100
# What msgspec raises for one value or another, where it makes dates, text and keys of it.
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError, ValueError, OverflowError)


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[AnyArray]
    rank: int | None = None


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | TierBlocksCleared]
    rank: int | None = None


class _Shape(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are only passed over."""

    ts: float
    events: list[msgspec.Raw]
    rank: msgspec.Raw = msgspec.Raw(b"\xc0")


_arrays = msgspec.msgpack.Decoder(_Arrays)
_maps = msgspec.msgpack.Decoder(_Maps)
_shapes = msgspec.msgpack.Decoder(_Shape)
_anything = msgspec.msgpack.Decoder()


def decode_batch(payload: bytes) -> KVEventBatch:
    """The batch of a payload in any encoding and dialect.

    Events that cannot be read are UnknownEvents with their bytes. Raises msgspec.DecodeError for what is no batch, and
    RecursionError where the caller's own stack has no room for an event that others read. Memory stays within a
    constant times the payload's length.
    """
    try:
        batch = _decode_typed(payload)
    except _UNREADABLE:
        # Not only what does not fit: a map whose key is a map, a date of the year 10000, within a field of one event.
        batch = None
    return batch or _decode_one_by_one(payload)


def _decode_typed(payload: bytes) -> KVEventBatch | None:
    """None where an event nests too deep."""
    if _holds_arrays(payload):
        arrays = _arrays.decode(payload)
        if any(map(_is_too_deep_array, arrays.events)):
            return None
        return KVEventBatch(_seconds(arrays.ts), [event_of(array) for array in arrays.events], arrays.rank)
    maps = _maps.decode(payload)
    if any(map(_is_too_deep, maps.events)):
        return None
    return KVEventBatch(_seconds(maps.ts), maps.events, maps.rank)


def check_batch(payload: bytes) -> None:
    """Raises msgspec.DecodeError for what is no batch. Quick: events are passed over."""
    _shape_of(payload)


def _decode_one_by_one(payload: bytes) -> KVEventBatch:
    shape = _shape_of(payload)
    rank = _value(bytes(shape.rank))
    events = [_event(bytes(raw)) for raw in shape.events]
    return KVEventBatch(_seconds(shape.ts), events, rank if isinstance(rank, int) else None)


def _shape_of(payload: bytes) -> _Shape:
    try:
        return _shapes.decode(payload)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        ts, events, more = split(payload)
        return _Shape(ts, [msgspec.Raw(event) for event in events], *map(msgspec.Raw, more[:1]))


def _value(raw: bytes) -> Any:
    """None for what cannot be read."""
    try:
        value = _anything.decode(raw)
    except RecursionError:
        if nests_deeper(raw):
            return None
        raise  # of the caller's stack, not of the payload
    except _UNREADABLE:
        return None
    return None if holds_deeper(value, 0) else value


def _is_too_deep(event: Event) -> bool:
    if not isinstance(event, BlockStored):
        return False
    return any(free is not None and holds_deeper(free, 1) for free in (event.extra_keys, event.unknown_keys))


def _is_too_deep_array(event: AnyArray) -> bool:
    if not isinstance(event, AnyStored):
        return False
    free = [part for part in (event.extra_keys, event.name_or_metadata) if isinstance(part, list | dict)]
    return any(holds_deeper(part, 1) for part in free)


def _event(raw: bytes) -> Event:
    values = _value(raw)
    event: Event | None = None
    name: object = None
    if isinstance(values, dict):
        event, name = read_map(values), values.get("type")
    elif isinstance(values, list) and values:
        event, name = read_array(values), values[0]
    if event is None:
        return UnknownEvent(name[:_NAME_CHARACTERS] if isinstance(name, str) else "", raw)
    return event


def _seconds(ts: float) -> float:
    return ts / 1000 if ts > _LATEST_SECONDS else ts


def _holds_arrays(payload: bytes) -> bool:
    """True if the first event is an array, in a batch as engines write it: [float64, [event, ...], ...]."""
    header = payload[10:11]
    first = 11 + (2 if header == b"\xdc" else 4 if header == b"\xdd" else 0)
    return payload[first : first + 1] in _ARRAY_HEADERS


_ARRAY_HEADERS = frozenset(bytes([header]) for header in (*range(0x90, 0xA0), 0xDC, 0xDD))
