"""What /metrics says of cache tiers: all caches of the process together, and none that is stuck or gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.model import Tier
from kvgrpc.observability.caches import Read, forget_cache, watch_cache
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.prefetch.model import TierUse


@contextmanager
def watched(*reads: Read) -> Iterator[None]:
    for read in reads:
        watch_cache(read)
    try:
        yield
    finally:
        for read in reads:
            forget_cache(read)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"kvgrpc_{name}", labels)


def use(used: int, **details: int) -> TierUse:
    return TierUse(Tier.HOST, pages=100, used=used, reserved=0, page_bytes=4096, details=details)


def test_caches_of_a_process_are_one_sum() -> None:
    with watched(lambda: [use(10, hits=3, pinned=1)], lambda: [use(5, hits=4, misses=2)]):
        assert value("cache_pages", tier="host") == 200
        assert value("cache_pages_used", tier="host") == 15
        assert value("cache_bytes_used", tier="host") == 15 * 4096
        assert value("cache_pages_counted_total", tier="host", what="hits") == 7
        assert value("cache_pages_counted_total", tier="host", what="misses") == 2
        assert value("cache_pages_counted_total", tier="host", what="pinned") is None


def test_a_cache_that_fails_hides_no_other() -> None:
    def broken() -> list[TierUse]:
        raise RuntimeError("closed")

    with watched(broken, lambda: [use(5)]):
        assert value("cache_pages_used", tier="host") == 5


def test_a_cache_that_is_still_read_is_left_out() -> None:
    """A store that hangs costs the thread of one scrape, not of each."""
    inner: list[float | None] = []

    def hangs() -> list[TierUse]:
        inner.append(value("cache_pages_used", tier="host"))  # another scrape, while this one waits
        return [use(10)]

    with watched(hangs):
        assert value("cache_pages_used", tier="host") == 10
    assert inner == [None]


def test_a_cache_that_was_closed_is_not_shown() -> None:
    with watched(lambda: [use(10)]):
        pass
    assert value("cache_pages_used", tier="host") is None
