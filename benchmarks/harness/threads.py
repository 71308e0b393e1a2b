"""CPU time by thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

# Seconds by process and thread.
Used = Mapping[tuple[int, int], float]


def used(pids: Collection[int]) -> Used:
    """By the threads that these processes have now."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(OSError):
                    nanoseconds = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]
                    found[pid, thread] = int(nanoseconds) / 1e9
    return found


def beside_busiest(before: Used, after: Used) -> float:
    """Seconds that the other threads of its process used, while one thread used the most of all."""
    took = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    busiest = max(took, key=lambda thread: took[thread])
    return sum(seconds for thread, seconds in took.items() if thread[0] == busiest[0] and thread != busiest)
