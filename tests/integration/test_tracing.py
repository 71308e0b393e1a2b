"""One hand-off is one trace over both processes, below the span of the engine's request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvgrpc.model import Attention, Layout, ModelIdentity
from kvgrpc.server import RegistryServer
from tests.support.rank_host import LAYERS, PAGE_BYTES, RankProcess

pytestmark = pytest.mark.timeout(150)  # up to three ranks in processes of their own
SUCCESS, FAILED = 4, 0
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
Open = Callable[..., RankProcess]


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[RankProcess, RankProcess]]:
    made = [
        RankProcess("P", "PREFILL", registry="embedded", tracing=True),
        RankProcess("D", "DECODE", tracing=True),
    ]
    for each in made:
        each.opened().call("trace")
    yield made[0], made[1]
    for each in made:
        each.end()


@pytest.fixture
def spans(ranks: tuple[RankProcess, RankProcess]) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
    """Waits for the next span of each process: prefill's and decode's. None came before."""
    before = [len(each.call("spans", 0)) for each in ranks]

    def next_of_each() -> tuple[dict[str, Any], dict[str, Any]]:
        found = [each.call("spans", count + 1)[count:] for each, count in zip(ranks, before, strict=True)]
        assert [len(each) for each in found] == [1, 1]
        return found[0][0], found[1][0]

    return next_of_each


def test_one_hand_off_is_one_trace_below_the_request(ranks: tuple[RankProcess, RankProcess], spans: Any) -> None:
    prefill, decode = ranks
    decode.call("receive", 11, prefill.address, range(8), traceparent=f"00-{TRACE}-{SPAN}-01")
    prefill.call("send", 11, range(3, 11))
    decode.call("wait", "receivers", [11], [SUCCESS])
    below, above = spans()
    assert above["trace"] == below["trace"] == TRACE
    assert above["parent"] == SPAN and below["parent"] == above["span"]
    assert (above["name"], above["kind"]) == ("kvgrpc hand-off decode", "CLIENT")
    assert (below["name"], below["kind"]) == ("kvgrpc hand-off prefill", "SERVER")
    for span, rank, peer in ((above, decode.ref, prefill.ref), (below, prefill.ref, decode.ref)):
        assert span["attributes"] == {
            "kvgrpc.rank": rank,
            "kvgrpc.peers": (peer,),
            "kvgrpc.room": 11,
            "kvgrpc.attempt": 0,
            "kvgrpc.pages": 8,
            "kvgrpc.bytes": 8 * LAYERS * PAGE_BYTES,
        }
        assert span["status"][0] == "UNSET"
        assert sorted(span["events"]) == ["moving", "ready"]
        assert min(span["moments"]) == span["moments"][0] and max(span["moments"]) == span["moments"][-1]


def test_without_a_trace_of_the_engine_decode_begins_one(ranks: tuple[RankProcess, RankProcess], spans: Any) -> None:
    prefill, decode = ranks
    decode.call("receive", 12, prefill.address, range(2), traceparent="no trace context")
    prefill.call("send", 12, range(2))
    decode.call("wait", "receivers", [12], [SUCCESS])
    below, above = spans()
    assert above["parent"] == "" and below["parent"] == above["span"] and below["trace"] == above["trace"]


def test_a_failed_hand_off_says_why_on_both_sides(ranks: tuple[RankProcess, RankProcess], spans: Any) -> None:
    prefill, decode = ranks
    decode.call("receive", 13, prefill.address, range(2), traceparent=f"00-{TRACE}-{SPAN}-01")
    prefill.call("send", 13, range(2), last=False)
    prefill.call("wait", "senders", [13], [3])
    decode.call("abort", "receivers", 13)
    prefill.call("wait", "senders", [13], [FAILED])
    below, above = spans()
    assert below["parent"] == above["span"]
    for span in (above, below):
        assert span["attributes"]["kvgrpc.reason"] == "ROOM_CANCELLED"
        assert span["attributes"]["kvgrpc.origin"] == decode.ref
        assert span["status"] == ("ERROR", "ROOM_CANCELLED: the decode engine aborted it")


def test_what_the_engine_does_not_sample_is_sampled_on_neither_side(
    ranks: tuple[RankProcess, RankProcess], spans: Any
) -> None:
    prefill, decode = ranks
    # Pages that no room had which failed: prefill may not have said yet that it writes to those no more.
    for room, flags, pages in ((14, "00", range(4, 6)), (15, "01", range(6, 8))):
        decode.call("receive", room, prefill.address, pages, traceparent=f"00-{TRACE}-{SPAN}-{flags}")
        prefill.call("send", room, pages)
        decode.call("wait", "receivers", [room], [SUCCESS])
        prefill.call("wait", "senders", [room], [SUCCESS])
    below, above = spans()
    assert below["attributes"]["kvgrpc.room"] == above["attributes"]["kvgrpc.room"] == 15


@pytest.mark.slow
def test_each_prefill_rank_that_is_named_a_room_has_its_span_below_decodes() -> None:
    registry = RegistryServer(["127.0.0.1:0"]).open()
    settings: dict[str, Any] = {"tracing": True, "model": ModelIdentity("latent", attention=Attention.MLA)}
    at_prefill = {"registry": registry.address, "layout": Layout(tp=2), **settings}
    opened = [RankProcess("Q", "PREFILL", tp=tp, **at_prefill) for tp in range(2)]
    opened.append(RankProcess("E", "DECODE", **settings))
    try:
        for each in opened:
            each.opened().call("trace")
        *prefill, decode = opened
        decode.call("receive", 21, registry.address, range(4), traceparent=f"00-{TRACE}-{SPAN}-01")
        for each in prefill:
            each.call("send", 21, range(4))
        (above,) = decode.call("spans", 1)
        assert above["parent"] == SPAN
        assert sorted(above["attributes"]["kvgrpc.peers"]) == sorted(each.ref for each in prefill)
        for each in prefill:
            (below,) = each.call("spans", 1)
            assert (below["trace"], below["parent"]) == (TRACE, above["span"])
    finally:
        for each in opened:
            each.end()
        registry.close()
