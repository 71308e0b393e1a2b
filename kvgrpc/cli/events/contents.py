"""``kvgrpc events snapshot``, ``verify`` and ``stats``: what a rank's events come to, and whether it is right."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kvgrpc.cli.connection import Seconds, json_option
from kvgrpc.cli.events.batches import name_and_hashes, read_batch, show_batch
from kvgrpc.cli.events.follower_state import held, standing_fields
from kvgrpc.cli.events.publisher import calls_a_publisher
from kvgrpc.cli.output import seconds, show_table, size

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient

DP = click.IntRange(0, 2**32 - 1)
_LOOK_SECONDS = 0.05


def names_a_cache(command: Any) -> Any:
    """Gives a command the options that say which stream of a process is meant."""
    for option in (
        click.option("--dp", type=DP, default=0, show_default=True, help="Which KV cache of the engine."),
        click.option("--engine", default="", help="Needed only where a process publishes several streams."),
    ):
        command = option(command)
    return command


def check_served(client: SyncClient, engine: str, dp: int) -> None:
    """Raises at once what a follower would wait for: that somebody answers, and has such a stream."""
    from kvgrpc.v1 import event_service_pb2

    for _ in client.watch(mode=event_service_pb2.WATCH_MODE_HEARTBEAT, engine=engine, dp=dp):
        return


@click.command()
@names_a_cache
@json_option
@calls_a_publisher
def snapshot(client: SyncClient, as_json: bool, **stream: Any) -> None:
    """Show what a rank's cache holds now, as the batches that would make it, then end."""
    from kvgrpc.client import Snapshot
    from kvgrpc.v1 import event_service_pb2

    for part in client.watch(mode=event_service_pb2.WATCH_MODE_SNAPSHOT, **stream):
        if isinstance(part, Snapshot):
            for payload in part.payloads:
                show_batch(part.next_sequence, payload, as_json=as_json)
            if part.last:
                return


@click.command()
@click.option(
    "--within", type=Seconds(0.1, 3600.0), default=30.0, show_default=True, help="Seconds until it must be known."
)
@names_a_cache
@json_option
@calls_a_publisher
def verify(client: SyncClient, as_json: bool, within: float, engine: str, dp: int) -> None:
    """Follow a rank's events until its digest and ours were compared. Exit code 1: they differ, or nothing was said."""
    check_served(client, engine, dp)
    end = time.monotonic() + within
    with client.follow(engine=engine, dp=dp) as follower:
        follower.until_current(within)
        while not (counts := follower.counts).digests_equal and not counts.digests_different:
            if time.monotonic() > end:
                break
            time.sleep(_LOOK_SECONDS)
        standing, blocks, fresh = standing_fields(follower), follower.blocks, follower.freshness
    right = counts.digests_equal > 0 and not counts.digests_different
    if as_json:
        told = {
            "equal": right,
            "digestsEqual": counts.digests_equal,
            "digestsDifferent": counts.digests_different,
        }
        print(json.dumps(standing | told))
    else:
        missing = "no digest came: is the publisher idle for good, or older than digests?"
        verdict = "equal" if right else "DIFFERENT" if counts.digests_different else missing
        click.secho(
            f"{verdict}: {held(blocks)}, log {fresh.log_id[:8]} up to {fresh.next_sequence}",
            fg=None if right else "red",
        )
    if not right:
        raise SystemExit(1)


@click.command()
@names_a_cache
@json_option
@calls_a_publisher
def stats(client: SyncClient, as_json: bool, **stream: Any) -> None:
    """Count what a rank keeps of its events: batches, events and blocks by kind, bytes, and over how long."""
    from kvgrpc.client import Begin, Dropped, Payloads
    from kvgrpc.v1 import event_service_pb2

    name: dict[str, str | int] = {}
    events, blocks = Counter[str](), Counter[str]()
    batches = nbytes = dropped = 0
    first = last = 0.0
    for part in client.watch(mode=event_service_pb2.WATCH_MODE_REPLAY, **stream):
        if isinstance(part, Begin):
            name = {"engine": part.stream.engine, "dp": part.stream.dp}
        if isinstance(part, Dropped):
            dropped += part.last_sequence - part.first_sequence + 1
        for payload in part.payloads if isinstance(part, Payloads) else ():
            moment, _, listed = read_batch(payload)
            batches, nbytes = batches + 1, nbytes + len(payload)
            if math.isfinite(moment):
                first, last = first or moment, max(last, moment)
            for kind, hashes in map(name_and_hashes, listed):
                events[kind] += 1
                blocks[kind] += len(hashes or ())
    if as_json:
        told = name | {
            "batches": batches,
            "bytes": nbytes,
            "droppedBatches": dropped,
            "seconds": round(last - first, 3),
            "events": events,
            "blocks": blocks,
        }
        return print(json.dumps(told))
    span = seconds(last - first) if batches else "-"
    title = f"{batches} batches of {size(nbytes)} within {span}, {dropped} dropped"
    rows = [(kind, count, blocks[kind]) for kind, count in sorted(events.items())]
    show_table(title, ("event", "#events", "#blocks"), rows, "no event is kept")


COMMANDS = (snapshot, verify, stats)
__all__ = ["COMMANDS"]
