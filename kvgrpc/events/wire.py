"""event_service.proto <-> model, and nothing else."""

from __future__ import annotations

from kvgrpc.errors import Violation
from kvgrpc.events.journal import Batches, Dropped
from kvgrpc.events.stream import StreamState
from kvgrpc.events.watch import Begin, Heartbeat, Part, WatchMode, WatchOrder
from kvgrpc.model import raise_if
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.wire import rank_ref_to_pb


def order_from_pb(request: pb.WatchRequest) -> WatchOrder:
    """Raises InvalidRequest for a mode that is none of ours."""
    if request.mode not in WatchMode._value2member_map_:
        rule = f"one of {', '.join(f'WATCH_MODE_{mode.name}' for mode in WatchMode)}"
        raise_if([Violation("mode", rule, request.mode)])
    return WatchOrder(
        WatchMode(request.mode),
        request.log,
        request.from_sequence if request.HasField("from_sequence") else None,
        request.end_sequence if request.HasField("end_sequence") else None,
    )


def stream_to_pb(state: StreamState) -> pb.EventStream:
    return pb.EventStream(
        engine=state.publisher.rank.engine,
        dp=state.publisher.rank.dp,
        log=state.log,
        oldest_sequence=state.oldest_sequence,
        next_sequence=state.next_sequence,
        pub_endpoint=state.pub_endpoint,
        topic=state.topic,
        dropped_batches=state.dropped_batches,
        journal_bytes=state.journal_bytes,
        publisher=rank_ref_to_pb(state.publisher),
    )


def part_to_pb(part: Part) -> pb.WatchResponse:
    # Filled in place: a message that is handed to a constructor is copied, with all its payloads.
    response = pb.WatchResponse()
    if isinstance(part, Batches):
        response.raw.first_sequence = part.first
        response.raw.payloads.extend(part.payloads)
    elif isinstance(part, Heartbeat):
        response.heartbeat.next_sequence = part.next_sequence
    elif isinstance(part, Dropped):
        response.dropped.first_sequence = part.first
        response.dropped.last_sequence = part.last
        response.dropped.cause = part.cause
    elif isinstance(part, Begin):
        response.begin.stream.CopyFrom(stream_to_pb(part.state))
        response.begin.first_sequence = part.first
    return response
