"""Tables of all ranks of a registry side by side: ``--fleet``, ``kvgrpc caches``, ``kvgrpc top``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvgrpc.cli.connection import Seconds, calls_a_registry, json_option
from kvgrpc.cli.names import rank_name, role_name
from kvgrpc.cli.output import show_table, size, table_of

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.v1 import prefetch_service_pb2

T = TypeVar("T")

fleet_option = click.option("--fleet", is_flag=True, help="--server is a registry: ask all of its ranks.")


def show_fleet(
    client: SyncClient,
    as_json: bool,
    title: str,
    columns: Sequence[str],
    call: Callable[[Client], Awaitable[Sequence[Message]]],
    row: Callable[[Any], Sequence[object]],
) -> None:
    """One table of what all ranks list. A rank that does not answer is a row that says so."""
    answers = client.ask_ranks(call)
    if as_json:
        return show_json_by_rank(answers)
    rows: list[Sequence[object]] = []
    for answer in answers:
        name = rank_name(answer.row.rank)
        if answer.error is not None:
            rows.append((name, *unanswered(answer, len(columns))))
        rows.extend((name, *row(each)) for each in answer.value or ())
    show_table(f"{title} of the ranks at {client.address}", ("rank", *columns), rows, "none")


def show_json_by_rank(answers: Iterable[RankAnswer[Sequence[Message]]]) -> None:
    """A line for each message with the rank that said it, and one for each rank that did not answer."""
    from google.protobuf import json_format

    for answer in answers:
        name = rank_name(answer.row.rank)
        if answer.error is not None:
            print(json.dumps({"rank": name, "error": answer.error.reason.name, "message": answer.error.message}))
        for message in answer.value or ():
            fields = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
            print(json.dumps({"rank": name, **fields}, separators=(",", ":")), flush=True)


def unanswered(answer: RankAnswer[Any], columns: int) -> Sequence[object]:
    """The cells of a rank that did not answer, behind its name."""
    assert answer.error is not None
    why = answer.error.reason.name or answer.error.code
    return (f"no answer: {why}", *[""] * (columns - 1))


@click.command()
@json_option
@calls_a_registry
def caches(client: SyncClient, as_json: bool) -> None:
    """Show how full the cache tiers of all ranks of a registry are."""

    async def call(rank: Client) -> list[prefetch_service_pb2.GetCacheInfoResponse]:
        from kvgrpc.errors import FeatureDisabled

        try:
            return [await rank.get_cache_info()]
        except FeatureDisabled:
            return []

    def row(found: prefetch_service_pb2.GetCacheInfoResponse) -> Sequence[object]:
        from kvgrpc.cli.cache import tier_name

        tiers = ", ".join(_fill(tier_name(use), use) for use in found.tiers)
        storage = found.storage_backend or "none"
        healthy = "" if not found.storage_backend else "ok" if found.storage_healthy else found.storage_detail
        return tiers, storage, healthy, found.open_operations

    show_fleet(client, as_json, "Caches", ("tiers", "storage", "storage is", "#operations"), call, row)


def _fill(name: str, use: prefetch_service_pb2.CacheTierUse) -> str:
    share = f" ({100 * use.used_pages / use.pages:.0f} %)" if use.pages else ""
    return f"{name} {use.used_pages} x {size(use.page_bytes)}{share}"


@click.command()
@click.option("--every", type=Seconds(0.2, 60.0), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once; so does a pipe.")
@calls_a_registry
def top(client: SyncClient, every: float, once: bool) -> None:
    """Watch all ranks of a registry: sessions, rooms, held pages, until Ctrl-C."""
    import sys
    import time

    from rich.live import Live

    if once or not sys.stdout.isatty():
        return show_table(f"Ranks at {client.address}", _TOP, _top_rows(client), "none is registered")
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(table_of(_TOP, _top_rows(client)), refresh=True)
            time.sleep(every)


_TOP = ("rank", "role", "server", "health", "#sessions", "#not open", "#rooms", "#failed", "#held")


def _top_rows(client: SyncClient) -> list[Sequence[object]]:
    from kvgrpc.v1 import transfer_service_pb2 as pb

    async def look(rank: Client) -> tuple[object, ...]:
        sessions = await rank.list_sessions()
        shut = sum(session.state != pb.SESSION_STATE_OPEN for session in sessions)
        failed = await rank.count_rooms(states=[pb.ROOM_STATE_FAILED])
        here = await rank.get_rank()
        return await rank.health(), len(sessions), shut, await rank.count_rooms(), failed, here.pages_held

    rows: list[Sequence[object]] = []
    for answer in client.ask_ranks(look):
        row = answer.row
        known = (rank_name(row.rank), role_name(row.role), row.endpoints.grpc)
        rows.append((*known, *(unanswered(answer, len(_TOP) - 3) if answer.value is None else answer.value)))
    return rows
