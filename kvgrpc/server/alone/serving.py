"""A server that is a process of its own: ``kvgrpc serve registry``, ``serve index``, ``serve relay``."""

from __future__ import annotations

import gc
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from kvgrpc.net import check_listen
from kvgrpc.observability.http import StatusServer
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server.alone.draining import DrainsAtOnce
from kvgrpc.server.check import check_call_limits

_START_SECONDS = 10.0


class OpenClose(Protocol):
    """A server that opens and closes by itself: RegistryServer, IndexServer, EventRelay."""

    def open(self) -> object: ...

    def close(self) -> None: ...


Served = TypeVar("Served", bound=OpenClose)
Alone = TypeVar("Alone", bound="ServerAlone")


class ServerAlone(DrainsAtOnce, ABC):
    """A service on a port of its own, and a status port beside it. ``open`` and ``close`` block."""

    def __init__(
        self,
        listen: Sequence[str],
        security: ServerSecurity | None,
        metrics_listen: str,
        call_limits: CallLimits | None,
    ) -> None:
        check_call_limits(call_limits)
        for address in listen:
            check_listen(address)
        if metrics_listen:
            check_listen(metrics_listen, "metrics_listen", unix=False)
        self.address = ""
        self.metrics_address = ""
        self._listen = tuple(listen)
        self._security = security or ServerSecurity()
        self._call_limits = call_limits or CallLimits()
        self._metrics_listen = metrics_listen
        self._status: StatusServer | None = None
        self._closing = False
        self._loop = LoopThread.shared()

    def open(self: Alone) -> Alone:
        """A start that fails leaves nothing open."""
        try:
            self._loop.run(self._open(), _START_SECONDS)
            if self._metrics_listen:
                self._status = StatusServer(self._metrics_listen, self._live, self._ready)
                self.metrics_address = self._status.address
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self._closing = True
        self._loop.run(self._close(), _START_SECONDS)
        if self._status is not None:
            self._status.close()

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...

    @abstractmethod
    def _live(self) -> Mapping[str, bool]: ...

    def _ready(self) -> dict[str, bool]:
        return {"loop": self._loop.healthy, **self._listener.serving()}


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
