"""A clock that counts only while this process runs, so that a registry that was stopped expires nobody for it."""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 0.25
MAX_STEP_SECONDS = 1.0


class RunningClock:
    """Seconds since its making. Whoever owns it calls ``tick`` every 0.25 s.

    Between two ticks it advances at most one second: a process that was stopped or starved did not read the
    keepalives that ranks sent meanwhile, and must not take them for dead. Not thread-safe.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ticked_at = monotonic()
        self._elapsed = 0.0

    def __call__(self) -> float:
        return self._elapsed + min(self._monotonic() - self._ticked_at, MAX_STEP_SECONDS)

    def tick(self) -> None:
        self._elapsed = self()
        self._ticked_at = self._monotonic()
