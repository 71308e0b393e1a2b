"""Figures of the hand-offs of one pair: since it stands, and in the last minute. For one thread."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_SLICE_SECONDS, _SLICES = 10.0, 6
# Two neighbouring durations of a quantile differ by 5 %.
_STEP = math.log(1.05)
_SHORTEST = 1e-6

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(slots=True)
class HandOffSums:
    """``moving_seconds``: the sum of the times in which pages of a hand-off moved; hand-offs overlap."""

    succeeded: int = 0
    failed: int = 0
    nbytes: int = 0
    moving_seconds: float = 0.0
    _durations: Counter[int] = field(default_factory=Counter)

    @property
    def bytes_per_second(self) -> float:
        """Of one hand-off, in the mean; 0 before the first."""
        return self.nbytes / self.moving_seconds if self.moving_seconds else 0.0

    def quantile(self, share: float) -> float:
        """Seconds from the engine's handle to Success, to within 5 %, which that share of hand-offs did not exceed; 0
        before the first."""
        wanted, seen = math.ceil(share * self._durations.total()), 0
        for bucket, count in sorted(self._durations.items()):
            seen += count
            if seen >= wanted:
                return math.exp(bucket * _STEP)
        return 0.0

    def add(self, seconds: Floats, moving_seconds: Floats, nbytes: Floats) -> None:
        """Those that went well, a value of each array for each of them."""
        self.succeeded += len(seconds)
        self.nbytes += int(nbytes.sum())
        self.moving_seconds += float(moving_seconds.sum())
        buckets = np.rint(np.log(np.maximum(seconds, _SHORTEST)) / _STEP).astype(np.int64)
        self._durations.update(dict(zip(*map(np.ndarray.tolist, np.unique(buckets, return_counts=True)), strict=True)))

    def merge(self, others: Iterable[HandOffSums]) -> HandOffSums:
        for other in others:
            self.succeeded += other.succeeded
            self.failed += other.failed
            self.nbytes += other.nbytes
            self.moving_seconds += other.moving_seconds
            self._durations += other._durations
        return self


class PairFigures:
    """``since_start``: of all hand-offs with that incarnation."""

    def __init__(self) -> None:
        self.since_start = HandOffSums()
        self._slices: deque[tuple[int, HandOffSums]] = deque(maxlen=_SLICES)

    def last_minute(self) -> HandOffSums:
        """Of the last 50 to 60 seconds."""
        oldest = _slice(time.monotonic()) - _SLICES
        return HandOffSums().merge(sums for number, sums in self._slices if number > oldest)

    def add(self, ended: Floats, seconds: Floats, moving_seconds: Floats, nbytes: Floats) -> None:
        """Those that went well. ``ended``: of ``time.monotonic``; ``seconds``: from the engine's handle to Success."""
        self.since_start.add(seconds, moving_seconds, nbytes)
        numbers = ended // _SLICE_SECONDS
        for number in sorted(set(numbers.tolist())):  # np.unique imports numpy.ma at its first call, on the loop
            of_slice = numbers == number
            self._of(int(number)).add(seconds[of_slice], moving_seconds[of_slice], nbytes[of_slice])

    def add_failed(self, ended: float) -> None:
        self.since_start.failed += 1
        self._of(_slice(ended)).failed += 1

    def _of(self, number: int) -> HandOffSums:
        if not self._slices or self._slices[-1][0] < number:
            self._slices.append((number, HandOffSums()))
        return self._slices[-1][1]


def _slice(moment: float) -> int:
    return int(moment / _SLICE_SECONDS)
