"""What the tables of a registry point out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvgrpc.cli.fleet.registry import change_lines, missing_streams, with_rows
from kvgrpc.client import Engines
from kvgrpc.errors import EngineNotFound
from kvgrpc.v1 import registry_service_pb2 as pb


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
