"""One hand-off, or one room of a pull, as one trace over both processes (OpenTelemetry), for ranks that are told to
(``RankConfig.tracing``).

Decode's span is the child of what the engine gave its receiver, and is what travels as the room's trace context; the
span of each prefill rank that owes a part is its child. The engine brings the SDK and its exporter: this uses the API
alone, which does nothing where no SDK was set up, and is the only module that imports it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from kvgrpc import __version__
from kvgrpc.errors import Reason
from kvgrpc.observability.hand_offs import HandOff
from kvgrpc.observability.logging import RateLimited, one_line

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)
_MOST_PEERS = 8
_SIDES_OF_A_PULL = {"prefill": "holder", "decode": "taker"}


class OpenSpan(NamedTuple):
    """``began``: of ``time.monotonic``; ``started``: the same moment in Unix nanoseconds. All its times are of one
    clock, so that they are in order.
    """

    span: Span
    began: float
    started: int

    def at(self, moment: float) -> int:
        return self.started + round((moment - self.began) * 1e9)


class Spans:
    """Of one rank. For the loop thread; nothing of an SDK or its exporter that raises gets out."""

    def __init__(self, role: str, rank: object, *, pulls: bool = False) -> None:
        """``pulls``: the rooms are those of pulls, whose holder sends as a prefill does. Raises ImportError where
        opentelemetry-api is not installed."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._nothing = Context()
        self._headers = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("kvgrpc", __version__)
        self._name = f"kvgrpc pull {_SIDES_OF_A_PULL[role]}" if pulls else f"kvgrpc hand-off {role}"
        self._kind = trace.SpanKind.CLIENT if role == "decode" else trace.SpanKind.SERVER
        self._rank = str(rank)
        self._lines = RateLimited(logger)

    def begin(self, traceparent: str, began: float) -> tuple[OpenSpan | None, str]:
        """A span that is open, below ``traceparent`` ("": the first of a trace), and what travels to the other side."""
        try:
            context = self._headers.extract({"traceparent": traceparent}, self._nothing)
            started = time.time_ns() - round((time.monotonic() - began) * 1e9)
            span = self._tracer.start_span(self._name, context, self._kind, start_time=started)
            carrier: dict[str, str] = {}
            self._headers.inject(carrier, self._api.set_span_in_context(span, self._nothing))
        except Exception as error:
            self._could_not(error)
            return None, traceparent
        return OpenSpan(span, began, started), carrier.get("traceparent", traceparent)

    def end(self, span: OpenSpan | None, hand_off: HandOff) -> None:
        """The room ended. ``span``: what ``begin`` gave; None: it began when it says, below its trace
        context."""
        try:
            if span is None:
                span, _ = self.begin(hand_off.traceparent, hand_off.began)
            if span is not None:
                end = span.at(hand_off.ended)
                self._describe(span, hand_off)
                span.span.end(end)
        except Exception as error:
            self._could_not(error)

    def _describe(self, opened: OpenSpan, hand_off: HandOff) -> None:
        span = opened.span
        if not span.is_recording():
            return
        for name, moment in (("ready", hand_off.ready), ("moving", hand_off.moving)):
            if moment:
                span.add_event(name, timestamp=opened.at(moment))
        span.set_attributes(
            {
                "kvgrpc.rank": self._rank,
                "kvgrpc.peers": [str(peer) for peer in hand_off.peers[:_MOST_PEERS]],
                "kvgrpc.room": hand_off.room,
                "kvgrpc.attempt": hand_off.attempt,
                "kvgrpc.pages": hand_off.pages,
                "kvgrpc.bytes": hand_off.nbytes,
            }
        )
        failure = hand_off.failure
        if failure is not None:
            reason = failure.reason.name if isinstance(failure.reason, Reason) else Reason.UNSPECIFIED.name
            span.set_attributes({"kvgrpc.reason": reason, "kvgrpc.origin": failure.origin})
            span.set_status(self._api.StatusCode.ERROR, f"{reason}: {one_line(failure.message)}")

    def _could_not(self, error: Exception) -> None:
        self._lines.say(logging.WARNING, "spans", f"{self._rank} could not trace a hand-off: {type(error).__name__}")


def spans_of(role: str, rank: object, *, pulls: bool = False) -> Spans | None:
    """None, and a line in the log, where opentelemetry-api is not installed."""
    try:
        return Spans(role, rank, pulls=pulls)
    except ImportError:
        logger.warning("%s is to trace, but opentelemetry-api is not installed: pip install 'kvgrpc[tracing]'", rank)
        return None
