"""The options that every command shares which calls a server, and the client that they make."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Concatenate

import click

from kvgrpc.cli.failures import ToldWith
from kvgrpc.cli.unreachable import next_step
from kvgrpc.errors import PeerUnreachable
from kvgrpc.net import check_target

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient

DEFAULT_SERVER = "127.0.0.1:8998"
FILE = click.Path(exists=True, dir_okay=False)


class Seconds(click.FloatRange):
    """A range without NaN, which is neither below nor above a bound, and which no wait ends after."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return found


OF_THE_SECRET = "File with the secret that tokens are made with (or set KVGRPC_TOKEN)."

json_option = click.option("--json", "as_json", is_flag=True, help="JSON, one message a line, as grpcurl names fields.")

_OPTIONS = (
    click.option(
        "-s",
        "--server",
        default=DEFAULT_SERVER,
        show_default=True,
        envvar="KVGRPC_SERVER",
        help="HOST:PORT or unix:/path of the registry or rank to ask. `kvgrpc ranks` lists where ranks listen.",
    ),
    click.option("--ca-file", type=FILE, envvar="KVGRPC_CA_FILE", help="Use TLS; who signs the server's certificate."),
    click.option("--cert-file", type=FILE, envvar="KVGRPC_CERT_FILE", help="Our own certificate, for mTLS."),
    click.option("--key-file", type=FILE, envvar="KVGRPC_KEY_FILE", help="Key of our own certificate."),
    click.option("--server-name", default="", envvar="KVGRPC_SERVER_NAME", help="Name in the server's certificate."),
    click.option("--token-file", type=FILE, envvar="KVGRPC_TOKEN_FILE", help=OF_THE_SECRET),
    click.option(
        "--audience", default="", help="HOST:PORT that the token names, where --server leads there by a tunnel."
    ),
    click.option(
        "--insecure", is_flag=True, envvar="KVGRPC_INSECURE", help="A token may go to another host in plaintext."
    ),
    click.option(
        "--timeout",
        type=Seconds(0.1, 3600.0),
        default=5.0,
        show_default=True,
        envvar="KVGRPC_TIMEOUT",
        help="Seconds that an answer may take.",
    ),
)


def secret_of_the_environment() -> str:
    """Of KVGRPC_TOKEN; empty: it is not set."""
    from kvgrpc.rpc.credentials.secrets import checked_token

    secret = os.environ.get("KVGRPC_TOKEN", "")
    return checked_token(secret, "KVGRPC_TOKEN") if secret else ""


OF_A_REGISTRY = "`kvgrpc serve registry` starts a registry; --server HOST:PORT names one."


def calls_a_registry(function: Callable[Concatenate[SyncClient, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection; it gets the client that they make as its first argument."""
    return _with_client(function, OF_A_REGISTRY)


def calls_a_rank(function: Callable[Concatenate[SyncClient, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection to a rank; else like ``calls_a_registry``."""
    return _with_client(function, "`kvgrpc ranks -s REGISTRY` lists where ranks listen; --server HOST:PORT names one.")


def calls_a_cache(function: Callable[Concatenate[SyncClient, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection to a rank that may be named by its engine: the server is a registry
    then."""

    named = click.option(
        "--engine", "cache_of", default="", help="Ask this engine's cache: --server is a registry then."
    )
    numbered = click.option("--dp", "cache_dp", type=click.IntRange(0), default=0, help="Which replica of that engine.")
    return named(numbered(calls_a_rank(function)))


def calls_an_index(function: Callable[Concatenate[SyncClient, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection to an index; else like ``calls_a_registry``."""
    return _with_client(
        function, "`kvgrpc serve index --registry REGISTRY` starts an index; --server HOST:PORT names one."
    )


def calls_a_server(function: Callable[Concatenate[SyncClient, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection for what registries and ranks answer alike."""
    return _with_client(
        function,
        "`kvgrpc serve registry` starts a registry, `kvgrpc ranks -s REGISTRY` lists where ranks listen; "
        "--server HOST:PORT names one of them.",
    )


def _with_client(function: Callable[Concatenate[SyncClient, ...], None], where: str) -> Callable[..., None]:
    """``where`` says how to find what the command asks, to whoever asked where nobody answers."""

    @functools.wraps(function)
    def run(connection: ConnectionOptions, *arguments: Any, **options: Any) -> None:
        from kvgrpc.client.engines import cache_address

        asked = OF_A_REGISTRY if options.get("fleet") else where
        engine, dp = options.pop("cache_of", ""), options.pop("cache_dp", 0)
        with connection.client(asked) as client:
            if not engine:
                return function(client, *arguments, **options)
            address = cache_address(client.get_engine(engine), dp)
        with replace(connection, server=address).client(asked) as rank:
            function(rank, *arguments, **options)

    return with_connection(run)


def with_connection(function: Callable[Concatenate[ConnectionOptions, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection, which need no library of gRPC; it gets them as one value."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        connection = ConnectionOptions(**{each.name: options.pop(each.name) for each in fields(ConnectionOptions)})
        function(connection, *arguments, **options)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """The options of a connection, as they were given."""

    server: str
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    server_name: str
    token_file: str | None
    audience: str
    insecure: bool
    timeout: float

    @contextlib.contextmanager
    def client(self, where: str) -> Iterator[SyncClient]:
        """A client of ``server``; ``where`` says how to find what is asked, where nobody answers."""
        from kvgrpc.client import ClientSecurity, SyncClient

        check_target(self.server, "--server")
        if self.audience:
            check_target(self.audience, "--audience")
        security = ClientSecurity(
            ca_file=self.ca_file or "",
            cert_file=self.cert_file or "",
            key_file=self.key_file or "",
            token="" if self.token_file else secret_of_the_environment(),
            token_file=self.token_file or "",
            server_name=self.server_name,
            insecure=self.insecure,
            audience=self.audience,
        )
        try:
            with SyncClient(self.server, security, self.timeout) as client:
                yield client
        except PeerUnreachable as error:
            raise ToldWith(error, next_step(self.server, with_tls=security.tls, where=where)) from error
