"""The fill of the cache tiers of this process, read from them when somebody scrapes."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgrpc.observability.metrics import REGISTRY


class Named(Protocol):
    """A member of an enum."""

    @property
    def name(self) -> str: ...


class Use(Protocol):
    """Of one tier, as kvgrpc.prefetch.model.TierUse."""

    @property
    def tier(self) -> Named: ...

    @property
    def pages(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def details(self) -> Mapping[str, int]: ...


Read = Callable[[], Sequence[Use]]


def watch_cache(read: Read) -> None:
    """Shows a cache until ``forget_cache``. ``read`` may block: one that still runs is left out of the next scrape."""
    _WATCHED[read] = threading.Lock()


def forget_cache(read: Read) -> None:
    _WATCHED.pop(read, None)


class _Collected(Collector):
    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        pages: dict[str, Counter[str]] = {name: Counter() for name in _GAUGES}
        counts: Counter[tuple[str, str]] = Counter()
        for use in _uses():
            tier = use.tier.name.lower()
            known = (use.pages, use.used, use.used * use.page_bytes)
            for name, value in zip(_GAUGES, known, strict=True):
                pages[name][tier] += value
            counts.update({(tier, what): use.details[what] for what in _COUNTS if what in use.details})
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"kvgrpc_{name}", text, labels=("tier",))
            for tier, value in pages[name].items():
                family.add_metric((tier,), value)
            yield family
        counted = CounterMetricFamily(
            "kvgrpc_cache_pages_counted", "Pages, by what came of them.", labels=("tier", "what")
        )
        for (tier, what), value in counts.items():
            counted.add_metric((tier, what), value)
        yield counted


def _uses() -> Iterator[Use]:
    for read, reading in list(_WATCHED.items()):
        if reading.acquire(blocking=False):
            try:
                with contextlib.suppress(Exception):  # a cache that closes, or a store that fails: it has its own log
                    yield from read()
            finally:
                reading.release()


_GAUGES = {
    "cache_pages": "Pages that fit; 0 where only storage itself knows.",
    "cache_pages_used": "Pages that are in use.",
    "cache_bytes_used": "Their bytes.",
}
# Of what tiers count for GetCacheInfo, what grows.
_COUNTS = ("hits", "misses", "evicted", "written", "failed", "timeouts")
_WATCHED: dict[Read, threading.Lock] = {}
REGISTRY.register(_Collected())
