"""What ranks of this process hold now, read from them when somebody scrapes: nothing is counted on the way."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgrpc.observability.metrics import REGISTRY


@dataclass(frozen=True, slots=True)
class RankGauges:
    """One rank at one moment. ``sessions``: how many are in each state."""

    role: str
    rooms_open: int
    pages_held: int
    pages_held_limit: int
    sessions: Mapping[str, int]


Read = Callable[[], RankGauges]


def watch_rank(read: Read) -> None:
    """Shows a rank until ``forget_rank``. ``read`` is called on the scraper's thread; where it raises RuntimeError or
    TimeoutError, because the loop is stuck or gone, the rank is left out of that scrape.
    """
    _WATCHED.append(read)


def forget_rank(read: Read) -> None:
    with contextlib.suppress(ValueError):
        _WATCHED.remove(read)


class _Collected(Collector):
    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        sums: dict[str, Counter[str]] = {}
        sessions: Counter[tuple[str, str]] = Counter()
        for read in list(_WATCHED):
            with contextlib.suppress(RuntimeError, TimeoutError):
                gauges = read()
                sums.setdefault(gauges.role, Counter()).update({name: getattr(gauges, name) for name in _TEXTS})
                sessions.update({(gauges.role, state): count for state, count in gauges.sessions.items()})
        for name, text in _TEXTS.items():
            family = GaugeMetricFamily(f"kvgrpc_{name}", text, labels=("role",))
            for role, values in sums.items():
                family.add_metric((role,), values[name])
            yield family
        pairs = GaugeMetricFamily("kvgrpc_sessions", "Pairs with ranks of the other side.", labels=("role", "state"))
        for (role, state), count in sessions.items():
            pairs.add_metric((role, state), count)
        yield pairs


_TEXTS = {
    "rooms_open": "Rooms that have not ended.",
    "pages_held": "Pages that wait for evidence that nobody writes to them.",
    "pages_held_limit": "Past it a decode rank refuses rooms (PAGES_HELD).",
}
_WATCHED: list[Read] = []
REGISTRY.register(_Collected())
