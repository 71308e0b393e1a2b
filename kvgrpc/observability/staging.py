"""Staging memory of pulls that is out now, read from the ranks of this process when somebody scrapes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgrpc.observability.metrics import REGISTRY

# By direction: pages that are out, and those that there are.
StagingUse: TypeAlias = "tuple[tuple[str, int, int], ...]"
Read: TypeAlias = Callable[[], StagingUse]


def watch_staging(read: Read) -> None:
    """Shows staging memory until ``forget_staging``. ``read`` is called on the scraper's thread."""
    with _LOCK:
        _WATCHED.append(read)


def forget_staging(read: Read) -> None:
    with _LOCK:
        if read in _WATCHED:
            _WATCHED.remove(read)


class _Collected(Collector):
    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        out: Counter[str] = Counter()
        most: Counter[str] = Counter()
        with _LOCK:
            watched = list(_WATCHED)
        for read in watched:
            for direction, pages, limit in read():
                out[direction] += pages
                most[direction] += limit
        for name, text, values in (
            ("kvgrpc_pull_pages", "Staging pages that are out, those included that wait for evidence.", out),
            ("kvgrpc_pull_pages_limit", "Staging pages that there are.", most),
        ):
            family = GaugeMetricFamily(name, text, labels=("direction",))
            for direction, value in values.items():
                family.add_metric((direction,), value)
            yield family


_LOCK = threading.Lock()
_WATCHED: list[Read] = []
REGISTRY.register(_Collected())
