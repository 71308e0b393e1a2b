"""Gauges of what this process's ranks hold now, read from them when somebody scrapes: nothing is counted on the way."""

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
    """One rank at one moment. ``sessions``, ``rooms``, ``registrations``: how many are in each state.

    ``depths``: by names of DEPTHS.
    """

    role: str
    rooms_open: int
    pages_held: int
    pages_held_limit: int
    sessions: Mapping[str, int]
    rooms: Mapping[str, int]
    depths: Mapping[str, int]
    registrations: Mapping[str, int]


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
        rooms: Counter[tuple[str, str]] = Counter()
        registrations: Counter[tuple[str, str]] = Counter()
        for read in list(_WATCHED):
            with contextlib.suppress(RuntimeError, TimeoutError):
                gauges = read()
                total = sums.setdefault(gauges.role, Counter())
                total.update({name: getattr(gauges, name) for name in _TEXTS})
                total.update({name: gauges.depths.get(name, 0) for name in DEPTHS})
                sessions.update({(gauges.role, state): count for state, count in gauges.sessions.items()})
                rooms.update({(gauges.role, state): count for state, count in gauges.rooms.items()})
                registrations.update({(gauges.role, state): count for state, count in gauges.registrations.items()})
        for name, text in {**_TEXTS, **DEPTHS}.items():
            family = GaugeMetricFamily(f"kvgrpc_{name}", text, labels=("role",))
            for role, values in sums.items():
                family.add_metric((role,), values[name])
            yield family
        states = (
            ("sessions", "Pairs with ranks of the other side.", sessions),
            ("rooms", "Rooms that are known, those that are remembered or held after their end included.", rooms),
            ("registrations", "Ranks, by what their registration is at.", registrations),
        )
        for name, text, counts in states:
            family = GaugeMetricFamily(f"kvgrpc_{name}", text, labels=("role", "state"))
            for (role, state), count in counts.items():
                family.add_metric((role, state), count)
            yield family


_TEXTS = {
    "rooms_open": "Rooms that have not ended.",
    "pages_held": "Pages that wait for evidence that nobody writes to them.",
    "pages_held_limit": "Past it a decode rank refuses rooms (PAGES_HELD).",
}
DEPTHS = {
    "commands_waiting": "Calls of engine threads that wait for the loop thread.",
    "writes_waiting": "Submissions that wait for the transfer thread.",
    "writes_running": "Submissions whose end the transfer thread waits for.",
    "data_plane_writes_in_flight": "Single writes that the data plane has on their way.",
    "data_plane_bytes_in_flight": "Their bytes.",
    "unknown_writes": "Submissions of which nobody knows whether they ended; a new data-plane engine ends them.",
    "peers_refused": "Decodes whose rooms are refused for it, but for one in a while.",
}
_WATCHED: list[Read] = []
REGISTRY.register(_Collected())
