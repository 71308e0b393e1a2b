"""Tables of all ranks of a registry side by side: ``--fleet``, ``kvgrpc caches``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvgrpc.cli.again import show_again, watch_option
from kvgrpc.cli.connection import calls_a_registry, json_option
from kvgrpc.cli.fitting import Name
from kvgrpc.cli.names import rank_name, row_name, short_rank, tier_name
from kvgrpc.cli.output import NO_ANSWER, show_table, size, wide_option

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.v1 import common_pb2, prefetch_service_pb2

T = TypeVar("T")

fleet_option = click.option("--fleet", is_flag=True, help="--server is a registry: ask all of its ranks.")


def look_at_fleet(
    client: SyncClient,
    as_json: bool,
    title: str,
    columns: Sequence[str],
    call: Callable[[Client], Awaitable[Sequence[Message]]],
    row: Callable[[Any], Sequence[object]],
    first_to_go: Sequence[str] = (),
    order: Callable[[Any], float] | None = None,
) -> Callable[[], None]:
    """Asks all ranks; what it returns shows one table of what they list. A rank that does not answer is a row that says
    so. With ``order`` the messages of all ranks are one list, what it is smallest of before the others."""
    answers = client.ask_ranks(call)
    if as_json:
        return partial(show_json_by_rank, answers)
    layouts = layouts_of(answers)
    said = [(row_name(answer.row), each) for answer in answers for each in answer.value or ()]
    if order is not None:
        said.sort(key=lambda pair: order(pair[1]))
    rows: list[Sequence[object]] = [(name, *with_short_names(row(each), layouts)) for name, each in said]
    rows += [(row_name(answer.row), unanswered(answer)) for answer in answers if answer.error is not None]
    title = f"{title} of the ranks at {client.address}"
    return partial(show_table, title, ("rank", *columns), rows, "none", first_to_go)


def layouts_of(answers: Iterable[RankAnswer[Any]]) -> Mapping[str, common_pb2.Layout]:
    """By engine."""
    return {answer.row.rank.rank.engine: answer.row.layout for answer in answers}


def with_short_names(cells: Sequence[object], layouts: Mapping[str, common_pb2.Layout]) -> Sequence[object]:
    """Those of ranks whose engine the registry knows."""

    def cell(value: object) -> object:
        layout = layouts.get(value.short.partition("/")[0]) if isinstance(value, Name) else None
        return Name(value, short_rank(value.short, layout)) if isinstance(value, Name) and layout else value

    return [cell(value) for value in cells]


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


def unanswered(answer: RankAnswer[Any]) -> str:
    """The cell of a rank that did not answer, behind its name and over all columns."""
    assert answer.error is not None
    return f"{NO_ANSWER}: {answer.error.reason.name or answer.error.code}"


@click.command()
@watch_option
@wide_option
@json_option
@calls_a_registry
def caches(client: SyncClient, as_json: bool, watch: bool) -> None:
    """Show how full the cache tiers of all ranks of a registry are."""

    async def call(rank: Client) -> list[prefetch_service_pb2.GetCacheInfoResponse]:
        from kvgrpc.errors import FeatureDisabled

        try:
            return [await rank.get_cache_info()]
        except FeatureDisabled:
            return []

    def row(found: prefetch_service_pb2.GetCacheInfoResponse) -> Sequence[object]:
        tiers = ", ".join(_fill(tier_name(use), use) for use in found.tiers)
        storage = found.storage_backend or "none"
        healthy = "" if not found.storage_backend else "ok" if found.storage_healthy else found.storage_detail
        return tiers, storage, healthy, found.open_operations

    columns = ("tiers", "storage", "storage is", "#operations")
    first_to_go = ("#operations", "storage")
    show_again(watch, partial(look_at_fleet, client, as_json, "Caches", columns, call, row, first_to_go))


def _fill(name: str, use: prefetch_service_pb2.CacheTierUse) -> str:
    share = f" ({100 * use.used_pages / use.pages:.0f} %)" if use.pages else ""
    return f"{name} {use.used_pages} x {size(use.page_bytes)}{share}"
