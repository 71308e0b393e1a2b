"""How hand-offs ended: what is counted of them, and the one line that a failed one writes.

Counted in plain integers by the loop thread; durations wait for the next tick, or for somebody who scrapes, to find
their buckets: a room pays for neither a lock nor a search.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgrpc.errors import Failure, Reason
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.observability.metrics import REGISTRY, SECONDS

ROLES = ("prefill", "decode")
STAGES = ("bootstrap", "wait", "transfer", "notify")
_NOTIFY = STAGES.index("notify")


class HandOffs:
    """Counts for one rank, into the sums of its role in this process. For the loop thread.

    The lines are those of ``logger``: at most 5 in 10 seconds for one reason, with the count of those left out.
    """

    def __init__(self, role: str, logger: logging.Logger) -> None:
        self._role = role
        self._sums = _SUMS[role]
        self._lines = RateLimited(logger)

    def succeeded(self, seconds: float | None, nbytes: int, stages: Sequence[float] = ()) -> None:
        """``seconds`` since the engine made its handle (None: it made none); ``nbytes``: of the room's pages;
        ``stages``: seconds of each of STAGES, but for the last.
        """
        sums = self._sums
        sums.succeeded += 1
        sums.nbytes += nbytes
        if seconds is not None:
            sums.seconds.new.append(seconds)
        for histogram, taken in zip(sums.stages, stages, strict=False):
            histogram.new.append(taken)

    def notified(self, seconds: float, rooms: int) -> None:
        """News of so many rooms were handed to their stream, ``seconds`` after the first of them was there."""
        self._sums.stages[_NOTIFY].add(seconds, rooms)

    def failed(self, room: int, attempt: int, failure: Failure, seconds: float | None) -> None:
        reason = failure.reason.name if isinstance(failure.reason, Reason) else Reason.UNSPECIFIED.name
        self._sums.failed[reason] += 1

        def line() -> str:
            again = f" attempt {attempt}" if attempt else ""
            after = "" if seconds is None else f" after {seconds:.3f} s"
            origin = f" (seen first by {failure.origin})" if failure.origin else ""
            return f"room {room}{again} failed at {self._role}{after}: {reason}: {one_line(failure.message)}{origin}"

        # An engine that gives a request up is daily business.
        self._lines.say(logging.INFO if failure.reason is Reason.ROOM_CANCELLED else logging.WARNING, reason, line)

    def lost(self, own: object, peer: object, how: str, rooms: int) -> None:
        """A pair was given up; without a room of its own that is only news."""
        text = f"{own} lost its pair with {peer}, {rooms} rooms: {one_line(how) or 'it said goodbye'}"
        self._lines.say(logging.WARNING if rooms else logging.INFO, "pair", text)

    def silent(self, own: object, peer: object, silent: bool, seconds: float, rooms: int) -> None:
        """A peer fell silent, or speaks again."""
        if silent:
            text = f"{own} heard nothing of {peer} for {seconds:.1f} s, {rooms} rooms: its connection stands, they wait"
        else:
            text = f"{own} hears {peer} again, {rooms} rooms"
        self._lines.say(logging.WARNING if rooms and silent else logging.INFO, "silence", text)

    def refused(self, own: object, caller: str, failure: Failure) -> None:
        """A stream of ``caller`` ("host:port") never became a session."""
        reason = failure.reason.name if isinstance(failure.reason, Reason) else Reason.UNSPECIFIED.name
        text = f"{own} refused a session of {one_line(caller)}: {reason}: {one_line(failure.message)}"
        leaves = failure.reason is Reason.SERVER_DRAINING
        self._lines.say(logging.INFO if leaves else logging.WARNING, f"refused sessions, {reason}", text)

    def sort_in(self) -> None:
        """Sorts durations into their buckets: once a tick."""
        for histogram in (self._sums.seconds, *self._sums.stages):
            histogram.sort_in()


class _Sums:
    """Of one role."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed: Counter[str] = Counter()
        self.nbytes = 0
        self.seconds = _Histogram()
        self.stages = [_Histogram() for _ in STAGES]


class _Histogram:
    """Durations in SECONDS' buckets. ``new``: those that are in none yet; whoever appends there needs no lock."""

    def __init__(self) -> None:
        self.new: deque[float] = deque()
        self._counts = np.zeros(len(SECONDS) + 1, np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float, times: int) -> None:
        with self._lock:
            self._counts[bisect_left(SECONDS, seconds)] += times
            self._sum += seconds * times

    def sort_in(self) -> None:
        if self.new:
            with self._lock:
                found = [self.new.popleft() for _ in range(len(self.new))]
                self._counts += np.bincount(np.searchsorted(SECONDS, found), minlength=len(self._counts))
                self._sum += sum(found)

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets as prometheus_client takes them, and the sum."""
        self.sort_in()
        with self._lock:
            counts, total = np.cumsum(self._counts).tolist(), self._sum
        return [(bound, float(count)) for bound, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True)], total


class _Collected(Collector):
    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily("kvgrpc_rooms_ended", "Hand-offs that ended.", labels=("role", "outcome", "reason"))
        nbytes = CounterMetricFamily("kvgrpc_hand_off_bytes", "Bytes of pages that are in place.", labels=("role",))
        took = HistogramMetricFamily(
            "kvgrpc_hand_off_seconds", "From the engine's handle to Success.", labels=("role",)
        )
        stage = HistogramMetricFamily(
            "kvgrpc_hand_off_stage_seconds",
            "Stages of hand-offs that went well, and how long news of rooms waited.",
            labels=("role", "stage"),
        )
        for role, sums in _SUMS.items():
            for name, histogram in zip(STAGES, sums.stages, strict=True):
                stage.add_metric((role, name), *histogram.cumulated())
            ended.add_metric((role, "success", ""), sums.succeeded)
            for reason, count in list(sums.failed.items()):
                ended.add_metric((role, "failed", reason), count)
            nbytes.add_metric((role,), sums.nbytes)
            took.add_metric((role,), *sums.seconds.cumulated())
        yield from (ended, nbytes, took, stage)


_SUMS = {role: _Sums() for role in ROLES}
REGISTRY.register(_Collected())
