"""One supervised thread that calls things at their time: deadlines, and pages that a backend still holds."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvgrpc.observability import metrics

_log = logging.getLogger(__name__)
_MOST_DROPPED = 64
AWAKE_SECONDS = 0.25


class Alarms:
    """Calls are short; one that raises is logged and counted, and the others still come. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._heap: list[_Alarm] = []
        self._dropped = 0
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._stopped = False
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"kvgrpc-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._stopped or self._thread.is_alive()

    def after(self, seconds: float, call: Callable[[], None], *, awake: bool = False) -> Callable[[], None]:
        """Calls it once, so many seconds from now; after ``stop`` never. What it returns drops the call.

        ``awake``: where this process stood still until it was too late, it is called a moment later: what others said
        meanwhile lies in the sockets, and is read first."""
        alarm = _Alarm(time.monotonic() + seconds, next(self._numbers), call, awake)
        with self._wake:
            heapq.heappush(self._heap, alarm)
            self._wake.notify()
        return lambda: self._drop(alarm)

    def stop(self, timeout: float) -> bool:
        """False when the thread was left behind."""
        with self._wake:
            self._stopped = True
            self._heap.clear()
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _drop(self, alarm: _Alarm) -> None:
        """Drops what it would have called, and holds; its place in the heap goes when half of them are empty."""
        with self._wake:
            if alarm.call is None:
                return
            alarm.call = None
            self._dropped += 1
            if self._dropped > max(_MOST_DROPPED, len(self._heap) // 2):
                self._heap = [each for each in self._heap if each.call is not None]
                heapq.heapify(self._heap)
                self._dropped = 0

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
                now = time.monotonic()
                left = self._heap[0].when - now if self._heap else None
                if left is None or left > 0:
                    self._wake.wait(left)
                    continue
                alarm = heapq.heappop(self._heap)
                if alarm.awake and now - alarm.when > AWAKE_SECONDS:
                    alarm.awake, alarm.when = False, now + AWAKE_SECONDS
                    heapq.heappush(self._heap, alarm)
                    continue
                call, alarm.call = alarm.call, None
                if call is not None:
                    return call
                self._dropped = max(0, self._dropped - 1)
            return None


@dataclass(order=True)
class _Alarm:
    when: float
    number: int
    call: Callable[[], None] | None = field(compare=False)
    awake: bool = field(compare=False)
