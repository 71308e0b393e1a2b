"""What the tables of a registry point out."""

from __future__ import annotations

from kvgrpc.cli.registry import streams_that_lack
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb


def row(engine: str, dp: int, events: str, tp: int = 0) -> pb.RankRow:
    rank = common_pb2.RankId(engine=engine, dp=dp, tp=tp)
    return pb.RankRow(rank=common_pb2.RankRef(rank=rank), endpoints=pb.Endpoints(events_pub=events))


def test_a_dp_rank_whose_stream_is_missing_is_pointed_out() -> None:
    rows = [row("a", 0, "tcp://h:1"), row("a", 1, ""), row("a", 0, "", tp=1), row("b", 0, ""), row("b", 1, "")]
    (line,) = streams_that_lack(rows)
    assert line.startswith("a: dp 1 ")
    assert list(streams_that_lack(rows[:1] + rows[2:])) == []
