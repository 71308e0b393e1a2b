"""CPU time by process and thread."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

# Seconds by process and thread, those of a whole process under WHOLE.
Used = Mapping[tuple[int, int], float]
WHOLE = 0


def used(pids: Collection[int]) -> Used:
    """By these processes, with their threads that ended; and by the threads that they have now."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid, WHOLE] = time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) names its clock
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(OSError):
                    nanoseconds = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]
                    found[pid, thread] = int(nanoseconds) / 1e9
    return found


def beside_busiest(before: Used, after: Used) -> float:
    """Seconds that the other threads of its process used, while one thread used the most of all."""
    took = {each: seconds - before.get(each, 0.0) for each, seconds in after.items()}
    pid, thread = max((each for each in took if each[1] != WHOLE), key=lambda each: took[each])
    return took[pid, WHOLE] - took[pid, thread]
