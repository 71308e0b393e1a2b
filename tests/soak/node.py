"""Child processes of the soak: ranks that may be killed and stopped, and the engines that they make up."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.orders import Opened


class Node:
    """One child process, started again after each kill. Its pipe carries lists."""

    def __init__(
        self, name: str, log: Path, target: Callable[..., None], arguments: Callable[[], tuple[Any, ...]]
    ) -> None:
        self.name = name
        self._log = log
        self._target, self._arguments = target, arguments
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=self._target, args=(child, self._log, *self._arguments()), daemon=True)
        self.process.start()
        child.close()
        self._opened = self._stopped = False

    @property
    def is_open(self) -> bool:
        return self._opened and not self._stopped

    def receive(self) -> Iterator[object]:
        """What it said since; nothing once it is dead."""
        try:
            while self.pipe.poll(0):
                for said in self.pipe.recv():
                    self._opened |= isinstance(said, Opened)
                    yield said
        except (EOFError, ConnectionError):
            self._opened = False

    def order(self, what: object) -> None:
        try:
            self.pipe.send([what])
        except OSError:
            self._opened = False

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join(10.0)
        self.pipe.close()
        self._opened = False

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self._stopped = False

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@dataclass(frozen=True, eq=False)
class Engine:
    """The ranks of one engine, in the order of their tensor-parallel coordinates."""

    name: str
    role: str
    nodes: list[Node]

    @property
    def tp(self) -> int:
        return len(self.nodes)

    @property
    def is_open(self) -> bool:
        return all(node.is_open for node in self.nodes)
