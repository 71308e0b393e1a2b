"""Pages of other tensor-parallel sizes land in memory of their own, and the sizes are few."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server.cache.landings import MOST_SIZES, Landings


class Rooms:
    """Landings whose memory is made up: ``taken``, by size, and how many receivers there are of ``started``."""

    def __init__(self, loop: Any) -> None:
        self.taken, self.started = list[int](), 0
        staging = cast(Any, SimpleNamespace(landing=SimpleNamespace(size=4), use=lambda: ()))
        self.landings = Landings(staging, self._take, self._receive, loop)

    def of(self, size: int, engine: str = "E") -> Any:
        return self.landings.of(cast(Any, SimpleNamespace(engine=engine, tp_size=size, common=False)))

    def _take(self, holder: Any) -> Any:
        self.taken.append(holder.tp_size)
        return SimpleNamespace(pool=SimpleNamespace(pages=4), use=lambda: ())

    def _receive(self, memory: Any, most: int) -> Any:
        return SimpleNamespace(start=self._start, draining=False)

    def _start(self) -> None:
        self.started += 1


def test_engines_of_ever_other_sizes_take_no_memory_without_end() -> None:
    rooms = Rooms(LoopThread.shared())
    sizes = [2**power for power in range(MOST_SIZES)]
    try:
        for size in sizes:
            rooms.of(size)
        with pytest.raises(TooManyRequests):
            rooms.of(1024, "F")
        for size in sizes:
            rooms.of(size)
        assert rooms.taken == sizes
    finally:
        rooms.landings.forget()


class SlowLoop:
    """The shared loop, but the first that comes waits for it until ``go``."""

    def __init__(self) -> None:
        self.waits, self.go = threading.Event(), threading.Event()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        if not self.waits.is_set():
            self.waits.set()
            assert self.go.wait(10.0)
        return LoopThread.shared().run(coroutine, timeout)


def test_no_size_waits_until_the_loop_has_opened_another_one_and_each_is_opened_once() -> None:
    loop = SlowLoop()
    rooms = Rooms(loop)
    first = threading.Thread(target=rooms.of, args=(2,))
    others = [threading.Thread(target=rooms.of, args=(size,), daemon=True) for size in (2, 4)]
    try:
        first.start()
        assert loop.waits.wait(10.0)
        for other in others:
            other.start()
        for other in others:
            other.join(2.0)
        assert not any(other.is_alive() for other in others), "the loop is busy with another size"
        loop.go.set()
        first.join(10.0)
        assert sorted(rooms.taken) == [2, 4] and rooms.started == 2
    finally:
        loop.go.set()
        rooms.landings.forget()
