"""The words of a follower: what it asks of its shell, how it stands, what it counts, what waits for a moment. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
# A publisher that asks for more time is asked again all the same.
LONGEST_ASKED_SECONDS = 60.0
# After so long without a failure the next one is the first again.
CALM_SECONDS = 60.0
# What PUB may bring while a hole before it is read again; beyond it the oldest are let go and read again too.
BUFFERED_FRAMES = 4096
BUFFERED_BYTES = 64 * 2**20


class Mode(enum.IntEnum):
    """The ways that a Watch reads; the numbers of the proto."""

    REPLAY = 1
    TAIL = 2
    HEARTBEAT = 3
    SNAPSHOT = 4


class FollowerState(enum.Enum):
    """The relation of what is shown to the cache."""

    CONNECTING = "connecting"
    """No Watch is open: nothing is shown yet, or what was exact when it broke."""
    REBUILDING = "rebuilding"
    """A snapshot is on its way."""
    CATCHING_UP = "catching_up"
    """Exact as of a moment ago: batches are known to be missing at the end."""
    CURRENT = "current"
    """Exact, as far as anybody was told."""
    DOUBTFUL = "doubtful"
    """An event that may have been a removal cannot be read here: blocks that are shown may be gone."""


@dataclass(frozen=True, slots=True)
class OpenWatch:
    """Open a Watch, and tell what it says with its ``number``. Both sequences are inclusive; None: left out."""

    number: int
    mode: Mode
    log_id: str = ""
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class CloseWatch:
    """End a Watch; what it still says is not heard."""

    number: int


@dataclass(frozen=True, slots=True)
class ResetLive:
    """Subscribe to PUB anew: what waits in the old subscription may be of another log."""


Command = OpenWatch | CloseWatch | ResetLive


@dataclass(slots=True)
class FollowerCounts:
    """Counts of what happened since the start."""

    batches: int = 0
    gaps: int = 0
    replays: int = 0
    snapshots: int = 0
    new_logs: int = 0
    digests_equal: int = 0
    digests_different: int = 0
    undecodable: int = 0
    unknown: int = 0
    doubts: int = 0
    failures: int = 0


class Retry:
    """When to try again: pauses that double, with jitter. ``at`` is None while nothing waits."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self.at: float | None = None
        self._jitter = jitter
        self._failures = 0
        self._failed_at = float("-inf")

    def later(self, now: float, asked: float = 0.0) -> None:
        """``asked``: seconds that the publisher wants to be left alone, before the pause."""
        if now - self._failed_at > CALM_SECONDS:
            self._failures = 0
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._failed_at = now
        self.at = now + min(asked, LONGEST_ASKED_SECONDS) + pause * (0.5 + self._jitter() / 2)


class LiveBuffer:
    """Frames of PUB that wait for those before them."""

    def __init__(self) -> None:
        self._frames: dict[int, bytes] = {}
        self._bytes = 0
        self._last = -1

    @property
    def first(self) -> int | None:
        """Sequence of the first frame that waits."""
        return next(iter(self._frames), None)

    def put(self, sequence: int, payload: bytes) -> bool:
        """Keeps a frame. False where the numbers do not grow, which those of one log always do."""
        if sequence <= self._last:
            return False
        self._last = sequence
        self._frames[sequence] = payload
        self._bytes += len(payload)
        while len(self._frames) > BUFFERED_FRAMES or self._bytes > BUFFERED_BYTES:
            self.take(next(iter(self._frames)))
        return True

    def take(self, sequence: int) -> bytes | None:
        """The frame with this number, which is not kept any more; None where it is not here."""
        payload = self._frames.pop(sequence, None)
        self._bytes -= len(payload or b"")
        return payload

    def forget_before(self, sequence: int) -> None:
        """Frames before it are not needed."""
        while (first := self.first) is not None and first < sequence:
            self.take(first)

    def clear(self) -> None:
        """Forgets the frames, and the numbers."""
        self._frames.clear()
        self._bytes, self._last = 0, -1
