"""What a Watch says, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from kvgrpc.v1 import event_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Begin:
    """First of a Watch: the stream as it stands, and the sequence of the first batch that follows."""

    stream: pb.EventStream
    first_sequence: int


@dataclass(frozen=True, slots=True)
class Payloads:
    """Batches in sequence from ``first_sequence`` on, each the exact bytes of the third PUB frame."""

    first_sequence: int
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Sequences, both ends inclusive, that could not be published."""

    first_sequence: int
    last_sequence: int
    cause: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Whoever has all before ``next_sequence`` is current."""

    next_sequence: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A part of the state after all batches before ``next_sequence``, as batches; ``index`` 0 begins one from empty."""

    next_sequence: int
    index: int
    last: bool
    payloads: tuple[bytes, ...]


WatchPart = Begin | Payloads | Dropped | Heartbeat | Snapshot


def part_of(message: pb.WatchResponse) -> WatchPart | None:
    """None for a kind that this version does not know."""
    kind = message.WhichOneof("kind")
    if kind == "begin":
        return Begin(message.begin.stream, message.begin.first_sequence)
    if kind == "raw":
        return Payloads(message.raw.first_sequence, tuple(message.raw.payloads))
    if kind == "dropped":
        return Dropped(message.dropped.first_sequence, message.dropped.last_sequence, message.dropped.cause)
    if kind == "heartbeat":
        return Heartbeat(message.heartbeat.next_sequence)
    if kind == "snapshot":
        part = message.snapshot
        return Snapshot(part.next_sequence, part.index, part.last, tuple(part.payloads))
    return None
