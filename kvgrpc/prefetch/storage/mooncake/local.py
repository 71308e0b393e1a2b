"""A Mooncake Store on this machine, for tests and trials: a master and owners that end with the context."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from kvgrpc.errors import FeatureDisabled, PeerUnreachable
from kvgrpc.net import split_with_port

_START_SECONDS = 30.0
_END_SECONDS = 5.0


class LocalStore:
    """Use it as a context. ``address`` is the master's; it stays the same when the master is started again."""

    def __init__(
        self, owners: int = 1, owner_bytes: int = 64 << 20, *, client_ttl: int = 10, lease_ms: int = 5000
    ) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self.owners: list[subprocess.Popen[bytes]] = []
        self._owner_bytes = owner_bytes
        self._settings = [f"--client_ttl={client_ttl}", f"--default_kv_lease_ttl={lease_ms}", "--rpc_thread_num=2"]
        self._count = owners
        self.master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalStore:
        try:
            self.start_master()
            for _ in range(self._count):
                self.add_owner()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start_master(self) -> None:
        """Raises FeatureDisabled without Mooncake, PeerUnreachable when it does not start."""
        port = split_with_port(self.address)[1]
        ports = [f"--rpc_port={port}", f"--metrics_port={_free_port()}"]
        hosts = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        # It has no other way to notice that whoever started it was killed.
        with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self.master = subprocess.Popen(
            [*with_us, master_command(), *hosts, *ports, *self._settings, "--logtostderr=1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.master.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", int(port)), 1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        raise PeerUnreachable(f"mooncake_master did not start on {self.address}", metadata={"address": self.address})

    def kill_master(self) -> None:
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            self.master = None

    def add_owner(self, nbytes: int = 0) -> subprocess.Popen[bytes]:
        """One more process that lends memory; returns when it does. Raises PeerUnreachable."""
        command = [sys.executable, "-m", "kvgrpc.prefetch.storage.mooncake.owner", "--until-eof"]
        owner = subprocess.Popen(
            [*command, "--master", self.address, "--bytes", str(nbytes or self._owner_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.owners.append(owner)
        assert owner.stdout is not None
        if not owner.stdout.readline():
            raise PeerUnreachable("an owner of memory did not start", metadata={"address": self.address})
        return owner

    def close(self) -> None:
        for process in (*self.owners, *([self.master] if self.master else [])):
            process.kill()
            process.wait(_END_SECONDS)
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        self.owners, self.master = [], None


def master_command() -> str:
    """Path of the master that Mooncake's wheel brings. Raises FeatureDisabled."""
    beside = Path(sys.executable).parent / "mooncake_master"
    if beside.is_file() and os.access(beside, os.X_OK):
        return str(beside)
    remedy = "pip install 'kvgrpc[mooncake-cpu]' (or 'kvgrpc[mooncake]' with CUDA)"
    found = "is installed without its master" if importlib.util.find_spec("mooncake") else "is not installed"
    raise FeatureDisabled(
        f"Mooncake {found}: {remedy}", metadata={"feature": "storage.mooncake", "howToEnable": remedy}
    )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
