"""``kvgrpc engines`` and ``kvgrpc ranks``: what a registry knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import calls_a_registry, json_option
from kvgrpc.cli.names import layout_name, model_name, rank_name, role_name
from kvgrpc.cli.output import show_json, show_table, size

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import common_pb2


@click.command()
@click.option("--role", type=click.Choice(["prefill", "decode"]), help="Only engines of this role.")
@json_option
@calls_a_registry
def engines(client: SyncClient, role: str | None, as_json: bool) -> None:
    """List the engines of a registry."""
    from kvgrpc.v1 import common_pb2

    wanted = common_pb2.Role.Value(f"ROLE_{role.upper()}") if role else common_pb2.ROLE_UNSPECIFIED
    found = client.list_engines(role=wanted)
    if as_json:
        return show_json(*found)
    columns = ("engine", "role", "state", "#ranks", "layout", "model")
    rows = [
        (
            engine.name,
            role_name(engine.role),
            "READY" if engine.ready else "incomplete",
            f"{engine.registered_ranks}/{engine.expected_ranks}",
            layout_name(engine.layout),
            model_name(engine.model),
        )
        for engine in found
    ]
    show_table(f"Engines at {client.address}", columns, rows, "none is registered")


@click.command()
@click.argument("engine", required=False)
@json_option
@calls_a_registry
def ranks(client: SyncClient, engine: str | None, as_json: bool) -> None:
    """List the ranks of one ENGINE, or of all, and where they listen."""
    names = [engine] if engine else [found.name for found in client.list_engines()]
    found = [row for name in names for row in client.get_engine(name).rows]
    if as_json:
        return show_json(*found)
    columns = ("rank", "role", "server", "events", "data plane", "pools", "#epoch")
    rows = [
        (
            rank_name(row.rank),
            role_name(row.role),
            row.endpoints.grpc,
            row.endpoints.events_pub,
            row.data_plane,
            ", ".join(map(pool_summary, row.pools)),
            row.rank.epoch,
        )
        for row in found
    ]
    show_table(f"Ranks at {client.address}", columns, rows, "none is registered")


def pool_summary(pool: common_pb2.Pool) -> str:
    """ "kv 4096 x 2.0 MiB": pages, and the bytes of a page over all of its regions."""
    return f"{pool.name} {pool.pages} x {size(sum(region.page_bytes for region in pool.regions))}"
