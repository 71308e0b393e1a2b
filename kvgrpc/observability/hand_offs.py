"""How hand-offs ended: what is counted of them, and the one line that a failed one writes.

Counted in plain integers by the loop thread, read when somebody scrapes: a hot path pays for no lock.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

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

    def succeeded(self, seconds: float | None, nbytes: int, stages: Sequence[float] | None = None) -> None:
        """``seconds`` since the engine made its handle (None: it made none); ``nbytes``: of the room's pages;
        ``stages``: seconds of each of STAGES, but for the last.
        """
        sums = self._sums
        sums.succeeded += 1
        sums.nbytes += nbytes
        if seconds is not None:
            sums.seconds += seconds
            sums.buckets[bisect_left(SECONDS, seconds)] += 1
        for number, taken in enumerate(stages or ()):
            sums.stage_seconds[number] += taken
            sums.stage_buckets[number][bisect_left(SECONDS, taken)] += 1

    def notified(self, seconds: float, rooms: int) -> None:
        """News of so many rooms were handed to their stream, ``seconds`` after the first of them was there."""
        sums = self._sums
        sums.stage_seconds[_NOTIFY] += seconds * rooms
        sums.stage_buckets[_NOTIFY][bisect_left(SECONDS, seconds)] += rooms

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

    def refused(self, own: object, caller: str, failure: Failure) -> None:
        """A stream of ``caller`` ("host:port") never became a session."""
        reason = failure.reason.name if isinstance(failure.reason, Reason) else Reason.UNSPECIFIED.name
        text = f"{own} refused a session of {one_line(caller)}: {reason}: {one_line(failure.message)}"
        leaves = failure.reason is Reason.SERVER_DRAINING
        self._lines.say(logging.INFO if leaves else logging.WARNING, f"refused sessions, {reason}", text)

    def flush(self) -> None:
        """Says what was left out, once its time is over; to be called now and then."""
        self._lines.flush()


class _Sums:
    """Of one role."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed: Counter[str] = Counter()
        self.nbytes = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(SECONDS) + 1)
        self.stage_seconds = [0.0] * len(STAGES)
        self.stage_buckets = [[0] * (len(SECONDS) + 1) for _ in STAGES]


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
            for name, buckets, seconds in zip(STAGES, sums.stage_buckets, sums.stage_seconds, strict=True):
                stage.add_metric((role, name), _cumulated(list(buckets)), seconds)
            ended.add_metric((role, "success", ""), sums.succeeded)
            for reason, count in list(sums.failed.items()):
                ended.add_metric((role, "failed", reason), count)
            nbytes.add_metric((role,), sums.nbytes)
            took.add_metric((role,), _cumulated(list(sums.buckets)), sums.seconds)
        yield from (ended, nbytes, took, stage)


def _cumulated(buckets: list[int]) -> list[tuple[str, float]]:
    total, cumulated = 0, []
    for bound, count in zip((*map(str, SECONDS), "+Inf"), buckets, strict=True):
        total += count
        cumulated.append((bound, float(total)))
    return cumulated


_SUMS = {role: _Sums() for role in ROLES}
REGISTRY.register(_Collected())
