"""Spawned processes that run functions for the harness and die with it, and families that are forked from one."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import psutil

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
PR_SET_PDEATHSIG = 1
CALL_TIMEOUT = 300.0
EXIT_TIMEOUT = 10.0
LAST_WORDS = 4_000


class WorkerError(RuntimeError):
    """A function failed in a worker; the text is its traceback there."""


class Desk:
    """What the functions of one worker share: they are called with it as their first argument."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}


class Pending(Generic[Value]):
    """The answer of a call that is on its way."""

    def __init__(self, worker: AnyWorker, what: str) -> None:
        self._worker = worker
        self._what = what

    def result(self, timeout: float = CALL_TIMEOUT) -> Value:
        return cast(Value, self._worker.receive(self._what, timeout))


class AnyWorker:
    """A process that serves calls. They run one after another; ``begin`` starts one, so that two workers can run at
    once. Subclasses start and end the process.
    """

    pid: int
    _pipe: Connection

    def __init__(self, name: str) -> None:
        self.name = name
        self._closed = False
        # Engines talk to stderr even when all is well: shown only with an error.
        self._said = tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".stderr")  # noqa: SIM115

    def call(
        self,
        function: Callable[Concatenate[Desk, Parameters], Value],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Value:
        return self.begin(function, *args, **kwargs).result()

    def begin(
        self,
        function: Callable[Concatenate[Desk, Parameters], Value],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Pending[Value]:
        self._pipe.send((function, args, kwargs))
        return Pending(self, function.__name__)

    def receive(self, what: str, timeout: float) -> object:
        """The next answer. Raises WorkerError, also for a worker that died or does not answer in time."""
        try:
            if not self._pipe.poll(timeout):
                raise WorkerError(f"{self.name}: {what} did not end within {timeout:.0f} s\n{self._last_words()}")
            failed, value = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"{self.name}: died in {what}{self._how_it_ended()}\n{self._last_words()}") from None
        if failed:
            raise WorkerError(f"{self.name}: {what} failed\n{value}\n{self._last_words()}")
        return value

    def peak_rss(self) -> int:
        """Bytes; the highest resident set since the process started."""
        return peak_rss(self.pid)

    def close(self) -> None:
        """Ends the process; what does not leave in time is killed."""
        if self._closed:
            return
        self._closed = True
        self._pipe.close()
        self._end()
        self._said.close()

    def _how_it_ended(self) -> str:
        return ""

    def _end(self) -> None:
        """Its pipe is closed, so that it leaves by itself."""
        raise NotImplementedError

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-LAST_WORDS:].decode(errors="replace")


class Worker(AnyWorker):
    """One process, started afresh."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), self._said.name)
        self._process = context.Process(target=_serve, args=arguments, name=name, daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()

    def _how_it_ended(self) -> str:
        self._process.join(EXIT_TIMEOUT)
        return f", exit code {self._process.exitcode}"

    def _end(self) -> None:
        self._process.join(EXIT_TIMEOUT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Family:
    """Workers that are forked from one process which has imported ``module`` and done nothing else: many processes of
    a large library cost its import, and its memory, once.
    """

    def __init__(self, name: str, module: str) -> None:
        self._mother = Worker(name)
        self._mother.call(_import, module)
        self._name = name
        self._children: list[ForkedWorker] = []

    def fork(self) -> ForkedWorker:
        child = ForkedWorker(f"{self._name}-{len(self._children)}", self._mother)
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._mother.close()


class ForkedWorker(AnyWorker):
    """A copy of its mother."""

    def __init__(self, name: str, mother: Worker) -> None:
        super().__init__(name)
        self._mother = mother
        with Listener(family="AF_UNIX") as listener:
            self.pid = mother.call(_fork, str(listener.address), self._said.name)
            self._pipe = listener.accept()

    def _end(self) -> None:
        self._mother.call(_await_end, self.pid)


def peak_rss(pid: int) -> int:
    """Bytes; 0 when the process is gone. The present value where the system does not keep the peak."""
    try:
        with open(f"/proc/{pid}/status") as status:
            peak = next((line for line in status if line.startswith("VmHWM:")), None)
        return int(peak.split()[1]) * 1024 if peak else 0
    except FileNotFoundError:
        return int(psutil.Process(pid).memory_info().rss) if psutil.pid_exists(pid) else 0


def _serve(pipe: Connection, parent: int, stderr: str) -> None:
    _die_with(parent)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    desk = Desk()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # Non-daemon threads and engines of a benchmark must not hold the process.
        try:
            answer = (False, function(desk, *args, **kwargs))
        except BaseException:
            answer = (True, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


def _import(_: Desk, module: str) -> None:
    importlib.import_module(module)


def _fork(_: Desk, address: str, stderr: str) -> int:
    """In the mother: the child's process id. The child serves, and never returns."""
    mother = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _serve(Client(address, family="AF_UNIX"), mother, stderr)
    finally:
        os._exit(1)


def _await_end(_: Desk, child: int) -> None:
    """In the mother: what does not leave in time is killed."""
    end = time.monotonic() + EXIT_TIMEOUT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.002)


def _die_with(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
