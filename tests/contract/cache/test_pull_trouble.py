"""Pulls whose bytes are spoilt, drip, find no room or wait for hand-offs, and an index that says nothing: each costs a
bounded time, and never a wrong byte."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Reason
from kvgrpc.model import Role
from kvgrpc.prefetch.model import OperationState
from kvgrpc.pull.lending.servicer import GIVES_WAY_SECONDS
from kvgrpc.pull.model import PullConfig, PullDirection, PullRow
from kvgrpc.pull.taking import silent
from kvgrpc.pull.wire import identity_to_pb
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.cache_serving import CacheRank, hashes_of, prompt
from tests.support.faults.dataplane import Fault, FaultyDataPlane, Submission
from tests.support.pull_fleet import (
    PATIENT,
    PULL,
    PullFleet,
    all_is_back,
    candidates_of,
    peer_of,
    planes_of_caches,
    pulled,
)
from tests.support.waiting import wait_until

Faults = Callable[[int, Submission], "Fault | None"]
FULL = "the data plane is full"


def holder_over(faults: Faults, fleet: PullFleet, **settings: Any) -> tuple[CacheRank, FaultyDataPlane]:
    """A holder, and the data plane of what it lends, with faults."""
    with planes_of_caches(lambda plane: FaultyDataPlane(plane, faults)) as planes:
        return fleet.open("holder", **settings), planes[0]


def taken_by(taker: CacheRank) -> list[PullRow]:
    return [row for row in peer_of(taker).book.rows() if row.direction is PullDirection.TAKEN]


def test_bytes_that_are_not_those_that_the_holder_says_are_not_taken(fleet: PullFleet) -> None:
    holder, plane = holder_over(lambda number, write: Fault(corrupt=True), fleet, verify=True)
    taker = fleet.open("taker", verify=True)
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(6))
    holder.fill(hashes)
    row = pulled(taker, hashes)
    assert (row.state, row.completed) == (OperationState.FAILED, 0)
    first, *behind = reversed([each.failure and each.failure.reason for each in taken_by(taker)])
    assert first is Reason.CHECKSUM_MISMATCH and None not in behind
    wait_until(lambda: all_is_back(holder, taker))
    plane.fault = lambda number, write: None
    wait_until(lambda: pulled(taker, hashes).completed == 6)
    taker.assert_bytes(hashes)


def test_a_holder_that_drips_is_given_up_when_the_time_of_the_batch_is_over(fleet: PullFleet) -> None:
    """A page at a time, it never falls silent for long enough; what came counts."""
    seconds, one_page = 4.5, replace(PULL, staging_pages=4)
    holder, _ = holder_over(lambda number, write: Fault(delay=1.0), fleet, pull=one_page)
    limits = replace(PATIENT, storage_timeout=seconds, batch_pages=20)
    taker = fleet.open("taker", pull=replace(PULL, stall_timeout=3.0), limits=limits)
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(20))
    holder.fill(hashes)
    began = time.monotonic()
    row = pulled(taker, hashes)
    assert row.state is OperationState.PARTIAL and 2 <= row.completed < 20
    assert time.monotonic() - began < seconds + 3.0
    assert "the time of the pull is over" in {each.failure.message for each in taken_by(taker) if each.failure}
    taker.assert_bytes(hashes[: row.completed])
    wait_until(lambda: all_is_back(holder, taker))


@pytest.mark.parametrize(
    "full",
    [Fault(Outcome.REJECTED, detail=FULL), Fault(Outcome.REJECTED, hang=True, detail=FULL)],
    ids=["refuses", "waits"],
)
def test_a_data_plane_that_is_full_in_the_middle_costs_the_rest_of_a_pull(fleet: PullFleet, full: Fault) -> None:
    holder, plane = holder_over(lambda number, write: None, fleet)
    taker = fleet.open("taker", pull=replace(PULL, stall_timeout=2.0))
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    plane.fault = lambda number, write: full if any(each.ended for each in taken_by(taker)) else None
    began = time.monotonic()
    row = pulled(taker, hashes)
    assert row.state is OperationState.PARTIAL, [each.failure for each in taken_by(taker)]
    assert 0 < row.completed < 12, "what had been written when it was full; a batch is written ahead, or not yet"
    assert time.monotonic() - began < 2.0 + 5.0
    taker.assert_bytes(hashes[: row.completed])
    wait_until(lambda: all_is_back(holder, taker))
    plane.fault = lambda number, write: None
    wait_until(lambda: pulled(taker, hashes).completed == 12)
    taker.assert_bytes(hashes)


def took_to_lend(holder: CacheRank, hashes: list[str], taker: CacheRank) -> float:
    """Seconds that the holder took, which is connected, to lend all of these pages."""
    request = pb.LendPagesRequest(
        identity=identity_to_pb(holder.manager.keys.identity),
        page_hashes=[bytes.fromhex(each) for each in hashes],
        room=78,
        taker=rank_ref_to_pb(taker.rank.ref),
    )
    with grpc.insecure_channel(holder.address) as channel:
        stub = PullServiceStub(channel)
        stub.ListPulls(pb.ListPullsRequest(), timeout=10.0)
        began = time.monotonic()
        assert stub.LendPages(request, timeout=10.0).lent_pages == len(hashes)
        return time.monotonic() - began


def test_what_is_lent_waits_for_a_hand_off_that_is_slow_and_comes_all_the_same(fleet: PullFleet) -> None:
    """Between the same two ranks, the hand-off to the device and the pull to the host."""
    planes: list[FaultyDataPlane] = []

    def slow(plane: Any) -> FaultyDataPlane:
        planes.append(FaultyDataPlane(plane, lambda number, write: Fault(hang=True)))
        return planes[-1]

    holder, taker = fleet.open("holder", around=slow), fleet.open("taker", role=Role.DECODE)
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    sender = KVSender(holder.rank.transfer, "", 77)
    receiver = KVReceiver(taker.rank.transfer, f"{fleet.registry}/holder", 77)
    receiver.init([1, 2])
    sender.init(2)
    sender.send([0, 1], is_last=True)
    wait_until(lambda: bool(planes[0].submissions))
    assert took_to_lend(holder, hashes[:3], taker) >= GIVES_WAY_SECONDS
    assert pulled(taker, hashes).completed == 12
    taker.assert_bytes(hashes)
    assert receiver.poll() is not KVPoll.Success
    planes[0].release()
    assert receiver.wait(20.0) is sender.wait(20.0) is KVPoll.Success
    receiver.close()
    sender.close()


def test_an_index_that_accepts_and_says_nothing_is_waited_for_once(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent, "FIRST_SECONDS", silent.LONGEST_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        index = f"127.0.0.1:{listener.getsockname()[1]}"
        holder = fleet.open("holder")
        taker = fleet.open("taker", pull=PullConfig(staging_pages=16, index=index, answer_timeout=2.0))
        wait_until(lambda: bool(candidates_of(taker)))
        holder.fill(hashes_of(prompt(6)))
        holder.fill(hashes_of(prompt(6, first=2)))
        seconds = list[float]()
        for first in (0, 2):
            hashes = hashes_of(prompt(6, first))
            began = time.monotonic()
            assert pulled(taker, hashes).completed == 6
            seconds.append(time.monotonic() - began)
            taker.assert_bytes(hashes)
    assert 2.0 <= seconds[0] < 2.0 + 5.0 and seconds[1] < 2.0
