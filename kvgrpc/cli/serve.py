"""``kvgrpc serve registry``: the one kvgrpc process that needs no engine."""

from __future__ import annotations

import click

from kvgrpc.cli.connection import DEFAULT_SERVER, FILE


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
    type=click.FloatRange(1.0, 600.0),
    default=10.0,
    show_default=True,
    envvar="KVGRPC_LEASE_TTL",
    help="Seconds that a row lives without a renewal.",
)
@click.option("--cert-file", type=FILE, envvar="KVGRPC_CERT_FILE", help="Serve TLS with this certificate (PEM).")
@click.option("--key-file", type=FILE, envvar="KVGRPC_KEY_FILE", help="Key of the certificate.")
@click.option(
    "--client-ca-file",
    type=FILE,
    envvar="KVGRPC_CLIENT_CA_FILE",
    help="mTLS: clients need a certificate signed by this; a name in it ends in .rank, .consumer or .operator.",
)
@click.option(
    "--tokens-file",
    type=FILE,
    envvar="KVGRPC_TOKENS_FILE",
    help="Callers need a token of this file: a line each, rank:SECRET, consumer:SECRET or operator:SECRET.",
)
@click.option(
    "--health-without-token/--health-needs-token",
    default=True,
    show_default=True,
    envvar="KVGRPC_HEALTH_WITHOUT_TOKEN",
    help="Whether health checks (only those) need a token too.",
)
@click.option(
    "--insecure", is_flag=True, envvar="KVGRPC_INSECURE", help="Plaintext on an address that others reach is meant."
)
@click.option(
    "--metrics-listen",
    default="",
    envvar="KVGRPC_METRICS_LISTEN",
    help="HOST:PORT of /metrics (Prometheus), /livez and /readyz (a kubelet), over HTTP.",
)
@click.option("--log-level", default="INFO", show_default=True, envvar="KVGRPC_LOG_LEVEL", help="DEBUG, INFO, WARNING.")
def registry(
    listen: str,
    lease_ttl: float,
    cert_file: str | None,
    key_file: str | None,
    client_ca_file: str | None,
    tokens_file: str | None,
    health_without_token: bool,
    insecure: bool,
    metrics_listen: str,
    log_level: str,
) -> None:
    """Run a registry: who serves what, with leases. State is in memory; ranks register again after a restart.

    Prints one line with the bound address once it serves. SIGTERM and Ctrl-C drain it.
    """
    from kvgrpc.observability import logging
    from kvgrpc.rpc.security import ServerSecurity
    from kvgrpc.server import RegistryServer, serve_registry

    logging.configure(log_level.upper())
    security = ServerSecurity(
        cert_file=cert_file or "",
        key_file=key_file or "",
        client_ca_file=client_ca_file or "",
        token_file=tokens_file or "",
        health_without_token=health_without_token,
        insecure=insecure,
    )

    def ready(server: RegistryServer) -> None:
        if server.metrics_address:
            click.echo(f"metrics at {server.metrics_address}")
        click.echo(f"kvgrpc registry listens on {server.address}")

    serve_registry(listen, security=security, lease_ttl=lease_ttl, metrics_listen=metrics_listen, on_ready=ready)
