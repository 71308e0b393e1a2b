"""What the tables of a registry point out."""

from __future__ import annotations

from kvgrpc.cli.registry import change_lines, missing_streams
from kvgrpc.v1 import registry_service_pb2 as pb


def test_dp_ranks_whose_streams_are_missing_are_pointed_out() -> None:
    engine = pb.Engine(name="a", registered_ranks=4, dp_lacking_events=[1, 3])
    (line,) = missing_streams(engine)
    assert line.startswith("a: dp 1, 3 ")
    assert line in change_lines(pb.EngineChange(engine=engine))
    assert list(missing_streams(pb.Engine(name="a"))) == []
