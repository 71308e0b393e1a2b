"""``kvgrpc callers``: who has something open at a process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.again import show_again, watch_option
from kvgrpc.cli.connection import calls_a_server, json_option
from kvgrpc.cli.fleet.tables import fleet_option, look_at_fleet
from kvgrpc.cli.names import value_name
from kvgrpc.cli.output import show_json, show_table, wide_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import server_service_pb2

_COLUMNS = ("caller", "role", "from", "#calls", "#streams", "#rows", "reads, and how far behind")
_FIRST_TO_GO = ("#rows", "#streams", "from", "#calls")
_SHOWN_READERS = 3


@click.command()
@fleet_option
@watch_option
@wide_option
@json_option
@calls_a_server
def callers(client: SyncClient, as_json: bool, fleet: bool, watch: bool) -> None:
    """List who calls a process: what each has open, the rows it registered, and how far behind its readers are.

    Calls of ServerService, as this one, and health checks are not there: no bound counts them.
    """

    def look() -> Callable[[], None]:
        if fleet:
            return look_at_fleet(
                client, as_json, "Callers", _COLUMNS, lambda rank: rank.list_callers(), caller_row, _FIRST_TO_GO
            )
        found = client.list_callers()
        if as_json:
            return partial(show_json, *found)
        title, rows = f"Callers of {client.address}", [caller_row(each) for each in found]
        return partial(show_table, title, _COLUMNS, rows, "nobody has anything open", _FIRST_TO_GO)

    show_again(watch, look)


def caller_row(caller: server_service_pb2.Caller) -> Sequence[object]:
    from kvgrpc.v1 import server_service_pb2 as pb

    role = value_name(pb.CallerRole, caller.role).lower() if caller.role else ""
    read = [reader_text(reader) for reader in caller.readers[:_SHOWN_READERS]]
    more = len(caller.readers) - _SHOWN_READERS
    reads = ", ".join(read) + (f" and {more} more" if more > 0 else "")
    # A name that is the host says so once.
    address = "" if caller.address == caller.name else caller.address
    return (caller.name, role, address, caller.open_calls, caller.open_streams, caller.rows or None, reads)


def reader_text(reader: server_service_pb2.NewsReader) -> str:
    """ "P dp 0: 3 behind"; of engines "engines: 0 behind"."""
    what = f"{reader.engine} dp {reader.dp}" if reader.engine else "engines"
    return f"{what}: {reader.behind} behind" if reader.HasField("behind") else what
