"""``kvgrpc info``, ``health``, ``drain`` and ``undrain``: one process, whatever it serves."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import Seconds, calls_a_server, json_option
from kvgrpc.cli.names import incarnation_name, layout_name, pool_name, role_name, value_name
from kvgrpc.cli.output import seconds, show_json, show_record, show_table, size

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.v1.server_service_pb2 import GetServerInfoResponse, PortSecurity, ServerLimits, Setting

TRANSFER = "kvgrpc.v1.TransferService"


@click.command()
@click.option("--settings", is_flag=True, help="Show the settings in force, and where each comes from.")
@json_option
@calls_a_server
def info(client: SyncClient, as_json: bool, settings: bool) -> None:
    """Show who a process is, what it serves, what it runs on, and the shape of its pools."""
    server = client.get_server_info()
    if settings:
        return show_json(*server.settings) if as_json else show_settings(client.address, server.settings)
    topology = client.get_rank() if TRANSFER in server.services else None
    if as_json:
        return show_json(server, *([topology] if topology else []))
    fields: list[tuple[str, object]] = [
        ("version", server.version),
        ("process", server.pid),
        ("up", seconds(max(0.0, time.time() - server.start_time.ToNanoseconds() / 1e9))),
        ("draining", server.draining),
        ("services", ", ".join(name.rpartition(".")[2] for name in server.services)),
        ("runs on", ", ".join(f"{name} {version}" for name, version in sorted(server.versions.items()))),
        *_security(server.security),
        *_registration(server),
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
                pool_name(pool),
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


def show_settings(address: str, settings: Sequence[Setting]) -> None:
    from kvgrpc.v1 import server_service_pb2 as pb

    rows = [(each.name, each.value, value_name(pb.SettingSource, each.source).lower()) for each in settings]
    empty = "none is told: this is no rank, or the caller is no operator"
    show_table(f"Settings of {address}", ("setting", "value", "from"), rows, empty)


def _security(security: PortSecurity) -> Iterator[tuple[str, object]]:
    yield "encrypted", security.tls
    proofs = [*(["certificate"] if security.client_certificates else []), *(["token"] if security.tokens else [])]
    yield "callers prove themselves by", " and ".join(proofs) or "nothing"
    if security.HasField("certificate_end_time"):
        yield "certificate ends", f"{security.certificate_end_time.ToDatetime():%Y-%m-%d %H:%M} UTC"


def _registration(server: GetServerInfoResponse) -> Iterator[tuple[str, object]]:
    from kvgrpc.v1 import server_service_pb2 as pb

    if not server.HasField("registration"):
        return
    known = server.registration
    state = value_name(pb.RegistrationState, known.state).lower()
    since = f" since {known.away_since.ToDatetime():%H:%M:%S} UTC" if known.HasField("away_since") else ""
    yield "registry", f"{known.address}: {state}{since}"
    if known.last_error:
        yield "registry says", known.last_error


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


@click.command()
@calls_a_server
def undrain(client: SyncClient) -> None:
    """Take a drain back: the process takes new rooms, and its row is registered again, as the same incarnation.

    What the drain ended stays ended. One whose place a newer incarnation took is refused (STALE_EPOCH): open it anew.
    """
    client.undrain()
    click.echo(f"{client.address} serves")
