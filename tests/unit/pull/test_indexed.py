"""An index: what it says of holders puts them in order, and when it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from kvgrpc.errors import FeatureDisabled, InvalidRequest, PeerUnreachable
from kvgrpc.pull.model import Holder
from kvgrpc.pull.taking import indexed
from kvgrpc.pull.taking.indexed import IndexAnswer, IndexedHolders
from kvgrpc.pull.taking.silent import OWN_DELAY_SECONDS
from kvgrpc.v1 import index_service_pb2


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


class Index:
    """Stands for the stub of an index: answers as the test says."""

    def __init__(self, channel: object) -> None: ...

    answers: ClassVar[list[Callable[[float], object]]]

    async def Score(self, request: object, timeout: float) -> object:
        return self.answers.pop(0)(timeout)


def ask(monkeypatch: pytest.MonkeyPatch, first: Callable[[float], object], seconds: float, timeout: float) -> bool:
    """True if the index is asked for the next prompt too, after it answered the first one in this way."""
    monkeypatch.setattr(indexed, "IndexServiceStub", Index)
    Index.answers = [first, lambda timeout: index_service_pb2.ScoreResponse()]
    index = IndexedHolders("h:1", "m", cast(Any, SimpleNamespace(get=lambda address: None)), seconds)
    assert asyncio.run(index.ask([[1]], timeout)) is None
    return asyncio.run(index.ask([[2]], 10.0)) is not None


def is_late(timeout: float) -> object:
    time.sleep(timeout)  # as an index that answers nothing
    raise asyncio.TimeoutError


def stands_still(timeout: float) -> object:
    time.sleep(timeout + OWN_DELAY_SECONDS + 0.1)  # this process does, and not the index
    raise asyncio.TimeoutError


def refuses(timeout: float) -> object:
    raise InvalidRequest.of("prompts", "65,537 pages", "at most 65,536")


def is_away(timeout: float) -> object:
    raise PeerUnreachable("connection refused", metadata={"address": "h:1"})


def is_none(timeout: float) -> object:
    raise FeatureDisabled("there is no index", metadata={"feature": "index", "howToEnable": "serve one"})


def test_an_index_that_had_its_time_and_did_not_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ask(monkeypatch, is_late, 0.1, 10.0)
    assert not ask(monkeypatch, is_late, 1.0, 0.5), "whose callers have little time for each prompt"
    assert not ask(monkeypatch, is_away, 10.0, 0.1), "it did not use its time"
    assert not ask(monkeypatch, is_none, 0.1, 10.0)


def test_an_index_that_had_no_time_or_refused_one_prompt_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, is_late, 1.0, 0.001)
    assert ask(monkeypatch, refuses, 0.1, 10.0)


def test_an_index_is_not_silent_because_the_taker_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, stands_still, 0.1, 10.0)
