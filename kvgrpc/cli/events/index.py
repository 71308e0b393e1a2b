"""``kvgrpc events follow``, ``score`` and ``sources``: what caches hold, of one rank and of an index."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvgrpc.cli.connection import calls_an_index, json_option
from kvgrpc.cli.events.contents import check_served, names_a_cache
from kvgrpc.cli.events.follower_state import held, standing_fields
from kvgrpc.cli.events.publisher import calls_a_publisher
from kvgrpc.cli.names import seconds_of, value_name
from kvgrpc.cli.output import seconds, show_json, show_table, wide_option
from kvgrpc.errors import InvalidRequest
from kvgrpc.registry.model import labels_of

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient, SyncEventFollower
    from kvgrpc.v1 import index_service_pb2

TELL_SECONDS = 1.0
_FRESH = ("state", "#lag", "#idle")
_PROMPT = (
    click.option(
        "--hash", "hashes", multiple=True, help="A block's hash as events carry it, in order; may be repeated."
    ),
    click.option(
        "--tokens",
        "prompt_file",
        type=click.Path(exists=True, dir_okay=False),
        help="File with token ids as a JSON array.",
    ),
    click.option(
        "--page-tokens",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="With --tokens: of the engines; 0: as each cache says.",
    ),
    click.option("--cache-salt", default="", help="With --tokens: salt of the request."),
    click.option("--bigram", is_flag=True, help="With --tokens: the SGLang engine decodes with EAGLE."),
    click.option("--extra-key", help="With --tokens: SGLang's extra key of the request."),
    click.option("--lora-id", help="With --tokens: SGLang's id of the LoRA adapter."),
    click.option("--dynamo", is_flag=True, help='With --tokens: SGLang\'s events have "format": "dynamo".'),
    click.option("--vllm", is_flag=True, help="With --tokens: vLLM engines."),
    click.option("--vllm-hash-seed", help="With --tokens: vLLM engines, which were started with this PYTHONHASHSEED."),
    click.option("--vllm-lora", nargs=2, metavar="NAME PATH", help="With --tokens: vLLM's LoRA adapter."),
    click.option("--model", default="", help="Only caches of engines that run this model, as the registry names it."),
    click.option("--label", "labels", multiple=True, help="NAME=VALUE: only caches of ranks with it; may be repeated."),
)
STATES = ("connecting", "rebuilding", "catching_up", "current", "doubtful")


def names_a_prompt(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say how a request begins; ``prompt_of`` makes a message of them."""
    for option in reversed(_PROMPT):
        command = option(command)
    return command


@click.command()
@names_a_cache
@click.option("--live", is_flag=True, help="Take batches from ZMQ PUB; Watches fill what it lost.")
@click.option("--once", is_flag=True, help="End once the contents are exact and complete; without, go on until Ctrl-C.")
@json_option
@calls_a_publisher
def follow(client: SyncClient, as_json: bool, engine: str, dp: int, live: bool, once: bool) -> None:
    """Keep the exact contents of a rank's cache, and say each second how they stand."""
    if once:
        check_served(client, engine, dp)
    with client.follow(engine=engine, dp=dp, live=live) as follower:
        if once:
            follower.until_current()
        while True:
            print(json.dumps(standing_fields(follower)) if as_json else _standing(follower), flush=True)
            if once:
                return
            time.sleep(TELL_SECONDS)


@click.command()
@names_a_prompt
@click.option("--engine", "engines", multiple=True, help="Only caches of this engine; may be repeated.")
@wide_option
@json_option
@calls_an_index
def score(client: SyncClient, as_json: bool, engines: tuple[str, ...], **options: Any) -> None:
    """Ask an index which caches hold the beginning of a request."""
    from kvgrpc.v1 import index_service_pb2

    request = index_service_pb2.ScoreRequest(prompts=[prompt_of(**options)], engines=engines, with_freshness=True)
    response = client.score(request)
    if as_json:
        return show_json(response)
    columns = ("engine", "#dp", "#on device", "#to host", "#to disk", "#anywhere", "#page", *_FRESH)
    (found,) = response.prompts
    rows = [
        (
            each.engine,
            each.dp,
            each.device_blocks,
            each.host_blocks,
            each.disk_blocks,
            each.blocks,
            each.page_tokens,
            *_fresh(each.freshness),
        )
        for each in found.scores
    ]
    first_to_go = ("#page", "#idle", "#to disk", "#to host")
    show_table(f"{found.blocks} blocks at {client.address}", columns, rows, "no cache holds the first", first_to_go)


@click.command()
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="Only those; may be repeated.")
@wide_option
@json_option
@calls_an_index
def sources(client: SyncClient, as_json: bool, states: tuple[str, ...]) -> None:
    """List the caches that an index follows, and what it cannot follow."""
    from kvgrpc.v1 import index_service_pb2

    found = client.list_sources(
        states=[index_service_pb2.IndexSourceState.Value(f"INDEX_SOURCE_STATE_{state.upper()}") for state in states]
    )
    if as_json:
        return show_json(*found)
    columns = ("engine", "#dp", "model", "labels", "address", "blocks", *_FRESH, "log", "#next", "last error")
    rows = [
        (
            source.engine,
            source.dp,
            source.model,
            ", ".join(f"{name}={value}" for name, value in sorted(source.labels.items())),
            source.address,
            ", ".join(f"{held.medium} {held.blocks}" for held in source.blocks),
            *_fresh(source.freshness),
            source.freshness.log_id,
            source.freshness.next_sequence,
            source.last_error,
        )
        for source in found
    ]
    first_to_go = ("log", "#next", "labels", "model", "address", "#idle", "blocks")
    show_table(f"Caches that {client.address} follows", columns, rows, "none yet", first_to_go)
    for line in found.not_followed:
        click.echo(f"not followed: {line}", err=True)


