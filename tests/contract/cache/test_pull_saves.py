"""The seconds that pulls are estimated to save, as metrics tell them."""

from __future__ import annotations

import pytest

from kvgrpc.observability.metrics import REGISTRY
from tests.support.cache_serving import PAGE_TOKENS, hashes_of, prompt
from tests.support.pull_fleet import PullFleet, pulled


def saved_and_spent() -> tuple[float, float]:
    found = [REGISTRY.get_sample_value(f"kvgrpc_pull_{what}_seconds_total") or 0.0 for what in ("saved", "spent")]
    return found[0], found[1]


def test_pages_that_were_taken_are_seconds_of_computing_saved(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    before = saved_and_spent()
    assert pulled(taker, hashes[:4]).completed == 4
    assert saved_and_spent() == before, "nobody said how quickly this engine computes"
    taker.rank.load.say(prefill_tokens_per_second=2.0)
    assert pulled(taker, hashes).completed == 12
    saved, spent = saved_and_spent()
    assert saved - before[0] == pytest.approx(8 * PAGE_TOKENS / 2.0)
    assert 0 < spent - before[1] < 16.0
