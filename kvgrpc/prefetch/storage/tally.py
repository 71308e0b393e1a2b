"""What a backend did, counted from the results that it gives back."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence

from kvgrpc.prefetch.storage.base import PageResult, PageStatus, StorageStats

_FIELDS = {
    PageStatus.OK: "hits",
    PageStatus.MISSING: "misses",
    PageStatus.FAILED: "failed",
    PageStatus.TIMEOUT: "timeouts",
}


class Tally:
    """Thread-safe. ``written`` is counted by ``add``: a page that was there already is OK, but not written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._left: list[threading.Event] = []

    def read(self, results: Sequence[PageResult]) -> list[PageResult]:
        """Counts the results of a read and returns them."""
        return self._count(results, PageStatus.OK)

    def write(self, results: Sequence[PageResult]) -> list[PageResult]:
        """Counts the results of a write and returns them."""
        return self._count(results, None)

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def idle(self, timeout: float) -> bool:
        """Waits until all buffers are released; False if some still are not."""
        return all(event.wait(timeout) for event in self._unreleased())

    def stats(self, **present: object) -> StorageStats:
        """``present``: what the backend knows of now."""
        in_use = len(self._unreleased())
        with self._lock:
            return dataclasses.replace(StorageStats(in_use=in_use, **self._counts), **present)  # type: ignore[arg-type]

    def _count(self, results: Sequence[PageResult], ok: PageStatus | None) -> list[PageResult]:
        with self._lock:
            for result in results:
                if result.status is not PageStatus.OK or ok is not None:
                    self._counts[_FIELDS[result.status]] += 1
                if result.released is not None:
                    self._left.append(result.released)
        return list(results)

    def _unreleased(self) -> list[threading.Event]:
        with self._lock:
            self._left = [event for event in self._left if not event.is_set()]
            return list(self._left)
