"""Runs a backend's work on pages in a few threads, and says what became of what did not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvgrpc.prefetch.storage.base import PageResult, StorageDown, failed, timed_out
from kvgrpc.prefetch.storage.workers import Unfinished, Workers

T = TypeVar("T")


class PageCalls:
    """Of one backend, called ``name`` and found at ``address``. Thread-safe."""

    def __init__(self, name: str, address: str, threads: int) -> None:
        self._name, self._address = name, address
        self._workers = Workers(f"kvgrpc-{name}", threads)
        self.closed = False

    def move(self, function: Callable[[int], PageResult], count: int, timeout: float) -> list[PageResult]:
        """A result for each page: what ``function(i)`` said, or why it did not."""
        results = self._workers.run(function, count, timeout)
        return [self._result(each) if isinstance(each, Unfinished) else each for each in results]

    def ask(self, function: Callable[[int], T], count: int, timeout: float) -> list[T]:
        """Answers to all questions. Raises StorageDown: a missing answer must not look like a missing page."""
        answers: list[T] = []
        for answer in self._workers.run(function, count, timeout):
            if isinstance(answer, Unfinished):
                raise self.down(self._result(answer).detail)
            answers.append(answer)
        return answers

    def down(self, why: str) -> StorageDown:
        return StorageDown(f"storage {self._name!r} does not answer: {why}", self._address)

    @property
    def trouble(self) -> str:
        """Why no call is answered now; empty when calls are."""
        if self.closed:
            return "closed"
        return "all of its threads hang in calls that outlived their time" if self._workers.hung else ""

    def close(self, timeout: float) -> bool:
        """True when every thread has ended."""
        self.closed = True
        return self._workers.close(timeout)

    def _result(self, unfinished: Unfinished) -> PageResult:
        if unfinished.error is not None:
            return failed(f"{type(unfinished.error).__name__}: {unfinished.error}", retryable=True)
        if unfinished.released is not None:
            return timed_out("begun, but it did not end in time", unfinished.released)
        return failed("the backend is closed") if self.closed else timed_out("not begun in time")
