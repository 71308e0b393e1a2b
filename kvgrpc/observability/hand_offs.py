"""The ends of hand-offs: what is counted of them, the last that went well, and the one line that a failed one writes.

A room that went well is only appended, by the loop thread; a tick a second later, or who asks for rooms or pairs before
it, sorts all that ended since in one go: as many array operations for one room as for a thousand.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgrpc.errors import Failure, Reason
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.observability.metrics import REGISTRY, SECONDS
from kvgrpc.observability.pair_figures import Floats, PairFigures

ROLES = ("prefill", "decode")
STAGES = ("bootstrap", "wait", "transfer", "notify")
_NOTIFY = STAGES.index("notify")
_LAST_SUCCEEDED = 256
_SORTED_AT_ONCE = 1024
_SORTED_WITHIN_SECONDS = 1.0
_MOST_PAIRS = 4096
_MOST_PEERS_SAID = 8

# How long the stages of a hand-off took, in seconds: until both sides were known, from then until there were pages to
# move, and from then until they had moved and the end was known here.
Stages: TypeAlias = "tuple[float, float, float]"


class HandOff(NamedTuple):
    """A room that ended. Times are of ``time.monotonic``; 0: it never came to that.

    ``peers``: who owed a part of it, or was owed one. ``began``: the engine made its handle (0: it made none);
    ``ready``: both sides were known; ``moving``: there were pages to move; ``nbytes``: of the room's pages.
    """

    room: int
    attempt: int
    peers: Sequence[object]
    began: float
    ready: float
    moving: float
    ended: float
    pages: int
    nbytes: int
    traceparent: str
    failure: Failure | None

    def stages(self) -> Stages:
        ready = max(self.ready, self.began)
        moving = max(self.moving, ready)
        return ready - self.began, moving - ready, self.ended - moving


class HandOffs:
    """Counts for one rank, into the sums of its role in this process. For the loop thread.

    The lines are those of ``logger``: at most 5 in 10 seconds for one reason, with the count of those left out.
    """

    def __init__(self, role: str, logger: logging.Logger) -> None:
        self._role = role
        self._sums = _SUMS[role]
        self._lines = RateLimited(logger)
        # Those that went well and are not counted in ``_pairs`` yet: a room only appends.
        self._ended: list[HandOff] = []
        self._last: deque[HandOff] = deque(maxlen=2 * _LAST_SUCCEEDED)  # a room may be used again
        # Made of ``_last`` for who asks, and kept for who asks next: a list of rooms asks once for each of them.
        self._last_by_room: Mapping[tuple[int, int], HandOff] | None = None
        self._pairs: dict[object, PairFigures] = {}

    def succeeded(self, hand_off: HandOff) -> None:
        sums = self._sums
        sums.succeeded += 1
        sums.nbytes += hand_off.nbytes
        self._ended.append(hand_off)
        if len(self._ended) >= _SORTED_AT_ONCE:
            self._sort_ended()

    def notified(self, seconds: float, rooms: int) -> None:
        """News of so many rooms were handed to their stream, ``seconds`` after the first of them was there."""
        self._sums.stages[_NOTIFY].add(seconds, rooms)

    def sent(self, rooms: int) -> None:
        """A frame with news of so many rooms was written."""
        self._sums.sent.count(rooms)

    def heard(self, rooms: int) -> None:
        """A frame with news of so many rooms arrived."""
        self._sums.received.count(rooms)

    def failed(self, hand_off: HandOff) -> None:
        failure = hand_off.failure
        assert failure is not None
        reason = failure.reason.name if isinstance(failure.reason, Reason) else Reason.UNSPECIFIED.name
        self._sums.failed[reason] += 1
        for peer in hand_off.peers:
            self._pair(peer).add_failed(hand_off.ended)

        def line() -> str:
            again = f" attempt {hand_off.attempt}" if hand_off.attempt else ""
            after = f" after {hand_off.ended - hand_off.began:.3f} s" if hand_off.began else ""
            origin = f" (seen first by {failure.origin})" if failure.origin else ""
            what = f"{reason}: {one_line(failure.message)}{origin}"
            return f"room {hand_off.room}{again} failed at {self._role}{after}: {what}"

        # An engine that gives a request up is daily business.
        level = logging.INFO if failure.reason is Reason.ROOM_CANCELLED else logging.WARNING
        self._lines.say(level, reason, line, about=_about(hand_off, reason))

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

    def last_succeeded(self) -> Mapping[tuple[int, int], HandOff]:
        """The last 256 that went well, by room and attempt, the oldest first."""
        self._sort_ended()
        if self._last_by_room is None:
            last: dict[tuple[int, int], HandOff] = {}
            for hand_off in self._last:
                key = hand_off.room, hand_off.attempt
                last.pop(key, None)
                last[key] = hand_off
            self._last_by_room = MappingProxyType(dict(list(last.items())[-_LAST_SUCCEEDED:]))
        return self._last_by_room

    def of_pair(self, peer: object) -> PairFigures:
        """Returns what the hand-offs with one incarnation came to. Of 4,096 of them; where there are more, the first
        are forgotten."""
        self._sort_ended()
        return self._pairs.get(peer) or PairFigures()

    def sort_in(self, within: float = _SORTED_WITHIN_SECONDS) -> None:
        """Sorts durations into their buckets, once one of them has waited so long (s); called with each tick."""
        if self._ended and time.monotonic() - self._ended[0].ended >= within:
            self._sort_ended()

    def _sort_ended(self) -> None:
        """Counts those that went well since the last time, all in one go: one by one they took a fifth of a room."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        self._last.extend(ended)
        self._last_by_room = None
        began, ready, moving, over, _, nbytes = _columns(ended)
        ready = np.maximum(ready, began)
        moving = np.maximum(moving, ready)
        for histogram, taken in zip(self._sums.stages, (ready - began, moving - ready, over - moving), strict=False):
            histogram.add_all(taken)
        seconds = over - began
        self._sums.seconds.add_all(seconds[began > 0])
        for peer, (rooms, shares) in _by_peer(ended).items():
            self._pair(peer).add(over[rooms], seconds[rooms], (over - moving)[rooms], nbytes[rooms] // shares)

    def _pair(self, peer: object) -> PairFigures:
        figures = self._pairs.get(peer)
        if figures is None:
            if len(self._pairs) >= _MOST_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            figures = self._pairs[peer] = PairFigures()
        return figures


def _columns(ended: list[HandOff]) -> Floats:
    """From ``began`` to ``nbytes``, a row each."""
    fields = [each[3:9] for each in ended]
    columns: Floats = np.fromiter(chain.from_iterable(fields), np.float64, 6 * len(fields)).reshape(-1, 6).T
    return columns


def _by_peer(ended: list[HandOff]) -> dict[object, tuple[list[int], list[int]]]:
    """Positions of the rooms of each peer, and among how many peers each of them was shared."""
    # By identity first: a pair's reference is one object, and its hash costs more than all else here.
    found: dict[int, tuple[object, list[int], list[int]]] = {}
    for number, each in enumerate(ended):
        for peer in each.peers:
            same = found.get(id(peer))
            if same is None:
                same = found[id(peer)] = peer, [], []
            same[1].append(number)
            same[2].append(len(each.peers))
    together: dict[object, tuple[list[int], list[int]]] = {}
    for peer, rooms, shares in found.values():
        of_all = together.setdefault(peer, ([], []))
        of_all[0].extend(rooms)
        of_all[1].extend(shares)
    return together


def _about(hand_off: HandOff, reason: str) -> dict[str, object]:
    """Returns what a program looks for in the log; the second part of a W3C trace context is the trace's id."""
    fields: dict[str, object] = {"room": hand_off.room, "attempt": hand_off.attempt, "reason": reason}
    if hand_off.peers:
        fields["peers"] = [str(peer) for peer in hand_off.peers[:_MOST_PEERS_SAID]]
    if hand_off.traceparent.count("-") == 3:
        fields["trace_id"] = one_line(hand_off.traceparent.split("-")[1])
    return fields


class _Sums:
    """Of one role."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed: Counter[str] = Counter()
        self.nbytes = 0
        self.sent, self.received = _Frames(), _Frames()
        self.seconds = _Histogram()
        self.stages = [_Histogram() for _ in STAGES]


class _Frames:
    """Of sessions, in one direction."""

    def __init__(self) -> None:
        self.frames = self.rooms = 0

    def count(self, rooms: int) -> None:
        self.frames += 1
        self.rooms += rooms


class _Histogram:
    """Durations in SECONDS' buckets. Thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float, times: int) -> None:
        with self._lock:
            self._counts[bisect_left(SECONDS, seconds)] += times
            self._sum += seconds * times

    def add_all(self, seconds: Floats) -> None:
        buckets = np.bincount(np.searchsorted(SECONDS, seconds), minlength=len(self._counts)).tolist()
        with self._lock:
            self._counts = [before + more for before, more in zip(self._counts, buckets, strict=True)]
            self._sum += float(seconds.sum())

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets as prometheus_client takes them, and the sum."""
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
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
        frames = CounterMetricFamily("kvgrpc_session_frames", "Frames of sessions.", labels=("direction",))
        rooms = CounterMetricFamily("kvgrpc_session_rooms", "Room states in those frames.", labels=("direction",))
        of_roles = _SUMS.values()
        sent, received = [sums.sent for sums in of_roles], [sums.received for sums in of_roles]
        for direction, counted in (("sent", sent), ("received", received)):
            frames.add_metric((direction,), sum(each.frames for each in counted))
            rooms.add_metric((direction,), sum(each.rooms for each in counted))
        for role, sums in _SUMS.items():
            for name, histogram in zip(STAGES, sums.stages, strict=True):
                stage.add_metric((role, name), *histogram.cumulated())
            ended.add_metric((role, "success", ""), sums.succeeded)
            for reason, count in list(sums.failed.items()):
                ended.add_metric((role, "failed", reason), count)
            nbytes.add_metric((role,), sums.nbytes)
            took.add_metric((role,), *sums.seconds.cumulated())
        yield from (ended, nbytes, took, stage, frames, rooms)


_SUMS = {role: _Sums() for role in ROLES}
REGISTRY.register(_Collected())
