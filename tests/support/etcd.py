"""A real etcd in a process of its own, for tests of registries over it and for what measures one."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_port

ETCD = shutil.which("etcd")


class Etcd:
    """One member that keeps its address and its data over restarts. ``fsync`` False: what it says is on disk may not
    be yet."""

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        self._folder = folder
        self._fsync = fsync
        self._client, self._peer = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._client}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Etcd:
        """Returns once it answers. Raises RuntimeError where etcd is not installed or does not start."""
        if ETCD is None:
            raise RuntimeError("etcd is not installed: .ci/setup etcd")
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{self._peer}"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    ETCD,
                    *("--name", "only", "--data-dir", str(self._folder / "data")),
                    *(() if self._fsync else ("--unsafe-no-fsync",)),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"only={peer}"),
                ],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + 30
        while not self._answers():
            if time.monotonic() >= end or self._process.poll() is not None:
                self.kill()
                raise RuntimeError(f"etcd does not answer: {(self._folder / 'log').read_text()[-2_000:]}")
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """As kill -9: data stay."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def lose_everything(self) -> None:
        """Only while it is killed."""
        shutil.rmtree(self._folder / "data")

    def _answers(self) -> bool:
        """Whether it has a leader: one that is killed before has written nothing, and never answers again."""
        asking = http.client.HTTPConnection(self.address, timeout=1)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(asking):
            asking.request("GET", "/health")
            return b'"true"' in asking.getresponse().read()
        return False


@contextlib.contextmanager
def running_etcd(*, fsync: bool = False) -> Iterator[Etcd]:
    with tempfile.TemporaryDirectory() as folder:
        etcd = Etcd(Path(folder), fsync=fsync).start()
        try:
            yield etcd
        finally:
            etcd.kill()
