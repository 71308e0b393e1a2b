"""Whether a row had the machine to itself."""

from __future__ import annotations

import os
import time

import psutil

# Of all cores' time, by processes that are not ours (and by other guests of the same host).
MOST_FOREIGN = 0.08


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
