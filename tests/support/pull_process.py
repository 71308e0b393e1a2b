"""A rank with a cache in a process of its own, as a test orders it about: ``tests.support.pull_rank``."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import IO, Any

from tests.support import pull_rank
from tests.support.quick_start import Program


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
        self.process = Program(pull_rank.main, engine, registry, plane, *ports, namespace, log=log)

    def tell(self, do: str, **order: object) -> None:
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
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
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
