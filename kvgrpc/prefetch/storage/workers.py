"""A few threads that work through batches with a deadline; what hangs is left behind, and says when it is done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An item without a result. ``released``: None: it was never begun. Otherwise set when its call ended."""

    released: threading.Event | None = None
    error: BaseException | None = None


class _Batch(Generic[T]):
    __slots__ = ("begun", "count", "ended", "function", "left", "results", "running", "stopped")

    def __init__(self, function: Callable[[int], T], count: int) -> None:
        self.function, self.count = function, count
        self.begun = self.ended = 0
        self.results: list[T | Unfinished] = [Unfinished()] * count
        self.running: set[int] = set()
        self.left: dict[int, threading.Event] = {}
        self.stopped = False


class Workers:
    """``threads`` daemon threads that share out the items of batches, an item of each batch in turn.

    Waiting batches are bounded by the callers: each waits for its own. Daemons, because a thread that hangs in the
    kernel must not keep the interpreter from ending.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._changed = threading.Condition()
        self._batches: deque[_Batch[object]] = deque()
        self._closed = False
        # Calls that outlived their batch.
        self._left = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[int], T], count: int, timeout: float) -> list[T | Unfinished]:
        """``function(i)`` for i below ``count``, in no fixed order; what has no result after ``timeout`` is Unfinished.

        An item that was not begun by then never is; so is everything once the workers are closed.
        """
        if not count:
            return []
        batch = _Batch(function, count)
        deadline = time.monotonic() + timeout
        with self._changed:
            if not self._closed and timeout > 0:
                self._batches.append(batch)  # type: ignore[arg-type]
                self._changed.notify_all()
                while batch.ended < count and not self._closed and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
            batch.stopped = True
            for number in batch.running:
                batch.left[number] = threading.Event()
                batch.results[number] = Unfinished(batch.left[number])
            self._left += len(batch.left)
            return list(batch.results)

    @property
    def hung(self) -> bool:
        """Whether every thread is in a call that nobody waits for any more: nothing is begun until one ends."""
        with self._changed:
            return self._left >= len(self._threads)

    def close(self, timeout: float) -> bool:
        """Begins nothing more; True when every thread has ended within ``timeout``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (claimed := self._claim()) is not None:
            batch, number = claimed
            result: object
            try:
                result = batch.function(number)
            except BaseException as error:  # a panic of a library in Rust is no Exception, and the thread is needed yet
                result = Unfinished(error=error)
            with self._changed:
                if not batch.stopped:
                    batch.results[number] = result
                batch.running.discard(number)
                batch.ended += 1
                if number in batch.left:
                    batch.left.pop(number).set()
                    self._left -= 1
                if batch.ended == batch.count:
                    self._changed.notify_all()

    def _claim(self) -> tuple[_Batch[object], int] | None:
        """The next item, of the batch whose turn it is; None when closed."""
        with self._changed:
            while not self._closed:
                while self._batches and (self._batches[0].stopped or self._batches[0].begun == self._batches[0].count):
                    self._batches.popleft()
                if not self._batches:
                    self._changed.wait()
                    continue
                batch = self._batches[0]
                self._batches.rotate(-1)
                number = batch.begun
                batch.begun += 1
                batch.running.add(number)
                return batch, number
        return None
