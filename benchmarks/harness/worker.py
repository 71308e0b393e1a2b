"""Spawned processes that run functions for the harness and die with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
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

    def __init__(self, worker: Worker, what: str) -> None:
        self._worker = worker
        self._what = what

    def result(self, timeout: float = CALL_TIMEOUT) -> Value:
        return cast(Value, self._worker.receive(self._what, timeout))


class Worker:
    """One process. Calls run one after another; ``begin`` starts one, so that two workers can run at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._closed = False
        # Engines talk to stderr even when all is well: shown only with an error.
        self._said = tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".stderr")  # noqa: SIM115
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), self._said.name)
        self._process = context.Process(target=_serve, args=arguments, name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

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
            self._process.join(EXIT_TIMEOUT)
            how = f"died in {what}, exit code {self._process.exitcode}"
            raise WorkerError(f"{self.name}: {how}\n{self._last_words()}") from None
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
        self._process.join(EXIT_TIMEOUT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._said.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-LAST_WORDS:].decode(errors="replace")


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


def _die_with(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
