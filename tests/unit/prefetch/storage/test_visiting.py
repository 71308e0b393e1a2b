"""A look at every file of a folder: by many threads, until a deadline, and never at one file twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque

import pytest

from kvgrpc.prefetch.storage.file.folder import Names
from kvgrpc.prefetch.storage.file.visiting import visited

SECONDS = 20.0
FOLDERS, FILES = 64, 5


def folders() -> deque[Names]:
    return deque((f"{folder}/{name}" for name in range(FILES)) for folder in range(FOLDERS))


def later() -> float:
    return time.monotonic() + SECONDS


def test_each_file_is_looked_at_once() -> None:
    seen: list[str] = []

    def even(name: str) -> bool:
        seen.append(name)
        return name.endswith(("0", "2", "4"))

    left = folders()
    assert visited(left, even, later()) == FOLDERS * 3
    assert not left and sorted(seen) == sorted(name for names in folders() for name in names)
    assert visited(left, even, later()) == 0


def test_files_that_wait_are_many_at_a_time() -> None:
    together = threading.Barrier(16, timeout=SECONDS)

    def waits(name: str) -> bool:
        if name.endswith("/0"):
            together.wait()
        return True

    assert visited(folders(), waits, later()) == FOLDERS * FILES


def test_what_there_was_no_time_for_is_left() -> None:
    left, calls, found = folders(), 0, 0
    while left:
        calls, found = calls + 1, found + visited(left, lambda name: True, 0.0)
    assert found == FOLDERS * FILES
    assert calls > 1


def test_an_error_ends_those_who_would_never_end_and_is_raised() -> None:
    def endless(folder: int) -> Names:
        while True:
            yield f"{folder}/page"

    def breaks(name: str) -> bool:
        return bool(1 // (0 if name.startswith("7/") else 1))

    left = deque(endless(folder) for folder in range(FOLDERS))
    with pytest.raises(ZeroDivisionError):
        visited(left, breaks, later())
    assert not left


def test_where_no_thread_can_be_started_the_caller_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert visited(folders(), lambda name: True, later()) == FOLDERS * FILES


def test_a_disk_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """The caller is a daemon, as the thread is that goes on with a clear of SGLang."""
    program = """
import collections, threading, time
from kvgrpc.prefetch.storage.file.visiting import visited
hangs = threading.Event()
def hang(name):
    hangs.set()
    threading.Event().wait()
folders = collections.deque(iter(["name"]) for _ in range(20))
threading.Thread(target=visited, args=(folders, hang, time.monotonic() + 60), daemon=True).start()
assert hangs.wait(30)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
