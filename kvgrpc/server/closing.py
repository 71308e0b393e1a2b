"""One end for all steps of a close."""

from __future__ import annotations

import time

# What every step gets, even when the time is over, so that what needs no waiting is done.
_LEAST_SECONDS = 0.1


class ClosingTime:
    """``seconds`` from now on, which steps divide among them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    def left(self, share: float = 1.0) -> float:
        """Seconds left until that share of the whole time is over, at least 0.1."""
        return max(_LEAST_SECONDS, self._began + self.seconds * share - time.monotonic())
