"""``kvgrpc token``: what other programs send to prove themselves."""

from __future__ import annotations

import click

from kvgrpc.cli.connection import FILE, OF_THE_SECRET, secret_of_the_environment
from kvgrpc.net import check_target


@click.command()
@click.argument("target", metavar="TARGET")
@click.option("--token-file", type=FILE, envvar="KVGRPC_TOKEN_FILE", help=OF_THE_SECRET)
def token(target: str, token_file: str | None) -> None:
    """Print the header that proves us to TARGET for a minute, and to nobody else.

    TARGET is the HOST:PORT or unix:/path that is dialled. grpcurl -H "$(kvgrpc token 10.0.0.7:9001)" 10.0.0.7:9001 ...
    """
    from kvgrpc.rpc.credentials.tokens import AUTHORIZATION
    from kvgrpc.rpc.security import ClientSecurity

    check_target(target, "TARGET")
    secret = "" if token_file else secret_of_the_environment()
    header = ClientSecurity(token=secret, token_file=token_file or "").header_source(target)
    if header is None:
        raise click.UsageError("no secret: give --token-file, or set KVGRPC_TOKEN_FILE or KVGRPC_TOKEN")
    click.echo(f"{AUTHORIZATION}: {header()}")
