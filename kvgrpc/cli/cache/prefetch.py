"""``kvgrpc prefetch``: pages between the host memory of a rank and its storage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kvgrpc.cli.cache.prompt_pages import names_pages
from kvgrpc.cli.connection import Seconds, calls_a_cache, json_option
from kvgrpc.cli.names import reason_name, seconds_of, value_name
from kvgrpc.cli.output import show_json, show_record, show_table, size, wide_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import prefetch_service_pb2

NOT_DONE = 1
_ORDER = (
    click.option("--request-id", default="", help="Makes a repeat harmless; default: a new one."),
    click.option(
        "--within", type=Seconds(0.01, 3600.0), help="Seconds that it may take; default: the rank's own limit."
    ),
    click.option("--priority", type=click.IntRange(-1000, 1000), default=0, show_default=True, help="Smaller: sooner."),
    click.option("--tenant", default="", help="Tenants of one priority are served in turn."),
    click.option("--no-wait", is_flag=True, help="Do not wait for the end."),
)


@click.group()
def prefetch() -> None:
    """Bring pages of a prompt from storage to a rank's host memory, or back, and watch it."""


def orders(command: Any) -> Any:
    """The options of a start."""
    for option in reversed(_ORDER):
        command = option(command)
    return command


@prefetch.command()
@orders
@click.option("--from-engine", "engines", multiple=True, help="Pull from this engine only; may be repeated.")
@names_pages
@json_option
@calls_a_cache
def start(
    client: SyncClient,
    as_json: bool,
    pages: prefetch_service_pb2.PromptPages,
    request_id: str,
    within: float | None,
    priority: int,
    tenant: str,
    no_wait: bool,
    engines: tuple[str, ...],
) -> None:
    """Bring the leading pages of a prompt from storage to the host. Exit code 1: not all that was agreed came."""
    operation = client.start_prefetch(
        pages, request_id=request_id, timeout=within, priority=priority, tenant=tenant, engines=engines
    )
    follow(client, operation, as_json, no_wait)


@prefetch.command()
@orders
@names_pages
@json_option
@calls_a_cache
def backup(
    client: SyncClient,
    as_json: bool,
    pages: prefetch_service_pb2.PromptPages,
    request_id: str,
    within: float | None,
    priority: int,
    tenant: str,
    no_wait: bool,
) -> None:
    """Write the leading pages that the host has to storage."""
    operation = client.start_backup(pages, request_id=request_id, timeout=within, priority=priority, tenant=tenant)
    follow(client, operation, as_json, no_wait)


@prefetch.command()
@click.option("--near", is_flag=True, help="Ask device and host only, not storage.")
@names_pages
@json_option
@calls_a_cache
def lookup(client: SyncClient, as_json: bool, pages: prefetch_service_pb2.PromptPages, near: bool) -> None:
    """Tell how many leading pages of a prompt are where."""
    found = client.lookup(pages, without_storage=near)
    if as_json:
        return show_json(found)
    rows = [("device", found.device_pages), ("device or host", found.host_pages)]
    if not near:
        rows.append(("device, host or storage", found.storage_pages))
    shown = [(where, count, count * found.page_tokens, f"{_share(count, found.asked_pages)}") for where, count in rows]
    title = f"Leading pages of {found.asked_pages} at {client.address}"
    show_table(title, ("where", "#pages", "#tokens", "#of all"), shown, "none")


@prefetch.command(name="list")
@click.option("--open", "open_only", is_flag=True, help="Only those that have not ended.")
@wide_option
@json_option
@calls_a_cache
def list_(client: SyncClient, as_json: bool, open_only: bool) -> None:
    """List prefetches and backups of a rank."""
    found = client.list_operations(open_only=open_only)
    if as_json:
        return show_json(*found)
    columns = ("operation", "kind", "state", "why", "#pages", "#bytes", "#took", "tenant", "failure")
    rows = [
        (
            each.operation_id,
            kind_name(each),
            state_name(each),
            stop_name(each),
            f"{each.completed_pages}/{each.agreed_pages or each.asked_pages}",
            size(each.bytes),
            f"{seconds_of(each.took) * 1000:.0f} ms",
            each.tenant,
            reason_name(each.failure) if each.HasField("failure") else "",
        )
        for each in found
    ]
    first_to_go = ("tenant", "#bytes", "kind", "#took", "#pages", "why")
    show_table(f"Cache operations of {client.address}", columns, rows, "none", first_to_go)


