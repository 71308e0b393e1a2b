"""Who hears which pages a backend dropped."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvgrpc.prefetch.storage.base import Removed

logger = logging.getLogger(__name__)

TOLD_AT_ONCE = 1024
"""Keys that are told together, where pages go one after the other."""
TOLD_WITHIN_SECONDS = 0.05
"""A key waits no longer for others: its page may be stored again meanwhile, which is told, too."""


class Listeners:
    """Thread-safe. One that raises is logged, and the others hear it all the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Removed, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, removed: Removed) -> Callable[[], None]:
        """Returns what ends it."""
        with self._lock:
            self._all = (*self._all, removed)

        def end() -> None:
            with self._lock:
                self._all = tuple(each for each in self._all if each is not removed)

        return end

    def tell(self, keys: Sequence[str]) -> None:
        for removed in self._all if keys else ():
            try:
                removed(keys)
            except Exception as error:
                logger.error("what hears of dropped pages failed: %s", error, exc_info=error)

    @contextlib.contextmanager
    def telling(self) -> Iterator[Callable[[str | None], None]]:
        """Takes the keys of pages that go one after the other, and tells many at a time; the last ones at the end,
        however that comes. To be called for what stays too, with None: time goes by."""
        keys: list[str] = []
        first = 0.0

        def gone(key: str | None) -> None:
            nonlocal first
            if key:
                first = first if keys else time.monotonic()
                keys.append(key)
            if keys and (len(keys) == TOLD_AT_ONCE or time.monotonic() - first >= TOLD_WITHIN_SECONDS):
                self.tell(keys[:])
                keys.clear()

        try:
            yield gone
        finally:
            self.tell(keys)
