"""The time that a call may wait for news before it answers without any."""

from __future__ import annotations

# Below what a server grants a call that has no deadline.
LONGEST_WAIT_SECONDS = 50.0


def longest_wait(remaining: float | None) -> float:
    """Seconds, of a call that has ``remaining`` seconds left (None: no deadline).

    Until shortly before the deadline, so that the client gets an answer and not a timeout.
    """
    if remaining is None:
        return LONGEST_WAIT_SECONDS
    return max(remaining - min(0.25, remaining / 4), 0.0)
