"""A look at every file of a folder: by many threads, until a deadline, and never at one file twice."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

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


def test_an_error_stops_all_and_is_raised() -> None:
    def breaks() -> Iterator[str]:
        yield "broken/0"
        raise OSError("injected")

    endless = (f"endless/{number}" for number in iter(int, 1))
    with pytest.raises(OSError, match="injected"):
        visited(deque([breaks(), *folders()]), lambda name: True, later())  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError):
        visited(deque([endless]), lambda name: bool(1 // 0), later())
