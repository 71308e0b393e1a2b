"""A server that is a process of its own: ``kvgrpc serve registry``, ``serve index``, ``serve relay``."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar


class OpenClose(Protocol):
    """What opens and closes by itself: RegistryServer, IndexServer, EventRelay."""

    def open(self) -> object: ...

    def close(self) -> None: ...


Served = TypeVar("Served", bound=OpenClose)


def serve(server: Served, on_ready: Callable[[Served], object] = lambda server: None) -> None:
    """Opens ``server``, calls ``on_ready`` with it, and serves until SIGTERM or SIGINT; then drains and closes it.

    For the main thread of a process.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    server.open()
    gc.collect()
    gc.freeze()  # half of what a full collection looks at is there from the start; each takes a pause from all callers
    on_ready(server)
    while not stopped.wait(1.0):  # a wait without end would keep Python from running the handlers
        continue
    server.close()
