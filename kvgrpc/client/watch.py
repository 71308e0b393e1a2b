"""The messages of a Watch as plain values."""

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
class TypedBatches:
    """Batches in sequence from ``first_sequence`` on, as messages; events that the filters keep away are left out."""

    first_sequence: int
    batches: tuple[pb.KvEventBatch, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Sequences, both ends inclusive, that could not be published."""

    first_sequence: int
    last_sequence: int
    cause: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Whoever has all before ``next_sequence`` is current. ``state``: the digest of the whole cache after all before
    its own ``next_sequence``, None where none is kept."""

    next_sequence: int
    state: pb.StateDigest | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A part of the state after all batches before ``next_sequence``, as batches; ``index`` 0 begins one from empty.

    ``payloads`` hold it, or ``events`` where the Watch is typed. ``state``: with the last part, what all come to.
    """

    next_sequence: int
    index: int
    last: bool
    payloads: tuple[bytes, ...]
    events: tuple[pb.KvEvent, ...] = ()
    state: pb.StateDigest | None = None


WatchPart = Begin | Payloads | TypedBatches | Dropped | Heartbeat | Snapshot


def part_of(message: pb.WatchResponse) -> WatchPart | None:
    """None for a kind that this version does not know."""
    kind = message.WhichOneof("kind")
    if kind == "begin":
        return Begin(message.begin.stream, message.begin.first_sequence)
    if kind == "raw":
        return Payloads(message.raw.first_sequence, tuple(message.raw.payloads))
    if kind == "typed":
        return TypedBatches(message.typed.first_sequence, tuple(message.typed.batches))
    if kind == "dropped":
        return Dropped(message.dropped.first_sequence, message.dropped.last_sequence, message.dropped.cause)
    if kind == "heartbeat":
        beat = message.heartbeat
        return Heartbeat(beat.next_sequence, beat.state if beat.HasField("state") else None)
    if kind == "snapshot":
        part = message.snapshot
        state = part.state if part.HasField("state") else None
        payloads, events = tuple(part.payloads), tuple(part.events)
        return Snapshot(part.next_sequence, part.index, part.last, payloads, events, state)
    return None
