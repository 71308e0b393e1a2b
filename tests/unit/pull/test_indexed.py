"""What an index says of holders puts them in order."""

from __future__ import annotations

from kvgrpc.pull.model import Holder
from kvgrpc.pull.taking.indexed import IndexAnswer


class Costly(Holder):
    """Comparing each with each is seconds of the rank's loop in a large fleet."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("holders are compared with each other")

    __hash__ = Holder.__hash__


def test_holders_are_looked_through_once() -> None:
    few, many, none, mute = (
        Costly(name, "h:1", "h:2", tells=name != "mute") for name in ("few", "many", "none", "mute")
    )
    answer = IndexAnswer({("few", 0): 2, ("many", 0): 5, ("none", 0): 0})
    found = answer.best_first([few, none, many, mute], lambda holder: False)
    assert [each.engine for each in found] == ["many", "few", "mute"]
