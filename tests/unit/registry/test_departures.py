"""What a registry remembers of ranks that left."""

from __future__ import annotations

import pytest

from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.registry.departures import Departures
from kvgrpc.registry.model import BEFORE_ALL, Absence
from kvgrpc.registry.store.memory import MemoryRegistry
from tests.unit.registry.builders import TTL, HandClock, ranks, registry, row

TP2 = Layout(tp=2)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def known(clock: HandClock) -> MemoryRegistry:
    made = registry(clock)
    made._wall_clock = lambda: clock.now + 1e9
    return made


def absent(known: MemoryRegistry) -> list[tuple[int, int, Absence, float]]:
    found = known.table.get("P", BEFORE_ALL, 10)
    assert found is not None
    return [(each.ref.rank.tp, each.ref.epoch, each.absence, each.since) for each in found.absent_ranks]


def test_a_rank_that_left_in_order_is_told_from_one_whose_lease_ran_out(
    known: MemoryRegistry, clock: HandClock
) -> None:
    layout = Layout(tp=3)
    leases = known.register(ranks(layout))
    assert absent(known) == []
    known.deregister([leases[2].ref])
    left_at = clock.now + 1e9
    assert absent(known) == [(2, 1, Absence.DEREGISTERED, left_at)]
    clock.now += TTL - 1
    known.keep_alive([leases[0].lease_id])
    clock.now += 2
    assert absent(known) == [(1, 1, Absence.LEASE_RAN_OUT, clock.now + 1e9), (2, 1, Absence.DEREGISTERED, left_at)]


def test_one_that_is_back_or_made_way_for_its_successor_is_not_absent(known: MemoryRegistry) -> None:
    known.register(ranks(TP2))
    known.register([row(tp=1, epoch=2, layout=TP2)])
    assert absent(known) == []
    known.deregister([RankRef(RankId("P", tp=1), 2)])
    assert [each[:3] for each in absent(known)] == [(1, 2, Absence.DEREGISTERED)]
    known.register([row(tp=1, epoch=2, layout=TP2)])
    assert absent(known) == []


def test_of_a_rank_that_never_came_nothing_is_said(known: MemoryRegistry) -> None:
    known.register([row(layout=TP2)])
    found = known.table.get("P", BEFORE_ALL, 10)
    assert found is not None and found.missing_ranks == (RankId("P", tp=1),) and found.absent_ranks == ()


def test_the_last_ones_are_remembered_and_no_more() -> None:
    departures = Departures(most=2)
    ids = [RankId("P", tp=tp) for tp in range(3)]
    for when, rank in enumerate(ids):
        departures.note(RankRef(rank, 1), Absence.DEREGISTERED, when)
    assert [each.ref.rank for each in departures.among(ids)] == ids[1:]
    departures.note(RankRef(ids[1], 2), Absence.FENCED, 9.0)
    departures.note(RankRef(ids[0], 1), Absence.LEASE_RAN_OUT, 10.0)
    assert [(each.ref.rank, each.ref.epoch) for each in departures.among(ids)] == [(ids[0], 1), (ids[1], 2)]
