"""A look at every file of a folder by many threads: one alone waits for the interpreter with each system call.

An engine that is idle spins in Python (SGLang's scheduler does), and hands its interpreter over every 5 ms only: a
purge took 22 ms a file with one thread, 1.2 ms with sixteen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvgrpc.prefetch.storage.file.folder import Names

_THREADS = 16


def visited(folders: deque[Names], counts: Callable[[str], bool], deadline: float) -> int:
    """How many names of pages ``counts`` is true for; it is called by several threads, with each name once.

    What there was no time for until ``deadline`` (time.monotonic) is left in ``folders``; each call comes on by one
    file at least. Raises an error of ``counts`` or of a folder when all have stopped; leaves nothing in ``folders``.
    """

    threads = min(_THREADS, len(folders))

    def visit() -> int:
        found = 0
        while folders:
            try:
                names = folders.popleft()
            except IndexError:
                break
            for name in names:
                found += counts(name)
                if time.monotonic() >= deadline:
                    folders.append(names)
                    return found
        return found

    def visit_or_stop_all() -> int:
        try:
            return visit()
        except BaseException:
            folders.clear()
            raise

    if not threads:
        return 0
    with ThreadPoolExecutor(threads, "kvgrpc-file-visit") as pool:
        return sum(future.result() for future in [pool.submit(visit_or_stop_all) for _ in range(threads)])
