"""Tracing is nobody's failure: neither a package that is missing nor an SDK that raises reaches a room."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from kvgrpc.errors import Failure, Reason
from kvgrpc.observability.hand_offs import HandOff
from kvgrpc.observability.tracing import Spans, spans_of

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CANCELLED = Failure(Reason.ROOM_CANCELLED, "line\nbreak")


def hand_off(failure: Failure | None = None) -> HandOff:
    now = time.monotonic()
    times = now - 3000.0, now - 2000.0, now - 1000.0, now
    return HandOff(5, 0, ["P"], *times, 8, 4096, TRACEPARENT, failure)


class Kept(SpanProcessor):
    """Keeps what ended, and raises where it is told to."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.raises = ""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.raises == "start":
            raise RuntimeError("an exporter's own trouble")

    def on_end(self, span: Any) -> None:
        if self.raises == "end":
            raise RuntimeError("an exporter's own trouble")
        self.spans.append(span)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """What ended in an SDK of this test's own: the library's is set once in a process."""
    kept, provider = Kept(), TracerProvider()
    provider.add_span_processor(kept)
    monkeypatch.setattr(trace, "get_tracer", lambda name, version: provider.get_tracer(name, version))
    yield kept
    provider.shutdown()


def test_without_the_package_there_are_no_spans_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with caplog.at_level(logging.WARNING, "kvgrpc"):
        assert spans_of("decode", "D") is None
    assert "kvgrpc[tracing]" in caplog.text


def test_without_an_sdk_the_engines_context_goes_through_as_it_is() -> None:
    spans = Spans("decode", "D")
    span, travels = spans.begin(TRACEPARENT, time.monotonic())
    assert travels == TRACEPARENT
    spans.end(span, hand_off(CANCELLED))


def test_a_span_lasts_from_the_handle_to_the_end_and_its_events_lie_between(kept: Kept) -> None:
    spans = Spans("prefill", "P")
    spans.end(None, hand_off())
    (span,) = kept.spans
    ready, moving = (event.timestamp for event in span.events)
    thousand = 1000 * 10**9
    assert [event.name for event in span.events] == ["ready", "moving"]
    assert ready - span.start_time == moving - ready == thousand
    assert 3 * thousand <= span.end_time - span.start_time < 3.1 * thousand


def test_a_failure_is_the_status_in_one_line(kept: Kept) -> None:
    Spans("prefill", "P").end(None, hand_off(CANCELLED))
    assert kept.spans[0].status.description == r"ROOM_CANCELLED: line\nbreak"


@pytest.mark.parametrize("where", ["start", "end"])
def test_an_sdk_that_raises_is_said_in_the_log_and_in_nobodys_room(
    kept: Kept, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    spans, kept.raises = Spans("decode", "D"), where
    with caplog.at_level(logging.WARNING, "kvgrpc"):
        for _ in range(100):
            span, travels = spans.begin(TRACEPARENT, time.monotonic())
            assert (span is None, travels == TRACEPARENT) == (where == "start", where == "start")
            spans.end(span, hand_off())
    assert 1 <= len(caplog.records) <= 5
