"""The scripts of examples/, run as an operator would, and HTTP requests to what they start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.engine import LOCAL, PAGE, ROOT

EXAMPLES = ROOT / "examples"
START_SECONDS = 400.0


class Script:
    """One script in a session of its own, with all that it starts."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name.replace('/', '-')}-{time.monotonic_ns()}.log"
        path = EXAMPLES / name
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(path), *arguments],
                cwd=path.parent,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_healthy(self, port: int, path: str = "/health") -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self._process.poll() is None, f"{self.name} ended\n{self.tail()}"
            with contextlib.suppress(OSError, urllib.error.URLError):
                get(port, path)
                return
            time.sleep(0.5)
        raise AssertionError(f"{self.name} did not answer on {port}\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait(5)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def run(name: str, *arguments: str, environment: Mapping[str, str], timeout: float = 60.0) -> str:
    """What a script that ends says on its standard output."""
    path = EXAMPLES / name
    command = [str(path), *arguments]
    done = subprocess.run(
        command, cwd=path.parent, env=dict(environment), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def post(
    port: int, path: str, body: Mapping[str, Any], timeout: float = 60.0, headers: Mapping[str, str] | None = None
) -> Any:
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"http://{LOCAL}:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://{LOCAL}:{port}{path}", timeout=10) as answer:
        return bytes(answer.read()).decode()


# docs/engines/sglang.md, "On a machine without a GPU".
WITHOUT_GPU = (
    f"--skip-tokenizer-init --device cpu --dtype float32 --page-size {PAGE} --attention-backend torch_native"
    " --sampling-backend pytorch --grammar-backend none --disable-overlap-schedule --mem-fraction-static 0.5"
    " --max-running-requests 8 --context-length 512 --max-total-tokens 4096"
).split()
