"""The ceilings: the bare data plane and bare memcpy, moving given descriptors and nothing else.

Memory is that of one side with one region, so that source and destination are checked like those of a hand-off.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.baselines.engines import allocate, mooncake_engine

WINDOWS = (16, 64, 256, 1024)
BATCHES = (64, 1000)
CALIBRATION = 3
HOST = "127.0.0.1"
SLEEP = 100e-6
Descriptors = tuple[list[int], list[int], list[int]]
Write = Callable[[str, Descriptors], None]


class BareMooncake:
    """One engine with one block of memory. ``session`` and ``address`` are what the writing side needs."""

    def __init__(self) -> None:
        self._engine = mooncake_engine(HOST)
        self._maps: list[mmap.mmap] = []
        self._best: Write | None = None
        self.session = f"{HOST}:{self._engine.get_rpc_port()}"

    def allocate(self, nbytes: int) -> int:
        address = allocate(nbytes, self._maps)
        if self._engine.register_memory(address, nbytes) != 0:
            raise RuntimeError("Mooncake refused the memory")
        return address

    def write(self, session: str, descriptors: Descriptors) -> float:
        """Seconds to write (sources, destinations, lengths) in the way that the first call found to be fastest."""
        if self._best is None:
            self._best = min(self._ways(), key=lambda way: _median(way, session, descriptors))
        return _seconds(self._best, session, descriptors)

    def write_at_once(self, session: str, descriptors: Descriptors) -> float:
        """Seconds to write them all in flight together."""
        return _seconds(_window(self._engine, len(descriptors[0])), session, descriptors)

    def _ways(self) -> list[Write]:
        windows = [_window(self._engine, size) for size in WINDOWS]
        return windows + [_batches(self._engine, size) for size in BATCHES]


def copy(descriptors: Descriptors) -> float:
    """Seconds to memcpy (sources, destinations, lengths) inside this process."""
    memmove = ctypes.memmove
    begin = time.perf_counter()
    for source, destination, nbytes in zip(*descriptors, strict=True):
        memmove(destination, source, nbytes)
    return time.perf_counter() - begin


def allocate_shared(nbytes: int, keep: list[mmap.mmap]) -> int:
    """Address of zeroed memory that other processes could map; it lives as long as its map in ``keep``."""
    return allocate(nbytes, keep, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)


def _window(engine: Any, size: int) -> Write:
    """Single writes, ``size`` of them on their way at a time."""

    def write(session: str, descriptors: Descriptors) -> None:
        submit, check = engine.transfer_submit_write, engine.transfer_check_status
        running: deque[int] = deque()
        for source, destination, nbytes in zip(*descriptors, strict=True):
            while len(running) >= size and not _drop_ended(running, check):
                time.sleep(SLEEP)
            running.append(submit(session, source, destination, nbytes))
        while running:
            if not _drop_ended(running, check):
                time.sleep(SLEEP)

    return write


def _drop_ended(running: deque[int], check: Callable[[int], int]) -> bool:
    ended = False
    while running and (status := check(running[0])) != 0:
        if status != 1:
            raise RuntimeError(f"Mooncake reported {status}")
        running.popleft()
        ended = True
    return ended


def _batches(engine: Any, size: int) -> Write:
    """Blocking calls of ``size`` writes each."""

    def write(session: str, descriptors: Descriptors) -> None:
        sources, destinations, lengths = descriptors
        for start in range(0, len(sources), size):
            part = slice(start, start + size)
            if engine.batch_transfer_sync_write(session, sources[part], destinations[part], lengths[part]) != 0:
                raise RuntimeError("Mooncake failed a batch")

    return write


def _median(write: Write, session: str, descriptors: Descriptors) -> float:
    return statistics.median(_seconds(write, session, descriptors) for _ in range(CALIBRATION))


def _seconds(write: Write, session: str, descriptors: Descriptors) -> float:
    begin = time.perf_counter()
    write(session, descriptors)
    return time.perf_counter() - begin
