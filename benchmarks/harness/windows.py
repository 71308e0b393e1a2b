"""What a batch keeps of its speed beside something else: windows of time without it, and with it between them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Window:
    """``tokens``: that the batch got in its time. ``cpu``: seconds, of the process that generates, by all its threads
    but the one that does; within ``seconds``, until the last that arrived has ended."""

    tokens: int
    cpu: float
    seconds: float


def kept(alone: Sequence[Window], beside: Sequence[Window]) -> float:
    """The share of its tokens that the batch got in the windows ``beside``, each of which stands between two of
    ``alone``.

    The longer its requests are the more time a token of a batch takes, by as much with each: so without what arrived a
    window would have had about the harmonic mean of the two around it.
    """
    expected = [statistics.harmonic_mean([before.tokens, after.tokens]) for before, after in pairwise(alone)]
    return sum(each.tokens for each in beside) / sum(expected)


def cpu_beside(alone: Sequence[Window], beside: Sequence[Window]) -> float:
    """Seconds of the other threads in the windows ``beside``, less what they use in as much time without."""
    share = sum(each.seconds for each in beside) / sum(each.seconds for each in alone)
    return sum(each.cpu for each in beside) - share * sum(each.cpu for each in alone)
