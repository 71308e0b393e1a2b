"""``kvgrpc events plan``: where an index would run a request, and from whom it would pull."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvgrpc.cli.connection import calls_an_index, json_option
from kvgrpc.cli.events.index import names_a_prompt, prompt_of, prompt_of_other_kind
from kvgrpc.cli.names import seconds_of
from kvgrpc.cli.output import seconds, show_json, show_table, wide_option

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import index_service_pb2


@click.command()
@names_a_prompt
@click.option("--engine", "engines", multiple=True, help="An engine that could run it; may be repeated. None: all.")
@click.option("--source", "sources", multiple=True, help="An engine that may lend; may be repeated. None: all.")
@click.option("--all-tokens", type=click.IntRange(0, 2**32 - 1), default=0, help="Tokens of the whole request.")
@click.option("--both-kinds", is_flag=True, help="With --tokens: engines of SGLang and of vLLM in one plan.")
@wide_option
@json_option
@calls_an_index
def plan(
    client: SyncClient,
    as_json: bool,
    both_kinds: bool,
    engines: tuple[str, ...],
    sources: tuple[str, ...],
    all_tokens: int,
    **options: Any,
) -> None:
    """Ask an index where to run a request, and from whom to pull which part of its prompt. Nothing is reserved."""
    from kvgrpc.v1 import index_service_pb2

    request = index_service_pb2.PlanRequest(max_placements=100)
    asked = request.prompts.add(prompt=prompt_of(**options), engines=engines, sources=sources, tokens=all_tokens)
    if both_kinds:
        asked.other_kinds.append(prompt_of_other_kind(asked.prompt, **options))
    response = client.plan(request)
    if as_json:
        return show_json(response)
    columns = (
        "engine",
        "#dp",
        "#blocks",
        "pull from",
        "#pull",
        "#GB/s",
        "#queue",
        "#compute",
        "#first token",
        "#alone",
    )
    (found,) = response.plans
    rows = [
        (
            each.engine,
            each.dp,
            each.blocks,
            each.pull.engine or "-",
            each.pull.blocks,
            _rate(each.pull),
            *(
                _told(each, name)
                for name in ("queue_time", "compute_time", "first_token_time", "first_token_time_without_pull")
            ),
        )
        for each in found.placements
    ]
    first_to_go = ("#alone", "#GB/s", "#compute", "#queue")
    empty = "no cache of these engines is followed"
    show_table(f"{found.blocks} blocks at {client.address}", columns, rows, empty, first_to_go)


def _rate(pull: index_service_pb2.PlannedPull) -> str:
    if not pull.blocks:
        return "-"
    return f"{pull.bytes_per_second / 1e9:.2f}{'' if pull.measured else ' assumed'}"


def _told(each: index_service_pb2.Placement, name: str) -> str:
    return seconds(seconds_of(getattr(each, name))) if each.HasField(name) else "-"  # type: ignore[arg-type]
