"""``kvgrpc demo``: one real hand-off on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


@click.command()
@click.option(
    "--data-plane",
    type=click.Choice(["mooncake", "shm"]),
    help="What moves the pages: Mooncake over TCP on loopback, or shared memory.  [default: mooncake where it loads]",
)
@click.option(
    "--storage",
    type=click.Choice(["file", "mooncake"]),
    default="file",
    show_default=True,
    help="Where the second act's conversation goes: files, or a Mooncake Store that the demo starts.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with one prompt a line, instead of the built-in ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("--keep-running", is_flag=True, help="Leave the servers up, and print commands that look at them.")
@click.option("--view", is_flag=True, help="Show it as a page in the browser meanwhile, as kvgrpc view; keeps running.")
def demo(
    data_plane: str | None, storage: str, prompts: Path | None, as_json: bool, keep_running: bool, view: bool
) -> None:
    """Prefill in one process, decode in another, and compare.

    Starts a registry, a prefill and a decode process, moves the KV cache of several prompts between them, and compares
    the tokens with those of a single process, and the live KV events with their replay. Exit code 0 only when all is
    equal.
    """
    try:
        from kvgrpc.demo.runner import DemoOptions, run
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] not in ("torch", "kvgrpc"):
            raise
        if missing.name == "kvgrpc.demo":
            raise click.ClickException("the demo is no part of the package: type `make demo` in a clone") from missing
        raise click.ClickException(
            f"the demo's engine needs {missing.name}: `make demo` installs it (PyPI's torch is about 5 GB)"
        ) from missing
    options = DemoOptions(data_plane, storage, prompts, as_json, keep_running or view)
    sys.exit(run(options, _page if view else None))


@contextmanager
def _page(registry: str) -> Iterator[str]:
    """``kvgrpc view`` of this registry, on a free port; its address."""
    from kvgrpc.cli.view.command import page_of
    from kvgrpc.client import SyncClient

    with SyncClient(registry) as client, page_of(client, "127.0.0.1:0", every=1.0) as address:
        yield address
