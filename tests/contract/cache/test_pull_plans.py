"""One call does what a plan says, and whatever becomes of it is no failure of the request."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvgrpc.client import SyncPulls
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.pull.lending.lender import Lender
from kvgrpc.v1 import index_service_pb2, prefetch_service_pb2
from tests.support.cache_serving import hashes_of, prompt
from tests.support.pull_fleet import PullFleet, candidates_of, peer_of
from tests.support.waiting import wait_until

PAGES = prefetch_service_pb2.PromptPages(tokens=prompt(6))
NOWHERE = "127.0.0.1:1"
ENDED = (prefetch_service_pb2.OPERATION_STATE_EXPIRED, prefetch_service_pb2.OPERATION_STATE_DECLINED)


def placed(engine: str, source: str = "holder") -> index_service_pb2.Placement:
    return index_service_pb2.Placement(engine=engine, pull=index_service_pb2.PlannedPull(engine=source))


def test_pages_of_a_plan_are_pulled_by_one_call(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    holder.fill(hashes_of(prompt(6)))
    with SyncPulls(fleet.registry) as pulls:
        came = pulls.pull(placed("taker"), PAGES, 30.0)
        again = pulls.pull(placed("taker"), PAGES, 30.0)
    assert (came.pages, came.failure) == (6, None)
    assert came.operation is not None and came.operation.completed_pages == 6
    assert (again.pages, again.failure) == (6, None), "they lie there already"
    taker.assert_bytes(hashes_of(prompt(6)))


def test_the_source_of_the_plan_is_asked_and_no_other(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    holder.fill(hashes_of(prompt(6)))
    with SyncPulls(fleet.registry) as pulls:
        came = pulls.pull(placed("taker", "somebody"), PAGES, 30.0)
    assert (came.pages, came.failure) == (0, None)
    assert not peer_of(taker).book.rows()


def test_where_a_plan_names_no_pull_nobody_is_asked() -> None:
    with SyncPulls(NOWHERE) as pulls:
        came = pulls.pull(index_service_pb2.Placement(engine="taker"), PAGES)
        assert (came.pages, came.operation, came.failure) == (0, None, None)
        with pytest.raises(InvalidRequest):
            pulls.pull(placed("taker"), PAGES, -1.0)


def test_what_goes_wrong_is_said_and_not_raised(fleet: PullFleet) -> None:
    fleet.open("alone", pull=None)
    began = time.monotonic()
    with SyncPulls(NOWHERE) as pulls:
        silent = pulls.pull(placed("taker"), PAGES, 0.5)
    with SyncPulls(fleet.registry) as pulls:
        unknown = pulls.pull(placed("nobody"), PAGES, 1.0)
        refused = pulls.pull(placed("alone"), PAGES, 30.0)
    assert unknown.failure is not None, "what the registry says depends on its age"
    said = [each.failure.reason if each.failure else None for each in (silent, refused)]
    assert said == [Reason.PEER_UNREACHABLE, Reason.FEATURE_DISABLED]
    assert time.monotonic() - began < 15.0


def test_a_pull_that_uses_its_time_up_tells_its_end(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, _ = fleet.pair()
    holder.fill(hashes_of(prompt(6)))
    over, lend = threading.Event(), Lender.lend

    def slow(*arguments: Any, **more: Any) -> Any:
        over.wait(30.0)
        return lend(*arguments, **more)

    monkeypatch.setattr(Lender, "lend", slow)
    with SyncPulls(fleet.registry) as pulls:
        came = pulls.pull(placed("taker"), PAGES, 2.0)
        over.set()
    assert came.failure is None and came.operation is not None
    assert came.operation.state in ENDED


def test_an_engine_that_came_back_elsewhere_is_found_again(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    holder.fill(hashes_of(prompt(6)))
    with SyncPulls(fleet.registry) as pulls:
        assert pulls.pull(placed("taker"), PAGES, 30.0).pages == 6
        fleet.ranks.remove(taker)
        taker.close()
        successor = fleet.open("taker")
        wait_until(lambda: bool(candidates_of(successor)))
        pulls.pull(placed("taker"), PAGES, 2.0)
        assert pulls.pull(placed("taker"), PAGES, 30.0).pages == 6
    successor.assert_bytes(hashes_of(prompt(6)))
