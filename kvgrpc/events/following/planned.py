"""Placements of a plan -> messages, and nothing else."""

from __future__ import annotations

from kvgrpc.events.following.planning import Placement, PullChoice
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.wire import load_to_pb, seconds_to_pb


def fill_placement(message: pb.Placement, placement: Placement) -> None:
    """Filled in place: a message that is handed to a constructor is copied."""
    message.engine, message.dp = placement.engine, placement.dp
    message.device_blocks, message.host_blocks, _, message.blocks = placement.match
    message.page_tokens = placement.page_tokens
    message.compute_tokens = placement.compute_tokens
    message.speed_assumed = placement.speed_assumed
    for field, seconds in (
        (message.queue_time, placement.queue),
        (message.compute_time, placement.compute),
        (message.first_token_time, placement.first_token),
        (message.first_token_time_without_pull, placement.first_token_without_pull),
    ):
        if seconds is not None:
            field.SetInParent()
            seconds_to_pb(field, seconds)
    if placement.pull is not None:
        _fill_pull(message.pull, placement.pull)
    if placement.load is not None:
        message.load.CopyFrom(load_to_pb(placement.load))


def _fill_pull(message: pb.PlannedPull, pull: PullChoice) -> None:
    message.engine, message.dp = pull.engine, pull.dp
    message.host_blocks, message.blocks, message.bytes = pull.host_blocks, pull.blocks, pull.nbytes
    message.bytes_per_second, message.measured = pull.bytes_per_second, pull.measured
    message.pulls_in_flight = pull.in_flight
    message.time.SetInParent()
    seconds_to_pb(message.time, pull.seconds)
