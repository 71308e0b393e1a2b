"""Spans of pulls, as OpenTelemetry's SDK gets them of two ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.cache_serving import SHAPE, hashes_of, prompt
from tests.support.pull_fleet import PullFleet, candidates_of, pulled
from tests.support.waiting import wait_until


def test_a_room_of_a_pull_is_a_span_at_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", lambda name, version: provider.get_tracer(name, version))
    with closing(PullFleet(tmp_path)) as fleet:
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
