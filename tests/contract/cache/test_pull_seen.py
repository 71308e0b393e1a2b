"""What people see of pulls beside their list: spans, and the time that they are estimated to save."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvgrpc.observability.metrics import REGISTRY
from tests.support.cache_serving import PAGE_TOKENS, SHAPE, hashes_of, prompt
from tests.support.pull_fleet import PullFleet, candidates_of, pulled
from tests.support.waiting import wait_until


def test_a_room_of_a_pull_is_a_span_at_either_side(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", lambda name, version: provider.get_tracer(name, version))
    holder, taker = fleet.open("holder", tracing=True), fleet.open("taker", tracing=True)
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    assert pulled(taker, hashes).completed == 4
    wait_until(lambda: len(kept.get_finished_spans()) == 2)
    spans: dict[str, Any] = {span.name: span for span in kept.get_finished_spans()}
    above, below = spans["kvgrpc pull taker"], spans["kvgrpc pull holder"]
    assert above.parent is None and below.parent.span_id == above.context.span_id
    assert above.context.trace_id == below.context.trace_id
    for span, peer in ((above, "holder/"), (below, "taker/")):
        assert span.attributes["kvgrpc.bytes"] == 4 * SHAPE.page_bytes
        assert span.attributes["kvgrpc.peers"][0].startswith(peer)
    assert above.attributes["kvgrpc.room"] == below.attributes["kvgrpc.room"]


def spared_and_spent() -> tuple[float, float]:
    found = [REGISTRY.get_sample_value(f"kvgrpc_pull_{what}_seconds_total") or 0.0 for what in ("spared", "spent")]
    return found[0], found[1]


def test_pages_that_were_taken_are_seconds_of_computing_spared(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    before = spared_and_spent()
    assert pulled(taker, hashes[:4]).completed == 4
    assert spared_and_spent() == before, "nobody said how quickly this engine computes"
    taker.rank.load.say(prefill_tokens_per_second=2.0)
    assert pulled(taker, hashes).completed == 12
    spared, spent = spared_and_spent()
    assert spared - before[0] == pytest.approx(8 * PAGE_TOKENS / 2.0)
    assert 0 < spent - before[1] < 16.0
