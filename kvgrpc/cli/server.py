"""``kvgrpc info``, ``health`` and ``drain``: one process, whatever it serves."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import Seconds, calls_a_server, json_option
from kvgrpc.cli.names import incarnation_name, layout_name, role_name
from kvgrpc.cli.output import seconds, show_json, show_record, show_table, size

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.v1.server_service_pb2 import ServerLimits

TRANSFER = "kvgrpc.v1.TransferService"


@click.command()
@json_option
@calls_a_server
def info(client: SyncClient, as_json: bool) -> None:
    """Show who a process is, what it serves, and the shape of its pools."""
    server = client.get_server_info()
    topology = client.get_rank() if TRANSFER in server.services else None
    if as_json:
        return show_json(server, *([topology] if topology else []))
    fields: list[tuple[str, object]] = [
        ("version", server.version),
        ("process", server.pid),
        ("up", seconds(max(0.0, time.time() - server.start_time.ToNanoseconds() / 1e9))),
        ("draining", server.draining),
        ("services", ", ".join(name.rpartition(".")[2] for name in server.services)),
        *_limits(server.limits),
    ]
    if topology:
        held = f"{topology.pages_held} of at most {topology.pages_held_limit}"
        fields += [
            ("rank", incarnation_name(topology.rank)),
            ("role", role_name(topology.role)),
            ("layout", layout_name(topology.layout)),
            ("data plane", topology.data_plane),
            ("pages held", held),
        ]
    show_record(client.address, fields)
    if topology:
        columns = ("pool", "dtype", "#tokens a page", "#pages", "#layers", "#page", "where")
        rows = [
            (
                pool.name,
                pool.dtype,
                pool.page_tokens or None,
                pool.pages,
                len({region.layer for region in pool.regions}),
                size(sum(region.page_bytes for region in pool.regions)),
                pool.location,
            )
            for pool in topology.pools
        ]
        show_table("Pools", columns, rows, "none")


def _limits(limits: ServerLimits) -> Iterator[tuple[str, object]]:
    """Each with its unit."""
    for part, message in limits.ListFields():
        for field, value in message.ListFields():
            shown = seconds(value.ToMilliseconds() / 1000) if field.message_type else value
            name = field.name.removeprefix("max_").replace("_", " ")
            yield f"{part.name}: {name}", size(value) if name.endswith(" bytes") else shown


@click.command()
@click.argument("service", required=False)
@calls_a_server
def health(client: SyncClient, service: str | None) -> None:
    """Show the health of all services, or of one SERVICE (its full name).

    Exit code 0 when it is SERVING (with no SERVICE: when all are), 1 otherwise: fit for probes.
    """
    names = [service] if service else ["", *client.get_server_info().services]
    states = {name: client.health(name) for name in names}
    rows = [(name or "all together", state) for name, state in states.items()]
    show_table(f"Health of {client.address}", ("service", "state"), rows, "nothing")
    sys.exit(states[names[0]] != "SERVING")


@click.command()
@click.option("--grace", type=Seconds(0.0, 600.0), default=30.0, show_default=True, help="Seconds for rooms.")
@json_option
@calls_a_server
def drain(client: SyncClient, grace: float, as_json: bool) -> None:
    """Take a process out of service: refuse new rooms, let running ones end, keep the port until no write is left.

    Rooms that have not ended after the grace are cancelled. Exit code 0 when nothing is left, 1 otherwise.
    """
    response = client.drain(grace)
    if as_json:
        show_json(response)
    else:
        show_record(client.address, [("drained", response.drained), ("open rooms", response.open_rooms)])
    sys.exit(not response.drained)
