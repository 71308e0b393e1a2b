"""Holders that did not answer: they are left alone for a while, so that each prompt does not wait for them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
OWN_DELAY_SECONDS = 0.25
_MOST = 4096


class SilentHolders:
    """By address. Thread-safe. Each failure doubles the time; pages that come end it, and a new incarnation too."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._until: dict[str, tuple[float, float]] = {}

    def __contains__(self, address: object) -> bool:
        with self._lock:
            until, _ = self._until.get(str(address), (0.0, 0.0))
            return self._now() < until

    def failed(self, address: str) -> None:
        """It was asked, and did not answer in time or did not bring what it lent."""
        with self._lock:
            now = self._now()
            until, seconds = self._until.pop(address, (now, 0.0))
            if now - until > LONGEST_SECONDS:
                seconds = 0.0
            if now >= until:  # those who asked together fail together
                seconds = min(max(FIRST_SECONDS, 2 * seconds), LONGEST_SECONDS)
                until = now + seconds
            self._until[address] = until, seconds
            if len(self._until) > _MOST:
                self._until.pop(next(iter(self._until)))

    def unanswered(self, address: str, seconds: float, may_take: float, took: float) -> None:
        """It did not answer within ``seconds``, which was known after ``took``. That says nothing of one that had less
        time than it ``may_take``, unless it did not use that; nor where it was known much later: then this process
        stood still."""
        if took < seconds / 2 or (seconds >= may_take and took <= seconds + OWN_DELAY_SECONDS):
            self.failed(address)

    def forget(self, address: str) -> None:
        """It brought what it lent, or somebody else is there now."""
        with self._lock:
            self._until.pop(address, None)
