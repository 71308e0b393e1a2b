"""What the tables of a registry point out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvgrpc.cli.events.command import live_endpoint
from kvgrpc.cli.fleet.callers import caller_row
from kvgrpc.cli.fleet.registry import change_lines, missing_streams, not_ready, pool_summary, with_rows
from kvgrpc.client import Engines
from kvgrpc.errors import EngineNotFound
from kvgrpc.v1 import common_pb2, server_service_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.event_service_pb2 import EventStream


def test_dp_ranks_whose_streams_are_missing_are_pointed_out() -> None:
    engine = pb.Engine(name="a", registered_ranks=4, dp_lacking_events=[1, 3])
    (line,) = missing_streams(engine)
    assert line.startswith("a: dp 1, 3 ")
    assert line in change_lines(pb.EngineChange(engine=engine))
    assert list(missing_streams(pb.Engine(name="a"))) == []


def test_an_engine_that_left_since_it_was_listed_hides_no_other() -> None:
    def get_engine(name: str) -> pb.Engine:
        if name == "gone":
            raise EngineNotFound("it left")
        return pb.Engine(name=name)

    names = ("a", "gone", "b")
    listed = Engines(pb.Engine(name=name) for name in names)
    client: Any = SimpleNamespace(list_engines=lambda: listed, get_engine=get_engine)
    assert [engine.name for engine in with_rows(client, None)] == ["a", "b"]


def test_one_line_says_which_ranks_an_engine_lacks_and_why() -> None:
    ranks = [common_pb2.RankId(engine="P", tp=tp) for tp in range(1, 5)]
    engine = pb.Engine(name="P", registered_ranks=1, expected_ranks=7, missing_ranks=ranks)
    for tp, absence in ((1, pb.ABSENCE_DEREGISTERED), (2, pb.ABSENCE_LEASE_RAN_OUT), (3, pb.ABSENCE_FENCED)):
        absent = engine.absent_ranks.add(rank=common_pb2.RankRef(rank=ranks[tp - 1], epoch=7), absence=absence)
        absent.time.FromSeconds(1_790_000_000 + tp)
    assert not_ready(engine) == (
        "P is not READY: P/dp0/pp0/cp0/tp1 left (drained, closed or deregistered) at 2026-09-21 14:13:21 UTC, "
        "P/dp0/pp0/cp0/tp2 is gone (nobody renewed its lease) at 2026-09-21 14:13:22 UTC, "
        "P/dp0/pp0/cp0/tp3 is fenced (it runs, and a newer incarnation was there: restart it) at "
        "2026-09-21 14:13:23 UTC, P/dp0/pp0/cp0/tp4 did not register and 2 more"
    )


def test_a_rank_says_which_tokens_of_a_prompt_it_keeps_where_they_are_dealt_out() -> None:
    pool = common_pb2.PagePool(name="kv", pages=8, axes="token,head,dim", head_start=2, head_count=2)
    pool.regions.add(page_bytes=1 << 20)
    assert pool_summary(pool) == "kv 8 x 1.0 MiB"
    pool.axes, pool.head_start, pool.head_count = "tokens over 4", 3, 1
    assert pool_summary(pool) == "kv (token 3 of each 4) 8 x 1.0 MiB"


def test_an_endpoint_that_nobody_listens_at_is_said() -> None:
    assert live_endpoint(EventStream(pub_endpoint="tcp://*:5557")) == "tcp://*:5557"
    proxy = EventStream(connects_to="tcp://10.0.0.2:5557", listened_at=True)
    assert live_endpoint(proxy) == "to tcp://10.0.0.2:5557"
    proxy.listened_at = False
    assert live_endpoint(proxy) == "to tcp://10.0.0.2:5557, where nobody listens"
    proxy.ClearField("listened_at")
    assert live_endpoint(proxy) == "to tcp://10.0.0.2:5557"


def test_a_caller_says_what_it_reads_and_how_far_behind() -> None:
    caller = server_service_pb2.Caller(name="consumer r", role=2, address="10.0.0.9", open_streams=5)  # type: ignore[arg-type]
    caller.readers.add(engine="P", dp=1, behind=3)
    for _ in range(4):
        caller.readers.add()
    reads = "P dp 1: 3 behind, engines, engines and 2 more"
    assert caller_row(caller) == ("consumer r", "consumer", "10.0.0.9", 0, 5, None, reads)
