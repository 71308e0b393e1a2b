"""Which dp ranks of a READY engine lack the event stream that others have, and how often that is said."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kvgrpc.model import Layout
from kvgrpc.observability import metrics
from kvgrpc.registry.engine import MAX_DP_LACKING_EVENTS
from kvgrpc.registry.model import Endpoints, EngineChange, RankRow, ResolvedEngine
from kvgrpc.registry.streams import MissingStreams
from kvgrpc.registry.table import EngineTable
from tests.support.registry_builders import row

NONE, WATCH, LIVE = "none", "watch", "live"


def rank(dp: int, stream: str, layout: Layout, *, tp: int = 0, epoch: int = 1) -> RankRow:
    bare = row(dp=dp, tp=tp, layout=layout, epoch=epoch)
    live = "tcp://10.0.0.1:5557" if stream == LIVE else ""
    return replace(bare, endpoints=Endpoints(bare.endpoints.grpc, live), serves_events=stream != NONE)


def lacking(*streams: str) -> tuple[int, ...]:
    """Of an engine whose dp ranks have these streams, each on the first of two tp ranks."""
    table, layout = EngineTable(), Layout(dp=len(streams), tp=2)
    for dp, stream in enumerate(streams):
        table.add(rank(dp, stream, layout), 2 * dp + 1, 10.0)
        table.add(rank(dp, NONE, layout, tp=1), 2 * dp + 2, 10.0)
    (engine,) = table.list_engines(None, "", 2, rows=False)
    return engine.dp_lacking_events


def test_whoever_lacks_what_others_have_is_named() -> None:
    assert lacking(LIVE, NONE, LIVE, NONE) == (1, 3)
    assert lacking(WATCH, NONE) == (1,)
    assert lacking(NONE, LIVE) == (0,)


def test_a_stream_that_is_not_live_is_lacking_where_others_are() -> None:
    assert lacking(LIVE, WATCH) == (1,)
    assert lacking(LIVE, WATCH, NONE) == (1, 2)


def test_where_all_are_alike_nobody_lacks_anything() -> None:
    assert lacking(NONE, NONE) == lacking(WATCH, WATCH) == lacking(LIVE, LIVE) == ()


def test_only_the_first_are_named() -> None:
    assert lacking(*[LIVE, *[NONE] * 100]) == tuple(range(1, MAX_DP_LACKING_EVENTS + 1))


def test_an_engine_that_is_not_ready_lacks_nothing_yet_and_one_that_changed_is_judged_anew() -> None:
    table, layout = EngineTable(), Layout(dp=2)
    table.add(rank(0, LIVE, layout), 1, 10.0)
    found = table.find("P", None)
    assert found is not None and found.dp_lacking_events == ()
    bare = table.add(rank(1, NONE, layout), 2, 10.0)
    found = table.find("P", None)
    assert found is not None and found.dp_lacking_events == (1,)
    table.remove(bare)
    table.add(rank(1, LIVE, layout, epoch=2), 3, 10.0)
    found = table.find("P", None)
    assert found is not None and (found.ready, found.dp_lacking_events) == (True, ())


def change(lacking: tuple[int, ...], *, ready: bool = True, ranks: int = 2) -> list[EngineChange]:
    layout = Layout(dp=2)
    return [EngineChange(ResolvedEngine("P", row().role, layout, ready, (), ranks, dp_lacking_events=lacking))]


def gauge() -> float:
    return metrics.REGISTRY.get_sample_value("kvgrpc_registry_streams_missing") or 0.0


def test_it_is_said_once_until_it_is_something_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    streams = MissingStreams()
    streams.heed(change((1,)))
    streams.heed(change((), ready=False, ranks=1))
    streams.heed(change((1,)))
    (said,) = caplog.messages
    assert said.startswith("P is READY, but its dp 1 publishes no events") and gauge() == 1
    streams.heed(change(()))
    assert caplog.messages[1:] == ["P: every dp rank has its stream of events now"] and gauge() == 0


def test_an_engine_that_is_gone_lacks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    streams = MissingStreams()
    streams.heed(change((0, 1)))
    assert gauge() == 2
    streams.heed(change((), ready=False, ranks=0))
    assert gauge() == 0
    streams.heed(change((0, 1)))
    assert len(caplog.messages) == 2


def test_a_rank_that_changes_its_mind_all_the_time_gets_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Each registration that took its stream away, or brought it, was a line."""
    caplog.set_level(logging.INFO)
    streams = MissingStreams()
    for _ in range(100):
        streams.heed(change((1,)))
        streams.heed(change(()))
    assert len(caplog.messages) == 10
