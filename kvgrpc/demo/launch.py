"""The demo's processes, seen from the router: started together, heard through one queue, never outliving it."""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from kvgrpc.demo.protocol import Close, ToProcess, ToRouter, encode, to_router

CLOSE_SECONDS = 10.0
# A process reads its pipe on a thread of its own, so that one that leaves it full has stopped.
TELL_SECONDS = 10.0
KEPT_LINES = 20


class DemoFailed(Exception):
    """The demo cannot go on; the text says why in one sentence."""


class Processes:
    """Starts ``python -m kvgrpc.demo.processes.main KIND`` a kind. Use it as a context: the end of it ends them all.

    Each process ends by itself when its stdin does, so none is left even if this one is killed.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self._heard: queue.SimpleQueue[tuple[str, ToRouter | None]] = queue.SimpleQueue()
        self._children = {kind: _Child(kind, self._heard) for kind in kinds}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.tell(Close())
        deadline = time.monotonic() + CLOSE_SECONDS
        for child in self._children.values():
            child.end(deadline)

    def tell(self, kind: str, message: ToProcess) -> None:
        """Sends a message; when the process is gone, ``receive`` says so."""
        self._children[kind].tell(message)

    def receive(self, deadline: float) -> tuple[str, ToRouter] | None:
        """The next message and whose it is; None at the deadline (time.monotonic). Raises DemoFailed when one ended."""
        try:
            kind, message = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if message is None:
            raise DemoFailed(self._children[kind].obituary())
        return kind, message


class _Child:
    def __init__(self, kind: str, heard: queue.SimpleQueue[tuple[str, ToRouter | None]]) -> None:
        self._kind = kind
        self._heard = heard
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "kvgrpc.demo.processes.main", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the router alone
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._readers = [
            threading.Thread(target=target, name=f"demo-{kind}-{name}", daemon=True)
            for name, target in (("stdout", self._read_messages), ("stderr", self._read_lines))
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, message: ToProcess) -> None:
        """Its end is heard from its stdout, and so is that of one that takes nothing: it is killed."""
        assert self._popen.stdin is not None
        pipe, left = self._popen.stdin.fileno(), memoryview(encode(message) + b"\n")
        with suppress(BrokenPipeError):
            while left:
                if not select.select([], [pipe], [], TELL_SECONDS)[1]:
                    self._last_lines.append(f"(it took no message for {TELL_SECONDS:g} s, and was killed)")
                    return self._popen.kill()
                with suppress(BlockingIOError):
                    left = left[os.write(pipe, left) :]

    def end(self, deadline: float) -> None:
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        for reader in self._readers:
            reader.join(1.0)

    def obituary(self) -> str:
        try:
            code: object = self._popen.wait(5.0)
        except subprocess.TimeoutExpired:
            code = "unknown: it closed its output and still runs"
        self._readers[1].join(1.0)
        said = "\n  ".join(self._last_lines) or "nothing"
        return f"the {self._kind} process ended (exit code {code}); it said last:\n  {said}"

    def _read_messages(self) -> None:
        assert self._popen.stdout is not None
        try:
            for line in self._popen.stdout:
                self._heard.put((self._kind, to_router.decode(line)))
        finally:
            self._heard.put((self._kind, None))

    def _read_lines(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self._last_lines.append(line.decode(errors="replace").rstrip())
