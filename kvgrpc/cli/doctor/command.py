"""``kvgrpc doctor``: can this machine run it, and what to type where it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import kvgrpc
from kvgrpc.cli.connection import OF_A_REGISTRY, ConnectionOptions, with_connection
from kvgrpc.cli.doctor.engine_findings import engine_findings
from kvgrpc.cli.doctor.finding import Finding
from kvgrpc.cli.doctor.fleet_findings import fleet_findings
from kvgrpc.cli.output import show_table, size
from kvgrpc.engines.compatibility import ENGINES
from kvgrpc.errors import KvGrpcError

CORE = (
    "grpcio",
    "grpcio-status",
    "grpcio-health-checking",
    "grpcio-reflection",
    "protobuf",
    "msgspec",
    "numpy",
    "pyzmq",
)
BROKEN_GRPCIO = ("1.83.0", "1.83.1")
DEFAULT_PORT = 8998
# Mooncake looks for host channel adapters, on a cold disk.
PLANE_SECONDS = 30.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(sorted(ENGINES)), help="Also what works with that engine."
)
@click.option("--fleet", is_flag=True, help="Instead: can this machine reach all ranks of the registry --server?")
@with_connection
def doctor(connection: ConnectionOptions, as_json: bool, engines: tuple[str, ...], fleet: bool) -> None:
    """Check the libraries, data planes and ports of this machine, and an engine that kvgrpc was installed beside.

    With --fleet: whether every rank and its data plane are reached from here, clocks, certificates, versions.
    Exit code 1 when something that every process needs is missing. What only some need (Mooncake, torch) is a note.
    """
    if fleet and engines:
        raise click.UsageError("--fleet looks at other machines, --engine at this one: give one of them")
    title = f"The ranks at {connection.server}, from here" if fleet else "This machine"
    if fleet:
        with connection.client(OF_A_REGISTRY) as client:
            findings = list(fleet_findings(client, connection.timeout))
    else:
        findings = [*examine(), *(finding for name in engines for finding in engine_findings(name))]
    if as_json:
        import json

        for finding in findings:
            print(json.dumps(vars(finding)))
    else:
        show_table(title, ("what", "state", "remark"), [(each.what, each.state, each.remark) for each in findings], "")
    sys.exit(any(finding.state == "missing" for finding in findings))


def examine() -> Iterator[Finding]:
    yield Finding(
        "kvgrpc", "ok", f"{kvgrpc.__version__}, {platform.python_implementation()} {platform.python_version()}"
    )
    yield from (package(name) for name in CORE)
    yield plane("shm", "moves pages between processes of one host")
    yield plane("mooncake", "moves pages between hosts, over TCP or RDMA")
    yield mooncake_ports()
    yield optional("torch", "the demo's engine", "demo")
    yield shared_memory()
    yield devices()
    yield port()


def package(name: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"pip install '{name}'")
    if name == "grpcio" and version in BROKEN_GRPCIO:
        return Finding(name, "missing", f"{version} is broken: pip install 'grpcio!=1.83.0,!=1.83.1'")
    return Finding(name, "ok", version)


def optional(name: str, purpose: str, extra: str) -> Finding:
    try:
        return Finding(name, "ok", f"{importlib.metadata.version(name)}, {purpose}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "note", f"not installed ({purpose}): pip install 'kvgrpc[{extra}]'")


def plane(name: str, purpose: str) -> Finding:
    """Opens it in a process of its own, and shows what that wrote to stderr only where it did not open.

    Mooncake complains there when all is well, and ends the process over some faults.
    """
    check = f"from kvgrpc.cli.doctor.command import open_and_close; open_and_close({name!r})"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", check], capture_output=True, text=True, errors="replace", timeout=PLANE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Finding(f"data plane {name}", "note", f"did not open within {PLANE_SECONDS:g} s")
    if ran.returncode == 0:
        return Finding(f"data plane {name}", "ok", purpose)
    sys.stderr.write(ran.stderr)
    why = ran.stdout.strip() or f"ended the process that opened it (exit code {ran.returncode})"
    return Finding(f"data plane {name}", "note", why)


def mooncake_ports() -> Finding:
    """Returns what no setting of it changes."""
    low, high = os.environ.get("MC_MIN_RPC_PORT", "15000"), os.environ.get("MC_MAX_RPC_PORT", "17000")
    return Finding(
        "Mooncake's ports",
        "note",
        f"{low} to {high} listen on every address, and whoever reaches them reads and writes KV pages or ends the "
        "process: let engines only through (docs/security.md has firewall lines)",
    )


def open_and_close(name: str) -> None:
    """In that process: says on stdout why it cannot."""
    from kvgrpc.dataplane import open_plane

    try:
        open_plane(name).close(1.0)
    except (KvGrpcError, OSError) as error:
        print(error.message if isinstance(error, KvGrpcError) else error)
        sys.exit(1)


def shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        return Finding("/dev/shm", "note", "not writable: the data plane shm cannot work here")
    free = shutil.disk_usage(folder).free
    return Finding("/dev/shm", "ok" if free > 2**28 else "note", f"{size(free)} free for the data plane shm")


def devices() -> Finding:
    folder = Path("/sys/class/infiniband")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return Finding("RDMA devices", "ok" if names else "note", ", ".join(names) or "none: Mooncake will use TCP")


def port() -> Finding:
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", DEFAULT_PORT)) == 0
    remark = "something listens: `kvgrpc info` says whether it is ours" if taken else "free for `kvgrpc serve registry`"
    return Finding(f"port {DEFAULT_PORT}", "note" if taken else "ok", remark)
