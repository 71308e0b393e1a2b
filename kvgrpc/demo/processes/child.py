"""A process of the demo, seen from inside: the channel to the router, and the promise to end when that is gone."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading

from kvgrpc.demo.protocol import Close, ToProcess, ToRouter, encode, to_process

GRACE_SECONDS = 5.0


class RouterGone(Exception):
    """Nobody asks any more: the router closed the channel, said Close or died, or this process was told to end."""


class Router:
    """The router's end of the pipes. Made first thing in a process, before slow imports; one for each process.

    Once the router is gone the process has ``GRACE_SECONDS`` to end in good order, whatever it is doing, then it ends
    all the same: no process of the demo outlives it, not even after kill -9.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the router's to answer
        # Whatever a library prints must not get between the lines of the channel.
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # Our own buffer: the interpreter cannot shut down while a thread waits in that of sys.stdin.
        self._input = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        self._messages: queue.SimpleQueue[ToProcess | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="demo-router", daemon=True).start()

    def receive(self, seconds: float | None = None) -> ToProcess | None:
        """The next message; None when none came within ``seconds`` (None: however long it takes). Raises RouterGone."""
        try:
            message = self._messages.get(timeout=seconds) if seconds != 0 else self._messages.get_nowait()
        except queue.Empty:
            return None
        if message is None:
            raise RouterGone
        return message

    def tell(self, message: ToRouter) -> None:
        """Sends a message. Raises RouterGone."""
        try:
            self._output.write(encode(message) + b"\n")
            self._output.flush()
        except BrokenPipeError:
            raise RouterGone from None

    def _read(self) -> None:
        for line in self._input:
            message = to_process.decode(line)
            if isinstance(message, Close):
                break
            self._messages.put(message)
        timer = threading.Timer(GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self._messages.put(None)
