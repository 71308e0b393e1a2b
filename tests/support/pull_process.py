"""A rank with a cache in a process of its own, as a test orders it about: ``tests.support.pull_rank``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any


class Process:
    """``ports``: where it serves and where its pages are lent. Not for two threads at once but for ``signal``."""

    def __init__(
        self,
        engine: str,
        registry: str,
        plane: str,
        ports: tuple[str, str] = ("127.0.0.1:0", "127.0.0.1:0"),
        namespace: str = "",
        log: IO[bytes] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.pull_rank", engine, registry, plane, *ports, namespace],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": "."},
        )

    def tell(self, do: str, **order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **order: object) -> dict[str, Any]:
        self.tell(do, **order)
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(20.0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
