"""A look at every file of a folder by many threads: one alone waits for the interpreter with each system call.

An engine that is idle spins in Python (SGLang's scheduler does), and hands its interpreter over every 5 ms only: a
purge took 22 ms a file with one thread, 1.2 ms with sixteen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from kvgrpc.prefetch.storage.file.folder import Names

THREADS = 16


def visited(folders: deque[Names], counts: Callable[[str], bool], deadline: float) -> int:
    """How many names of pages ``counts`` is true for; it is called by several threads, with each name once.

    One thread a folder, ``THREADS`` at most. What there was no time for until ``deadline`` (time.monotonic) is left in
    ``folders``, those first that are open; each call comes on by one file at least. Raises the first error of
    ``counts`` or of a folder once each thread has ended the file that it was at, and leaves nothing in ``folders``.
    """
    found: list[int] = []
    errors: list[BaseException] = []

    def visit() -> None:
        try:
            found.append(_visit(folders, counts, lambda: bool(errors) or time.monotonic() >= deadline))
        except BaseException as error:
            errors.append(error)

    # Daemons: a disk that hangs must not keep the process from ending.
    threads = [threading.Thread(target=visit, name="kvgrpc-file-visit", daemon=True) for _ in range(THREADS - 1)]
    started = []
    with contextlib.suppress(RuntimeError):  # the system has no thread left: fewer do it, or we alone
        for thread in threads[: len(folders) - 1] if folders else []:
            thread.start()
            started.append(thread)
    visit()
    for thread in started:
        thread.join()
    if errors:
        folders.clear()
        raise errors[0]
    return sum(found)


def _visit(folders: deque[Names], counts: Callable[[str], bool], is_over: Callable[[], bool]) -> int:
    found = 0
    while folders:
        try:
            names = folders.popleft()
        except IndexError:
            break
        for name in names:
            found += counts(name)
            if is_over():
                folders.appendleft(names)
                return found
    return found
