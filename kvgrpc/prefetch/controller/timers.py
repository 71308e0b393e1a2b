"""One supervised thread that calls things at their time: deadlines, and pages that a backend still holds."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from kvgrpc.observability import metrics

_log = logging.getLogger(__name__)


class Alarms:
    """Calls are short; one that raises is logged and counted, and the others still come. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._stopped = False
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"kvgrpc-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._stopped or self._thread.is_alive()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls it once, so many seconds from now. After ``stop`` never."""
        with self._wake:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), call))
            self._wake.notify()

    def stop(self, timeout: float) -> bool:
        """False when the thread was left behind."""
        with self._wake:
            self._stopped = True
            self._heap.clear()
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception as error:
                _log.error("%s: %s", self._name, error, exc_info=error)
                metrics.TASK_FAILURES.labels(f"kvgrpc-{self._name}").inc()

    def _next(self) -> Callable[[], None] | None:
        with self._wake:
            while not self._stopped:
                left = self._heap[0][0] - time.monotonic() if self._heap else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._heap)[2]
                self._wake.wait(left)
            return None
