"""Processes of tests that start at once: copies of one that has loaded what they need, and has begun nothing.

To load it takes a second and more of a core, and the tests start hundreds. A copy is a process as any other one, to be
killed, stopped and looked at. Where a test changed the environment, which libraries read when they are loaded, it
begins from nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import IO, Any

_LOADED = [
    *("kvgrpc.server", "kvgrpc.dataplane.shm", "kvgrpc.prefetch.storage.file.backend"),
    *("tests.support.rank_host", "tests.support.faults.dataplane", "tests.support.pull_rank"),
]
# Names the test that runs, which is nobody's business.
_NOT_READ = "PYTEST_CURRENT_TEST"
_environment: dict[str, str] = {}


def process_of(target: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    """A process that is to run this, and to die with its parent. It has not been started."""
    now = {name: value for name, value in os.environ.items() if name != _NOT_READ}
    if not _environment:
        _environment.update(now)
    if now != _environment:
        return multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context.Process(target=_elsewhere, args=(target, *arguments), daemon=True)


class Program:
    """``main`` with these words behind its name, as a program of its own. ``stdin`` and ``stdout``: pipes of lines."""

    def __init__(self, main: Callable[[], None], *words: str, log: IO[bytes] | None = None) -> None:
        takes, writes = os.pipe()
        reads, gives = os.pipe()
        ends = [_Descriptor(takes), _Descriptor(gives), _Descriptor(2 if log is None else log.fileno())]
        self._process = process_of(_as_a_program, (main, words, *ends))
        self._process.start()
        os.close(takes)
        os.close(gives)
        self.stdin, self.stdout = os.fdopen(writes, "w"), os.fdopen(reads)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Nothing happens where it has ended: not we but multiprocessing's server reaps it, at any moment."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.is_alive():
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Until it has ended. Raises TimeoutError."""
        self._process.join(seconds)
        if self._process.is_alive():
            raise TimeoutError(f"{self.pid} lives after {seconds:g} s")


class _Descriptor:
    """An open file of ours that another process gets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], _Descriptor], tuple[Any]]:
        return _taken, (reduction.DupFd(self.number),)


def _taken(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _as_a_program(main: Callable[[], None], words: tuple[str, ...], *ends: _Descriptor) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.number, number)
        os.close(end.number)
    sys.argv = [main.__module__, *words]
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    main()
    sys.stdout.flush()


def _elsewhere(target: Callable[..., None], *arguments: Any) -> None:
    """What the copies allocate has different addresses, as in processes that were started one by one: a rank that took
    its own address for its peer's would not be noticed else."""
    moved = mmap.mmap(-1, mmap.PAGESIZE * (1 + os.getpid() % 8192))
    target(*arguments)
    moved.close()