@prefetch.command()
@click.argument("operation_ids", nargs=-1)
@json_option
@calls_a_cache
def watch(client: SyncClient, operation_ids: tuple[str, ...], as_json: bool) -> None:
    """Show operations as they change: those that are named until they end, or all until Ctrl-C."""
    for message in client.watch_operations(operation_ids):
        for each in message.operations:
            if as_json:
                show_json(each)
            else:
                print(one_line(each), flush=True)


@prefetch.command()
@click.argument("operation_id")
@json_option
@calls_a_cache
def cancel(client: SyncClient, operation_id: str, as_json: bool) -> None:
    """Cut one operation short; what is in place stays usable."""
    operation = client.terminate_prefetch(operation_id)
    show_json(operation) if as_json else show_operation(operation)


def follow(client: SyncClient, operation: prefetch_service_pb2.CacheOperation, as_json: bool, no_wait: bool) -> None:
    """Shows it until its end, and ends the command with 1 where it did not come to what was wanted."""
    from kvgrpc.v1 import prefetch_service_pb2 as pb

    if not no_wait and not operation.quiescent:
        states = _states(client, operation)
        if as_json:
            for operation in states:
                show_json(operation)
        else:
            operation = _with_progress(states, operation)
            show_operation(operation)
    elif as_json:
        show_json(operation)
    else:
        show_operation(operation)
    covered = operation.stop == pb.OPERATION_STOP_COVERED
    if not no_wait and operation.state != pb.OPERATION_STATE_DONE and not covered:
        sys.exit(NOT_DONE)


def _states(
    client: SyncClient, operation: prefetch_service_pb2.CacheOperation
) -> Iterator[prefetch_service_pb2.CacheOperation]:
    for message in client.watch_operations([operation.operation_id]):
        yield from message.operations


def _with_progress(
    states: Iterator[prefetch_service_pb2.CacheOperation], operation: prefetch_service_pb2.CacheOperation
) -> prefetch_service_pb2.CacheOperation:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pages"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(state_name(operation), total=operation.asked_pages)
        for operation in states:
            total = operation.agreed_pages or operation.asked_pages
            progress.update(bar, description=state_name(operation), total=total, completed=operation.completed_pages)
    return operation


def show_operation(operation: prefetch_service_pb2.CacheOperation) -> None:
    fields: list[tuple[str, object]] = [
        ("state", state_name(operation)),
        ("why", stop_name(operation)),
        ("pages asked", operation.asked_pages),
        ("covered already", operation.covered_pages),
        ("agreed", operation.agreed_pages),
        ("completed", operation.completed_pages),
        ("bytes", size(operation.bytes)),
        ("took", f"{seconds_of(operation.took) * 1000:.1f} ms"),
    ]
    if operation.retries:
        fields.append(("tries beyond the first", operation.retries))
    if not operation.quiescent:
        fields.append(("quiescent", False))
    if operation.HasField("failure"):
        fields += [("failure", reason_name(operation.failure)), ("", operation.failure.message)]
    show_record(f"{kind_name(operation)} {operation.operation_id}", fields)


def one_line(operation: prefetch_service_pb2.CacheOperation) -> str:
    pages = f"{operation.completed_pages}/{operation.agreed_pages or operation.asked_pages} pages"
    stop = stop_name(operation)
    return f"{operation.operation_id}  {kind_name(operation):<8} {state_name(operation):<12} {pages}" + (
        f"  {stop}" if stop else ""
    )


def kind_name(operation: prefetch_service_pb2.CacheOperation) -> str:
    from kvgrpc.v1 import prefetch_service_pb2 as pb

    return value_name(pb.OperationKind, operation.kind).lower()


def state_name(operation: prefetch_service_pb2.CacheOperation) -> str:
    from kvgrpc.v1 import prefetch_service_pb2 as pb

    return value_name(pb.OperationState, operation.state)


def stop_name(operation: prefetch_service_pb2.CacheOperation) -> str:
    from kvgrpc.v1 import prefetch_service_pb2 as pb

    return value_name(pb.OperationStop, operation.stop) if operation.stop else ""


def _share(count: int, whole: int) -> str:
    return f"{100 * count / whole:.0f} %" if whole else "-"