def prompt_of(hashes: tuple[str, ...], prompt_file: str | None, **more: Any) -> index_service_pb2.ScorePrompt:
    """The beginning of a request as the options of ``names_a_prompt`` say it."""
    from kvgrpc.v1 import index_service_pb2

    if bool(hashes) == bool(prompt_file):
        raise click.UsageError("name the beginning of a request by --hash or by --tokens, one of the two")
    prompt = index_service_pb2.ScorePrompt(model=more["model"], labels=_labels(more["labels"]))
    if prompt_file is None:
        prompt.block_hashes.values.extend(_hash(text) for text in hashes)
    elif more["vllm"] or more["vllm_hash_seed"] is not None or more["vllm_lora"]:
        _fill_vllm(prompt.vllm, _tokens(prompt_file), **more)
    else:
        _fill_sglang(prompt.sglang, _tokens(prompt_file), **more)
    return prompt


def prompt_of_other_kind(
    first: index_service_pb2.ScorePrompt, prompt_file: str | None, **more: Any
) -> index_service_pb2.ScorePrompt:
    """Names a request for vLLM's engines where ``first`` is for SGLang's, and the other way round."""
    from kvgrpc.v1 import index_service_pb2

    if prompt_file is None:
        raise click.UsageError("--both-kinds needs --tokens: hashes are of one kind")
    if bool(more["vllm_lora"]) != bool(more["lora_id"]):
        raise click.UsageError("--both-kinds with an adapter needs --lora-id and --vllm-lora: each kind names it so")
    if more["extra_key"]:
        raise click.UsageError(
            "--both-kinds goes without --extra-key: vLLM has none, and its pages are no such request's"
        )
    other = index_service_pb2.ScorePrompt()
    if first.HasField("vllm"):
        _fill_sglang(other.sglang, _tokens(prompt_file), **more)
    else:
        _fill_vllm(other.vllm, _tokens(prompt_file), **more)
    return other


def _labels(texts: tuple[str, ...]) -> dict[str, str]:
    try:
        return dict(labels_of(texts))
    except InvalidRequest as error:
        raise click.BadParameter(str(error), param_hint="--label") from None


def _fill_vllm(prompt: index_service_pb2.VllmPrompt, tokens: list[int], **more: Any) -> None:
    prompt.token_ids.extend(tokens)
    prompt.page_tokens, prompt.cache_salt = more["page_tokens"], more["cache_salt"]
    prompt.hash_seed = more["vllm_hash_seed"] or ""
    if more["vllm_lora"]:
        prompt.lora.name, prompt.lora.path = more["vllm_lora"]


def _fill_sglang(prompt: index_service_pb2.SglangPrompt, tokens: list[int], **more: Any) -> None:
    prompt.token_ids.extend(tokens)
    prompt.page_tokens, prompt.cache_salt, prompt.bigram = more["page_tokens"], more["cache_salt"], more["bigram"]
    prompt.dynamo_format = more["dynamo"]
    if more["extra_key"] is not None:
        prompt.extra_key = more["extra_key"]
    if more["lora_id"] is not None:
        prompt.lora_id = more["lora_id"]


def _hash(text: str) -> int:
    try:
        value = int(text, 0)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no integer", param_hint="--hash") from None
    if not -(2**63) <= value < 2**64:
        raise click.BadParameter(f"{text} has more than 64 bits", param_hint="--hash")
    return value & 0xFFFF_FFFF_FFFF_FFFF


def _tokens(path: str) -> list[int]:
    try:
        tokens = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is no JSON: {error}", param_hint="--tokens") from None
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise click.BadParameter(f"{path} is no array of integers of 0 to 2^32-1", param_hint="--tokens")
    return tokens


def _fresh(freshness: index_service_pb2.Freshness) -> tuple[str, int, str]:
    from kvgrpc.v1 import index_service_pb2

    state = value_name(index_service_pb2.IndexSourceState, freshness.state).lower()
    idle = seconds(seconds_of(freshness.idle_time)) if freshness.HasField("idle_time") else "-"
    return state, freshness.lag_batches, idle


def _standing(follower: SyncEventFollower) -> str:
    fresh, counts = follower.freshness, follower.counts
    healed = f"{counts.snapshots} snapshots, {counts.replays} replays, {counts.new_logs} new logs"
    known = f"{fresh.state.value:<12} log {fresh.log_id[:8] or '-':<8} next {fresh.next_sequence} lag {fresh.lag}"
    digests = f"digests {counts.digests_equal} equal {counts.digests_different} not"
    return f"{known}: {held(follower.blocks)} ({healed}, {digests})"
