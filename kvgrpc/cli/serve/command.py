"""``kvgrpc serve registry``, ``index`` and ``relay``: the kvgrpc processes that need no engine of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvgrpc.cli.connection import DEFAULT_SERVER, FILE, Seconds
from kvgrpc.cli.events.contents import DP
from kvgrpc.cli.serve.native import become_native

if TYPE_CHECKING:
    from kvgrpc.server import EventRelay, IndexServer, RegistryServer

DEFAULT_INDEX = "127.0.0.1:8997"
DEFAULT_RELAY = "127.0.0.1:8996"

_OPTIONS = (
    click.option("--cert-file", type=FILE, envvar="KVGRPC_CERT_FILE", help="Serve TLS with this certificate (PEM)."),
    click.option("--key-file", type=FILE, envvar="KVGRPC_KEY_FILE", help="Key of the certificate."),
    click.option(
        "--client-ca-file",
        type=FILE,
        envvar="KVGRPC_CLIENT_CA_FILE",
        help="mTLS: clients need a certificate signed by this; a name in it ends in .rank, .consumer or .operator.",
    ),
    click.option(
        "--tokens-file",
        type=FILE,
        envvar="KVGRPC_TOKENS_FILE",
        help="Callers prove a secret of this file: a line each, rank:SECRET, consumer:SECRET or operator:SECRET.",
    ),
    click.option(
        "--audience",
        default="",
        metavar="HOST:PORT,...",
        envvar="KVGRPC_AUDIENCE",
        help="Tokens may name these: addresses by which clients dial it, besides --listen (a Service, a proxy).",
    ),
    click.option(
        "--health-without-token/--health-needs-token",
        default=True,
        show_default=True,
        envvar="KVGRPC_HEALTH_WITHOUT_TOKEN",
        help="Whether health checks (only those) need a token too.",
    ),
    click.option(
        "--insecure", is_flag=True, envvar="KVGRPC_INSECURE", help="Plaintext on an address that others reach is meant."
    ),
    click.option(
        "--metrics-listen",
        default="",
        envvar="KVGRPC_METRICS_LISTEN",
        help="HOST:PORT of /metrics (Prometheus), /livez and /readyz (a kubelet), over HTTP.",
    ),
    click.option(
        "--call-limits",
        default="",
        metavar="JSON",
        envvar="KVGRPC_CALL_LIMITS",
        help="""Calls at once, of all callers and of one: '{"watches_per_caller": 32}' (docs/bounds.md).""",
    ),
    click.option(
        "--log-level",
        type=click.Choice(("DEBUG", "INFO", "WARNING", "ERROR"), case_sensitive=False),
        default="INFO",
        show_default=True,
        envvar="KVGRPC_LOG_LEVEL",
    ),
    click.option(
        "--log-format",
        type=click.Choice(("text", "json"), case_sensitive=False),
        default="text",
        show_default=True,
        envvar="KVGRPC_LOG_FORMAT",
        help="json: an object a line.",
    ),
)


def serves(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a server; it gets what they make as ``security`` and ``insecure``."""

    @functools.wraps(function)
    def run(
        *,
        cert_file: str | None,
        key_file: str | None,
        client_ca_file: str | None,
        tokens_file: str | None,
        audience: str,
        health_without_token: bool,
        insecure: bool,
        call_limits: str,
        log_level: str,
        log_format: str,
        **options: Any,
    ) -> None:
        from kvgrpc.observability import logging
        from kvgrpc.rpc.interceptors import CallLimits
        from kvgrpc.rpc.security import ServerSecurity
        from kvgrpc.settings import convert

        logging.configure(log_level.upper(), as_json=log_format == "json")
        security = ServerSecurity(
            cert_file=cert_file or "",
            key_file=key_file or "",
            client_ca_file=client_ca_file or "",
            token_file=tokens_file or "",
            health_without_token=health_without_token,
            insecure=insecure,
            audience=convert("audience", audience, tuple[str, ...]),
        )
        limits = convert("call_limits", call_limits, CallLimits) if call_limits else None
        function(security=security, insecure=insecure, call_limits=limits, **options)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


@click.group()
def serve() -> None:
    """Run a server in the foreground."""


