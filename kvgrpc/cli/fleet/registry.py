"""``kvgrpc engines`` and ``kvgrpc ranks``: what a registry knows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import calls_a_registry, json_option
from kvgrpc.cli.names import (
    incarnation_name,
    layout_name,
    model_name,
    pool_name,
    rank_name,
    role_name,
    value_name,
)
from kvgrpc.cli.output import show_json, show_table, size, wide_option
from kvgrpc.errors import EngineNotFound
from kvgrpc.observability.logging import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgrpc.client import Engines, SyncClient
    from kvgrpc.v1 import common_pb2
    from kvgrpc.v1 import registry_service_pb2 as pb

MOST_MISSING = 8
LONGEST_LINE = 1024
# By the numbers of Absence.
_ABSENCES = {
    1: "left (drained, closed or deregistered)",
    2: "is gone (nobody renewed its lease)",
    3: "is fenced (it runs, and a newer incarnation was there: restart it)",
}
WARMS_UP = "the registry warms up: more may be there"


@click.command()
@click.option("--role", type=click.Choice(["prefill", "decode"]), help="Only engines of this role.")
@click.option("--watch", is_flag=True, help="Show what is there, then what changes, until Ctrl-C.")
@wide_option
@json_option
@calls_a_registry
def engines(client: SyncClient, role: str | None, watch: bool, as_json: bool) -> None:
    """List the engines of a registry."""
    from kvgrpc.v1 import common_pb2

    wanted = common_pb2.Role.Value(f"ROLE_{role.upper()}") if role else common_pb2.ROLE_UNSPECIFIED
    if watch:
        return show_changes(client.watch_engines(role=wanted, without_pools=True), as_json)
    found = client.list_engines(role=wanted)
    if as_json:
        show_json(*found)
        return warn_of_warming_up(found)
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
    first_to_go = ("layout", "model", "role")
    show_table(f"Engines at {client.address}", columns, rows, "none is registered", first_to_go)
    for engine in found:
        if not engine.ready:
            for line in lacking(client, engine.name):
                print(one_line(line, LONGEST_LINE))
    warn_of_warming_up(found)
    warn_of_missing_streams(found)


def lacking(client: SyncClient, name: str) -> Iterator[str]:
    """The line of an engine that is not READY; none where it is by now, or has left."""
    with contextlib.suppress(EngineNotFound):
        engine = client.get_engine(name)
        if not engine.ready:
            yield not_ready(engine)


def not_ready(engine: pb.Engine) -> str:
    """The ranks that keep an engine from READY, and what became of each, as far as the registry knows."""
    from kvgrpc.wire import rank_id_from_pb

    became = {rank_name(each.rank): absence_text(each) for each in engine.absent_ranks}
    missing = [str(rank_id_from_pb(each)) for each in engine.missing_ranks[:MOST_MISSING]]
    told = [f"{rank} {became.get(rank, 'did not register')}" for rank in missing]
    beyond = engine.expected_ranks - engine.registered_ranks - len(missing)
    return f"{engine.name} is not READY: {', '.join(told)}{f' and {beyond} more' if beyond > 0 else ''}"


def absence_text(absent: pb.AbsentRank) -> str:
    """Says in words how and when a rank left."""
    from kvgrpc.v1 import registry_service_pb2 as pb

    how = _ABSENCES.get(absent.absence) or value_name(pb.Absence, absent.absence)
    return f"{how} at {absent.time.ToDatetime():%Y-%m-%d %H:%M:%S} UTC"


def show_changes(messages: Iterator[pb.WatchEnginesResponse], as_json: bool) -> None:
    """A line for each engine and rank that is new, and for each that is gone; heartbeats are not shown."""
    warming_up = False
    for message in messages:
        if as_json and (message.changes or message.state_complete or message.warming_up != warming_up):
            show_json(message)
        elif not as_json:
            for change in message.changes:
                for line in change_lines(change):
                    print(one_line(line), flush=True)
            if message.state_complete:
                print("that is all; now what changes", flush=True)
            if message.warming_up != warming_up:
                print(WARMS_UP if message.warming_up else "it knows everybody now")
        warming_up = message.warming_up


def change_lines(change: pb.EngineChange) -> Iterator[str]:
    engine = change.engine
    if not engine.registered_ranks:
        yield f"{engine.name}  gone"
        return
    state = "READY" if engine.ready else "incomplete"
    yield f"{engine.name}  {role_name(engine.role)}  {state}  {engine.registered_ranks}/{engine.expected_ranks}"
    yield from missing_streams(engine)
    yield from (f"  + {incarnation_name(row.rank)}  {row.endpoints.grpc}" for row in engine.rows)
    yield from (f"  - {incarnation_name(ref)}" for ref in change.gone)


@click.command()
@click.argument("engine", required=False)
@wide_option
@json_option
@calls_a_registry
def ranks(client: SyncClient, engine: str | None, as_json: bool) -> None:
    """List the ranks of one ENGINE, or of all, and where they listen."""
    engines_found = with_rows(client, engine)
    found = [row for at in engines_found for row in at.rows]
    if as_json:
        show_json(*found)
        return warn_of_warming_up(engines_found)
    columns = ("rank", "role", "server", "events", "data plane", "pools", "#epoch")
    rows = [
        (
            rank_name(row.rank),  # in full: `kvgrpc deregister` takes it
            role_name(row.role),
            row.endpoints.grpc,
            row.endpoints.events_pub,
            row.data_plane,
            ", ".join(map(pool_summary, row.pools)),
            row.rank.epoch,
        )
        for row in found
    ]
    first_to_go = ("#epoch", "data plane", "role", "events", "pools")
    show_table(f"Ranks at {client.address}", columns, rows, "none is registered", first_to_go)
    warn_of_warming_up(engines_found)
    warn_of_missing_streams(engines_found)


@click.command()
@click.argument("rank", metavar="RANK")
@click.option("--yes", is_flag=True, help="Do not ask.")
@calls_a_registry
def deregister(client: SyncClient, rank: str, yes: bool) -> None:
    """Remove the row of a RANK, as `kvgrpc ranks` names it ("P0/dp0/pp0/cp0/tp0"), before its lease runs out.

    For one that is gone and blocks its engine. One that lives registers again with its next renewal.
    """
    rows = (row for at in with_rows(client, rank.partition("/")[0]) for row in at.rows)
    found = [row for row in rows if rank_name(row.rank) == rank]
    if not found:
        raise click.UsageError(f"no rank {rank} is registered; `kvgrpc ranks` lists them")
    (row,) = found
    if not yes:
        click.confirm(f"remove {incarnation_name(row.rank)} at {row.endpoints.grpc}?", abort=True)
    client.deregister([row.rank])
    click.echo(f"{incarnation_name(row.rank)} is removed")


def with_rows(client: SyncClient, name: str | None) -> Engines:
    """The engine of this name, or all. One that has left since it was listed is passed over."""
    from kvgrpc.client import Engines

    if name:
        return Engines([client.get_engine(name)])
    listed, found = client.list_engines(), Engines()
    found.warming_up = listed.warming_up
    for engine in listed:
        with contextlib.suppress(EngineNotFound):
            found.append(client.get_engine(engine.name))
    return found


def warn_of_warming_up(found: Engines) -> None:
    """On stderr also with ``--json``, whose lines are all of one kind."""
    if found.warming_up:
        click.secho(WARMS_UP, fg="yellow", err=True)


def warn_of_missing_streams(found: Iterable[pb.Engine]) -> None:
    for engine in found:
        for line in missing_streams(engine):
            click.secho(one_line(line), fg="yellow", err=True)


def missing_streams(engine: pb.Engine) -> Iterator[str]:
    """A line where dp ranks publish no events though others do: a router would never send them what they cache."""
    if engine.dp_lacking_events:
        lacking = ", ".join(map(str, engine.dp_lacking_events))
        yield f"{engine.name}: dp {lacking} publishes no events, though others do: is its configuration theirs?"


def pool_summary(pool: common_pb2.PagePool) -> str:
    """ "kv 4096 x 2.0 MiB": pages, and the bytes of a page over all of its regions."""
    return f"{pool_name(pool)} {pool.pages} x {size(sum(region.page_bytes for region in pool.regions))}"
