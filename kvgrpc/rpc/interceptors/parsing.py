"""Parses a large message piece by piece: one of 4 MiB takes 30 ms, in which nothing else happens on its loop.

Messages that stand one behind the other are their merge, so a message is cut between two of its fields, and a field
that is a large message itself between two of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

# Parsing so many bytes takes up to 0.5 ms, and so many fields are passed over in as long.
PIECE_BYTES, _FIELDS_AT_ONCE = 64 * 1024, 2_048
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_NOT_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


def merge_in_pieces(message: Message, data: bytes) -> Iterator[None]:
    """Parses ``data`` into an empty message, and yields behind each piece. Raises DecodeError where it is none."""
    yield from _merge(message, data, 0, len(data))


def _merge(message: Message, data: bytes, at: int, end: int) -> Iterator[None]:
    fields: Any = message.DESCRIPTOR.fields_by_number
    first, count, alike_until = at, 0, 0
    while at < end:
        tag, body = _varint(data, at, end)
        behind, start = _field_end(data, tag & 7, body, end)
        if behind - start > PIECE_BYTES and tag & 7 == _BYTES:
            message.MergeFromString(data[first:at])
            yield
            yield from _merge_large(message, fields.get(tag >> 3), data, at, start, behind)
            first = behind
        elif behind - first > PIECE_BYTES:
            message.MergeFromString(data[first:at])
            yield
            first = at
        if at >= alike_until and behind - at < 128:
            alike_until = at + PIECE_BYTES
            behind += _alike(data, at, behind, end)
        at, count = behind, count + 1
        if count % _FIELDS_AT_ONCE == 0:
            yield
    message.MergeFromString(data[first:end])


def _merge_large(message: Message, field: Any, data: bytes, at: int, start: int, end: int) -> Iterator[None]:
    """The one field whose tag is at ``at`` and whose bytes are from ``start`` on."""
    if field is None or (field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry):
        message.MergeFromString(data[at:end])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        of_it = getattr(message, field.name)
        if field.is_repeated:
            of_it = of_it.add()
        else:
            of_it.SetInParent()
        yield from _merge(of_it, data, start, end)
    elif field.is_repeated and field.type not in _NOT_PACKED:
        size = _SIZES.get(field.type, 0)
        tag = _encoded(field.number << 3 | _BYTES)
        while start < end:
            behind = min(start + PIECE_BYTES, end)
            if not size and behind < end and data[behind - 1] & 0x80:
                behind = _varint(data, behind, end)[1]
            message.MergeFromString(tag + _encoded(behind - start) + data[start:behind])
            yield
            start = behind
    else:
        message.MergeFromString(data[at:end])


def _alike(data: bytes, at: int, behind: int, end: int) -> int:
    """Bytes of the fields that follow one of less than 128 bytes and have its tag and its length."""
    size, head = behind - at, 0
    while data[at + head] & 0x80:
        head += 1
    head += 2 if data[at] & 7 == _BYTES else size
    count = min(end - behind, PIECE_BYTES) // size
    if head >= size or not count:
        return 0
    for place in range(head):
        same = data[behind + place : behind + count * size : size]
        if same != data[at + place : at + place + 1] * count:
            return 0
    return count * size


def _field_end(data: bytes, kind: int, at: int, end: int) -> tuple[int, int]:
    """Returns where the field ends whose tag ends at ``at``, and where its content begins."""
    start = at
    if kind == _VARINT:
        at = _varint(data, at, end)[1]
    elif kind == _BYTES:
        size, start = _varint(data, at, end)
        at = start + size
    elif kind in (_FIXED64, _FIXED32):
        at += 8 if kind == _FIXED64 else 4
    else:
        raise DecodeError("groups are no part of our messages")
    if at > end:
        raise DecodeError("a field ends behind its message")
    return at, start


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number has no end")


def _encoded(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