@serve.command()
@click.option(
    "--listen",
    default=DEFAULT_SERVER,
    show_default=True,
    envvar="KVGRPC_LISTEN",
    help="HOST:PORT (port 0: a free one) or unix:/path.",
)
@click.option(
    "--lease-ttl",
    type=Seconds(1.0, 600.0),
    default=10.0,
    show_default=True,
    envvar="KVGRPC_LEASE_TTL",
    help="Seconds that a row lives without a renewal.",
)
@click.option(
    "--store",
    type=click.Choice(["memory", "etcd"]),
    default="memory",
    show_default=True,
    envvar="KVGRPC_STORE",
    help="Where rows are: in this process, or in etcd, where several registries share them.",
)
@click.option("--etcd", multiple=True, envvar="KVGRPC_ETCD", help="HOST:PORT of a member of etcd; may repeat.")
@click.option("--etcd-prefix", default="", envvar="KVGRPC_ETCD_PREFIX", help="Keys begin with it (/kvgrpc/registry/).")
@click.option("--etcd-ca-file", type=FILE, envvar="KVGRPC_ETCD_CA_FILE", help="TLS to etcd, trusting this (PEM).")
@click.option("--etcd-cert-file", type=FILE, envvar="KVGRPC_ETCD_CERT_FILE", help="Our certificate for etcd.")
@click.option("--etcd-key-file", type=FILE, envvar="KVGRPC_ETCD_KEY_FILE", help="Key of that certificate.")
@serves
def registry(
    store: str,
    etcd: tuple[str, ...],
    etcd_prefix: str,
    etcd_ca_file: str | None,
    etcd_cert_file: str | None,
    etcd_key_file: str | None,
    listen: str,
    lease_ttl: float,
    insecure: bool,
    **options: Any,
) -> None:
    """Run a registry: who serves what, with leases. In memory, ranks register again after a restart; with --store
    etcd, all registries over one etcd are one, and any of them may stop.

    Prints one line with the bound address once it serves. SIGTERM and Ctrl-C drain it.
    """
    from kvgrpc.rpc.security import ClientSecurity
    from kvgrpc.server import RegistryServer, etcd_store, serve

    if (store == "etcd") != bool(etcd):
        raise click.UsageError("--store etcd needs --etcd HOST:PORT, and --etcd needs --store etcd")
    calls = ClientSecurity(ca_file=etcd_ca_file or "", cert_file=etcd_cert_file or "", key_file=etcd_key_file or "")
    rows = etcd_store(etcd, lease_ttl, etcd_prefix, calls) if etcd else None
    server = RegistryServer([listen], lease_ttl=lease_ttl, store=rows, **options)
    serve(server, functools.partial(_say_where, "registry"))


@serve.command()
@click.option(
    "--listen",
    default=DEFAULT_INDEX,
    show_default=True,
    envvar="KVGRPC_LISTEN",
    help="HOST:PORT (port 0: a free one) or unix:/path.",
)
@click.option(
    "--registry",
    default="",
    envvar="KVGRPC_REGISTRY",
    help="Follow every engine that this registry lists (replicas: with commas).",
)
@click.option(
    "--source", "sources", multiple=True, help="Follow the streams of the rank at this HOST:PORT; may be repeated."
)
@click.option("--live", is_flag=True, help="Take batches from ZMQ PUB; Watches fill what it lost.")
@click.option("--saved", default="", metavar="FILE", help="Save what it knows there, and go on from it at a start.")
@click.option("--ca-file", type=FILE, envvar="KVGRPC_CA_FILE", help="Call ranks with TLS; who signs them.")
@click.option("--token-file", type=FILE, envvar="KVGRPC_TOKEN_FILE", help="Call ranks with the secret in this file.")
@click.option("--native", is_flag=True, help="Run kvgrpc-index, the index in Rust, where it is installed: far faster.")
@serves
def index(
    listen: str, ca_file: str | None, token_file: str | None, insecure: bool, native: bool, **options: Any
) -> None:
    """Run an index: it follows the caches of many engines, and tells routers who holds the beginning of a request.

    Prints one line with the bound address once it serves. SIGTERM and Ctrl-C end it.
    """
    from kvgrpc.rpc.security import ClientSecurity
    from kvgrpc.server import IndexServer, serve

    if not options["registry"] and not options["sources"]:
        raise click.UsageError("nothing to follow: name a --registry, or ranks by --source")
    if native:
        become_native(
            listen,
            options["security"],
            registry=options["registry"],
            sources=options["sources"],
            saved=options["saved"],
            metrics_listen=options["metrics_listen"],
            ca_file=ca_file,
            token_file=token_file,
            insecure=insecure,
            call_limits=options["call_limits"],
            lacking={"--live": options["live"]},
        )
    calls = ClientSecurity(ca_file=ca_file or "", token_file=token_file or "", insecure=insecure)
    serve(IndexServer([listen], client_security=calls, **options), functools.partial(_say_where, "index"))


@serve.command()
@click.argument("endpoint")
@click.option(
    "--listen",
    default=DEFAULT_RELAY,
    show_default=True,
    envvar="KVGRPC_LISTEN",
    help="HOST:PORT (port 0: a free one) or unix:/path.",
)
@click.option("--engine", required=True, envvar="KVGRPC_ENGINE", help="Name of the engine whose events these are.")
@click.option("--dp", type=DP, default=0, show_default=True, help="Its data-parallel rank.")
@click.option("--replay", default="", help="Its replay endpoint, tcp://HOST:PORT; without one, what PUB loses is lost.")
@click.option("--topic", default="", help="Only messages whose topic begins so.")
@click.option(
    "--events",
    default="",
    envvar="KVGRPC_EVENTS",
    help='Of the journal and its readers, as JSON: \'{"buffer_steps": 20000, "max_watches": 64}\'.',
)
@serves
def relay(insecure: bool, metrics_listen: str, **options: Any) -> None:
    """Follow the ZMQ events of an engine that runs without kvgrpc, at ENDPOINT (tcp://HOST:PORT), and serve them with a
    journal: streams, Watch, snapshots.

    Prints one line with the bound address once it serves. SIGTERM and Ctrl-C end it.
    """
    from kvgrpc.server import EventRelay, serve

    if metrics_listen:
        raise click.UsageError("a relay serves no metrics")
    serve(EventRelay(**options), functools.partial(_say_where, "relay"))


def _say_where(what: str, server: RegistryServer | IndexServer | EventRelay) -> None:
    if server.metrics_address:
        click.echo(f"metrics at {server.metrics_address}")
    click.echo(f"kvgrpc {what} listens on {server.address}")
