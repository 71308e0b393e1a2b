"""``kvgrpc cache``: the tiers of a rank's hierarchical cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvgrpc.cli.cache.prompt_pages import names_pages
from kvgrpc.cli.connection import Seconds, calls_a_cache, json_option
from kvgrpc.cli.names import incarnation_name, tier_name
from kvgrpc.cli.output import show_json, show_record, show_table, size, wide_option

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import prefetch_service_pb2

TIERS = ("device", "host", "storage")


@click.group()
def cache() -> None:
    """Look at the tiers of a rank's cache, drop pages, keep pages."""


@cache.command()
@wide_option
@json_option
@calls_a_cache
def info(client: SyncClient, as_json: bool) -> None:
    """Show what the cache is made of and how full its tiers are."""
    found = client.get_cache_info()
    if as_json:
        return show_json(found)
    namespace = found.cache_namespace
    storage = (found.storage_backend or "none") + ("" if found.storage_healthy else f" ({found.storage_detail})")
    fields: list[tuple[str, object]] = [
        ("model", namespace.model),
        ("dtype", namespace.dtype),
        ("host layout", namespace.layout),
        ("tokens of a page", namespace.page_tokens),
        ("storage", storage if found.storage_backend else "none"),
        ("write policy", found.write_policy),
        ("stop policy", found.stop_policy),
        ("threshold", f"{found.threshold_tokens} tokens"),
        ("prefetches hold", f"{found.occupied_pages} of {found.occupied_limit} pages"),
        ("open operations", found.open_operations),
        ("ranks that agree", found.agreeing_ranks),
    ]
    show_record(f"Cache of {incarnation_name(found.rank)}", fields)
    columns = ("tier", "#pages", "#used", "#on their way", "#bytes of a page", "#full", "counts")
    rows = [
        (
            tier_name(use),
            use.pages or "",
            use.used_pages,
            use.reserved_pages,
            size(use.page_bytes),
            f"{100 * use.used_pages / use.pages:.0f} %" if use.pages else "",
            " ".join(f"{name} {count}" for name, count in sorted(use.counts.items())),
        )
        for use in found.tiers
    ]
    show_table("Tiers", columns, rows, "none", ("#bytes of a page", "#on their way"))


@cache.command()
@click.option("--tier", "tiers", type=click.Choice(TIERS), multiple=True, required=True, help="May be repeated.")
@click.option("--extra-key", default=None, help="Only pages of this namespace within the model.")
@click.option("--dry-run", is_flag=True, help="Count only.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@calls_a_cache
def purge(
    client: SyncClient, as_json: bool, tiers: tuple[str, ...], extra_key: str | None, dry_run: bool, yes: bool
) -> None:
    """Drop pages that nobody uses. Requests that need them compute them again."""
    from kvgrpc.v1 import common_pb2
    from kvgrpc.v1 import prefetch_service_pb2 as pb

    namespace = client.get_cache_info().cache_namespace
    if not dry_run and not yes:
        what = f"the {' and '.join(tiers)} pages of {namespace.model} at {client.address}"
        click.confirm(f"Drop {what}?", abort=True, err=True)
    request = pb.PurgePagesRequest(
        cache_namespace=namespace,
        tiers=[common_pb2.Tier.Value(f"TIER_{tier.upper()}") for tier in tiers],
        extra_key=extra_key,
        dry_run=dry_run,
    )
    found = client.purge_pages(request)
    if as_json:
        return show_json(found)
    in_storage = found.storage_pages if found.HasField("storage_pages") else "unknown: this backend cannot count"
    counts = (found.device_pages, found.host_pages, in_storage)
    fields: list[tuple[str, object]] = [
        (tier, count) for tier, count in zip(TIERS, counts, strict=True) if tier in tiers
    ]
    if found.storage_known_only:
        fields.append(("of storage", "only pages that device or host know; its keys tell no extra key"))
    show_record("Would go" if dry_run else "Went", [*fields, ("stay, in use", found.kept_pages)])


@cache.command()
@click.option(
    "--for", "duration", type=Seconds(0.0, 3600.0), default=60.0, show_default=True, help="Seconds; 0 ends it."
)
@names_pages
@json_option
@calls_a_cache
def pin(client: SyncClient, as_json: bool, pages: prefetch_service_pb2.PromptPages, duration: float) -> None:
    """Keep the leading pages of a prompt that device and host have from eviction, for a time."""
    found = client.pin_pages(pages, duration)
    if as_json:
        return show_json(found)
    show_record("Pinned", [("pages", found.pinned_pages), ("until", found.until.ToJsonString())])
