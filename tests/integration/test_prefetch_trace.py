"""Requests of a real service through device, host and storage: hits as a simulator has them, and every byte its own."""

from __future__ import annotations

import pytest

from kvgrpc.prefetch.model import PrefetchLimits, WritePolicy
from tests.support.prefix_cache import requests
from tests.support.tier_simulator import Hits, TierSimulator
from tests.support.tiered_engine import Engine
from tests.support.waiting import wait_until

# The simulator has no clock, so a machine that stalls for seconds must make no page late; and to it a prefetch may have
# all of the host.
LIMITS = PrefetchLimits(threshold_tokens=4, batch_pages=4, occupancy=1.0, storage_timeout=60.0, operation_timeout=60.0)


def replay(engine: Engine, pages: list[str]) -> Hits:
    """One request, prefetch first, until nothing moves any more."""
    operation = engine.controller.prefetch(pages)
    assert operation.wait(60.0)
    prefetched = operation.completed - operation.covered
    on_device, cached = engine.cache.leading_by_tier(pages)
    loaded, computed = engine.loaded, engine.computed
    engine.request(pages)
    wait_until(lambda: all(row.state.ended for row in engine.controller.book.all()))
    assert engine.computed - computed == len(pages) - cached
    return Hits(on_device, engine.loaded - loaded, prefetched, engine.computed - computed)


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("device", "host", "served"),
    [
        (60, 120, 200),
        pytest.param(260, 300, 1_000, marks=pytest.mark.slow),
        pytest.param(500, 1_000, None, marks=pytest.mark.slow),
        pytest.param(4_000, 8_000, None, marks=pytest.mark.slow),
    ],
)
def test_the_hits_of_each_tier_are_those_of_a_simulator(device: int, host: int, served: int | None) -> None:
    engine = Engine(WritePolicy.WRITE_THROUGH, device_pages=device, host_pages=host, limits=LIMITS)
    simulator, total = TierSimulator(device, host), Hits()
    for blocks in requests(served):
        pages = [str(block) for block in blocks]
        if len(pages) > device:
            continue
        hits = replay(engine, pages)
        simulator.request(pages)
        for name in ("device", "host", "prefetched", "computed"):
            setattr(total, name, getattr(total, name) + getattr(hits, name))
        rows = [row for row in engine.controller.book.all() if row.failure or row.stop]
        assert total == simulator.hits, rows[-3:]
    assert min(total.device, total.host, total.prefetched, total.computed) > 0
    print(f"device {device}, host {host} pages: {total}")
    engine.close()
