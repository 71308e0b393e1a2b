"""``kvgrpc pulls``: pages that moved between the host caches of engines."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.again import show_again, watch_option
from kvgrpc.cli.connection import calls_a_rank, json_option
from kvgrpc.cli.fleet.tables import fleet_option, look_at_fleet
from kvgrpc.cli.names import peer_name, reason_name, value_name
from kvgrpc.cli.output import gigabytes, seconds, show_json, show_table, size, wide_option
from kvgrpc.errors import FeatureDisabled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.v1 import pull_service_pb2


@click.command()
@click.option("--open", "open_only", is_flag=True, help="Only those that have not ended.")
@fleet_option
@watch_option
@wide_option
@json_option
@calls_a_rank
def pulls(client: SyncClient, as_json: bool, open_only: bool, fleet: bool, watch: bool) -> None:
    """Show what a rank took from other engines' caches, and lent to them: in flight, then the last that ended."""

    def look() -> Callable[[], None]:
        if fleet:
            return look_at_fleet(
                client, as_json, "Pulls", _COLUMNS, lambda rank: _pulls_of(rank, open_only), _row, _FIRST_TO_GO
            )
        found = client.list_pulls(open_only=open_only)
        if as_json:
            return partial(show_json, found)
        title = f"Pulls of {client.address}, {found.lent_pages} of {found.lending_pages} staging pages lent"
        return partial(show_table, title, _COLUMNS, [_row(each) for each in found.pulls], "none", _FIRST_TO_GO)

    show_again(watch, look)


_COLUMNS = ("room", "way", "other rank", "#pages", "#bytes", "#took", "#GB/s", "end")
_FIRST_TO_GO = ("room", "#bytes", "#GB/s", "#took", "#pages")


async def _pulls_of(rank: Client, open_only: bool) -> Sequence[pull_service_pb2.Pull]:
    """None where the rank has no cache that lends."""
    try:
        return (await rank.list_pulls(open_only=open_only)).pulls
    except FeatureDisabled:
        return ()


def _row(pull: pull_service_pb2.Pull) -> tuple[object, ...]:
    from kvgrpc.v1 import pull_service_pb2 as pb

    took = pull.took.ToMicroseconds() / 1e6
    failed = reason_name(pull.failure) if pull.HasField("failure") else "ok"
    return (
        pull.room,
        value_name(pb.PullDirection, pull.direction).lower(),
        peer_name(pull.peer),
        f"{pull.done_pages}/{pull.lent_pages}",
        size(pull.bytes),
        seconds(took) if took >= 1 else f"{took * 1e3:.1f}ms",
        gigabytes(pull.bytes / took / 1e9) if took else "",
        failed if pull.ended else "runs",
    )
