"""Threads that ask a store for pages, and those of them that a store holds; read from them when somebody scrapes."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgrpc.observability.metrics import REGISTRY


class StorageUser(Protocol):
    """Has threads that call a store."""

    def storage_threads(self) -> Sequence[tuple[str, int, int]]:
        """Their work, their number, and how many of them stand in a call that outlived its time. Never blocks."""


def watch_storage(user: StorageUser) -> None:
    """Shows its threads until ``forget_storage``, or until nobody has it any more."""
    with _LOCK:
        _WATCHED.add(user)


def forget_storage(user: StorageUser) -> None:
    with _LOCK:
        _WATCHED.discard(user)


class _Collected(Collector):
    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        threads: Counter[str] = Counter()
        hung: Counter[str] = Counter()
        with _LOCK:
            watched = list(_WATCHED)
        for user in watched:
            for kind, number, hanging in user.storage_threads():
                threads[kind] += number
                hung[kind] += hanging
        for name, text, values in (
            ("kvgrpc_storage_threads", "Threads that call a store.", threads),
            ("kvgrpc_storage_threads_hung", "Those in a call that outlived its time.", hung),
        ):
            family = GaugeMetricFamily(name, text, labels=("kind",))
            for kind, value in values.items():
                family.add_metric((kind,), value)
            yield family


_LOCK = threading.Lock()
_WATCHED: weakref.WeakSet[StorageUser] = weakref.WeakSet()
REGISTRY.register(_Collected())
