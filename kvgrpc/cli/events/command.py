"""``kvgrpc streams`` and ``kvgrpc events``: the KV-cache events of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvgrpc.cli.again import show_again, watch_option
from kvgrpc.cli.connection import calls_a_rank, json_option
from kvgrpc.cli.events.batches import show_batch
from kvgrpc.cli.events.contents import COMMANDS as CONTENTS
from kvgrpc.cli.events.contents import names_a_cache
from kvgrpc.cli.events.index import follow, score, sources
from kvgrpc.cli.events.plan import plan
from kvgrpc.cli.events.publisher import calls_a_publisher
from kvgrpc.cli.fleet.tables import fleet_option, look_at_fleet
from kvgrpc.cli.names import peer_name
from kvgrpc.cli.output import show_json, show_table, size, wide_option
from kvgrpc.observability.logging import one_line

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient, WatchPart
    from kvgrpc.v1 import event_service_pb2

SEQUENCE = click.IntRange(0, 2**64 - 1)


@click.command()
@fleet_option
@watch_option
@wide_option
@json_option
@calls_a_rank
def streams(client: SyncClient, as_json: bool, fleet: bool, watch: bool) -> None:
    """List the event streams that a rank publishes."""
    columns = ("engine", "#dp", "#oldest", "#next", "#kept", "#dropped", "live (ZMQ PUB)", "topic", "log", "publisher")
    first_to_go = ("publisher", "log", "topic", "#oldest", "#kept", "live (ZMQ PUB)", "#next", "engine")

    def look() -> Callable[[], None]:
        if fleet:
            return look_at_fleet(
                client, as_json, "Event streams", columns, lambda rank: rank.list_streams(), stream_row, first_to_go
            )
        found = client.list_streams()
        if as_json:
            return partial(show_json, *found)
        title, rows = f"Event streams of {client.address}", [stream_row(stream) for stream in found]
        return partial(show_table, title, columns, rows, "this process publishes none", first_to_go)

    show_again(watch, look)


def stream_row(stream: event_service_pb2.EventStream) -> Sequence[object]:
    return (
        stream.engine,
        stream.dp,
        stream.oldest_sequence,
        stream.next_sequence,
        size(stream.journal_bytes),
        stream.dropped_batches,
        live_endpoint(stream),
        stream.topic.decode(errors="replace"),
        stream.log_id,
        peer_name(stream.publisher),
    )


def live_endpoint(stream: event_service_pb2.EventStream) -> str:
    """The address of live events: the endpoint that is bound, or that they are sent to."""
    if not stream.connects_to:
        return stream.pub_endpoint
    unheard = stream.HasField("listened_at") and not stream.listened_at
    return f"to {stream.connects_to}{', where nobody listens' if unheard else ''}"


@click.group()
def events() -> None:
    """Read KV-cache events: `tail` shows them as they come, `replay` ends, `follow` keeps what they come to, `snapshot`
    shows that, `verify` compares it with the publisher's digest, `stats` counts."""


for _command in (*CONTENTS, follow, plan, score, sources):
    events.add_command(_command)


def reads_a_stream(command: Any) -> Any:
    """The options of a Watch, for both ways of reading."""
    for option in (
        click.option("--raw", is_flag=True, help="With --json: the payload as base64 instead of decoded."),
        click.option(
            "--log", "log_id", default="", help="The log that --from counts in; an error if it is not current any more."
        ),
        click.option("--from", "first", type=SEQUENCE, help="First sequence; default: the oldest kept."),
    ):
        command = option(command)
    return names_a_cache(command)


@events.command()
@reads_a_stream
@json_option
@calls_a_publisher
def tail(client: SyncClient, as_json: bool, raw: bool, first: int | None, **stream: Any) -> None:
    """Show what is there, then what comes, until Ctrl-C."""
    from kvgrpc.v1 import event_service_pb2

    mode = event_service_pb2.WATCH_MODE_TAIL
    show_parts(client.watch(mode=mode, from_sequence=first, **stream), as_json, raw)


@events.command()
@click.option("--to", "last", type=SEQUENCE, help="Last sequence, inclusive; default: the newest there is.")
@reads_a_stream
@json_option
@calls_a_publisher
def replay(client: SyncClient, as_json: bool, raw: bool, first: int | None, last: int | None, **stream: Any) -> None:
    """Show what is there, then end."""
    from kvgrpc.v1 import event_service_pb2

    mode = event_service_pb2.WATCH_MODE_REPLAY
    show_parts(client.watch(mode=mode, from_sequence=first, end_sequence=last, **stream), as_json, raw)


def show_parts(parts: Iterator[WatchPart], as_json: bool, raw: bool) -> None:
    """A line for each batch. Heartbeats are not shown."""
    from kvgrpc.client import Begin, Dropped, Payloads

    for part in parts:
        if isinstance(part, Payloads):
            for sequence, payload in enumerate(part.payloads, part.first_sequence):
                show_batch(sequence, payload, as_json=as_json, raw=raw)
        elif isinstance(part, Dropped):
            told = {"dropped": [part.first_sequence, part.last_sequence], "cause": part.cause}
            text = f"{part.first_sequence:>8}  DROPPED up to {part.last_sequence}: {part.cause}"
            print(json.dumps(told) if as_json else one_line(text), flush=True)
        elif isinstance(part, Begin) and not as_json:
            click.secho(begin_as_text(part.stream, part.first_sequence), dim=True, err=True)


def begin_as_text(stream: event_service_pb2.EventStream, first: int) -> str:
    return f"stream {stream.engine} dp {stream.dp}, log {stream.log_id}: from {first}, next is {stream.next_sequence}"
