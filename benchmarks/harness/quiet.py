"""Whether a row had the machine to itself, and measuring it again where it had not."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable

import psutil

from benchmarks.harness.rounds import Benchmark, run
from benchmarks.harness.table import Row

# Of all cores' time, by processes that are not ours (and by other guests of the same host).
MOST_FOREIGN = 0.08
PR_SET_CHILD_SUBREAPER = 36


def run_quietly(benchmark: Benchmark, rounds: int, tries: int, say: Callable[[str], None]) -> list[Row]:
    """As ``run``, again where others used the machine; after ``tries`` the figures stay, and ``say`` hears of it."""
    for attempt in range(1, tries + 1):
        foreign = ForeignWork()
        rows = run(benchmark, rounds)
        share = foreign.share()
        if share <= MOST_FOREIGN:
            break
        next_step = "measuring again" if attempt < tries else "do not quote these figures"
        say(f"others took {share:.0%} of the machine: {next_step}")
    return rows


def adopt_orphans(adopt: bool = True) -> None:
    """What the children of a killed child of ours used stays ours: on Linux they become ours, and nobody else's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


class ForeignWork:
    """What share of the machine others took since this object was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._everybody, self._ours = _used(), _ours()

    def share(self) -> float:
        """0 to 1. Call it while the processes of the row still live, or after they were waited for."""
        capacity = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        return max(0.0, (_used() - self._everybody) - (_ours() - self._ours)) / capacity


def _used() -> float:
    """CPU seconds of everybody, also those that the host gave to others."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _ours() -> float:
    """CPU seconds of this process, of its descendants, and of those that they waited for."""
    used = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            used += sum(process.cpu_times()[:4])  # user and system, its own and of children that ended
        except psutil.NoSuchProcess:
            continue
    return used
