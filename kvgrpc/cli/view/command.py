"""The command: what it listens on, whom it lets in, and until when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import FILE, Seconds, calls_a_registry
from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import check_listen, is_local

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient


@click.command()
@click.option(
    "--listen", default="127.0.0.1:8080", show_default=True, help="HOST:PORT of the page; port 0: a free one."
)
@click.option("--every", type=Seconds(0.2, 60.0), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option(
    "--view-token-file",
    type=FILE,
    envvar="KVGRPC_VIEW_TOKEN_FILE",
    help="File with the password of the page; needed to listen beyond this host.",
)
@click.option("--allow-host", multiple=True, help="A name by which browsers may call the page; may be repeated.")
@click.option("--allow-actions", is_flag=True, help="Let the page cancel rooms; needs --view-token-file anywhere.")
@calls_a_registry
def view(
    client: SyncClient,
    listen: str,
    every: float,
    view_token_file: str | None,
    allow_host: tuple[str, ...],
    allow_actions: bool,
) -> None:
    """Show all ranks of a registry as a page in the browser, until Ctrl-C. Read-only without --allow-actions.

    With --view-token-file browsers ask for a user (any) and a password (the file's). The page is plain HTTP: on another
    host reach it through ssh -L or a proxy with TLS.
    """
    import threading

    check_listen(listen, "--listen", unix=False)
    if not is_local(listen) and not view_token_file:
        raise AddressNotAllowed(
            f"--listen: {listen} is reached from other hosts, and the page asks nobody who they are; "
            "give --view-token-file, or listen on 127.0.0.1 and use ssh -L",
            metadata={"address": listen, "configKey": "listen"},
        )
    if allow_actions and not view_token_file:
        raise click.UsageError("--allow-actions: whoever runs a browser on this host could act; give --view-token-file")
    client.list_engines()  # an address where no registry answers is said here, and not on the page
    with page_of(client, listen, every, _token_of(view_token_file), allow_host, allow_actions) as address:
        click.echo(f"http://{address}/  (the fleet of {client.address}; Ctrl-C ends it)")
        threading.Event().wait()  # until Ctrl-C


@contextmanager
def page_of(
    client: SyncClient, listen: str, every: float, token: str = "", names: Sequence[str] = (), actions: bool = False
) -> Iterator[str]:
    """Serves the page of the registry of ``client`` meanwhile; its address. ``actions``: it may cancel rooms."""
    from functools import partial

    from kvgrpc.cli.view.looking import Looking
    from kvgrpc.cli.view.room import cancel_room, look_at_room
    from kvgrpc.cli.view.server import ViewServer
    from kvgrpc.cli.view.state import look_at_fleet

    cancel = partial(cancel_room, client) if actions else None
    with (
        Looking(lambda: look_at_fleet(client), every) as looking,
        ViewServer(listen, looking, partial(look_at_room, client), token, names, cancel) as server,
    ):
        yield server.address


def _token_of(file: str | None) -> str:
    """The one word of ``file``; empty without one."""
    from kvgrpc.rpc.credentials.secrets import checked_token

    if file is None:
        return ""
    with open(file, "rb") as opened:
        return checked_token(opened.read(4096).decode("latin-1"), "--view-token-file", file)
