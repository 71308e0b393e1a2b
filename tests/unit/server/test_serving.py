"""What a server that is a process of its own does between its start and a signal."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator

import pytest

from kvgrpc.server.alone.serving import serve


class Server:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def open(self) -> None:
        self.asked.append("open")

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    gc.unfreeze()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_open_before_it_says_that_it_is_ready_and_closes_after_a_signal(number: signal.Signals) -> None:
    server = Server()

    def ready(served: Server) -> None:
        assert served is server
        served.asked.append("ready")
        os.kill(os.getpid(), number)

    serve(server, ready)
    assert server.asked == ["open", "ready", "close"]


def test_a_full_collection_looks_at_nothing_of_the_start_and_no_garbage_of_it_stays() -> None:
    class Garbage:
        """Refers to itself."""

        def __init__(self) -> None:
            self.itself = self

    garbage = weakref.ref(Garbage())

    def ready(_: Server) -> None:
        assert garbage() is None and gc.get_freeze_count() > 0
        os.kill(os.getpid(), signal.SIGTERM)

    gc.disable()
    try:
        serve(Server(), ready)
    finally:
        gc.enable()
