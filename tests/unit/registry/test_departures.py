"""What a registry remembers of ranks that left."""

from __future__ import annotations

import random

import pytest

from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.registry.departures import Departures
from kvgrpc.registry.model import BEFORE_ALL, Absence
from kvgrpc.registry.store.memory import MemoryRegistry
from tests.support.registry_builders import TTL, HandClock, ranks, registry, row

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


def gone(engine: str, *tps: int) -> list[RankRef]:
    return [RankRef(RankId(engine, tp=tp), 1) for tp in tps]


def remembered(departures: Departures, refs: list[RankRef]) -> list[int]:
    return [each.ref.rank.tp for each in departures.among(ref.rank for ref in refs)]


def test_an_engine_whose_ranks_come_and_go_pushes_out_its_own_alone() -> None:
    departures = Departures(most=8)
    departures.came("honest")
    departures.came("greedy")
    honest, greedy = gone("honest", 0, 1), gone("greedy", *range(100))
    for when, ref in enumerate(honest + greedy):
        departures.note(ref, Absence.DEREGISTERED, when)
    assert remembered(departures, honest) == [0, 1]
    assert remembered(departures, greedy) == list(range(94, 100))


def test_engines_that_left_as_a_whole_push_out_no_engine_that_is_there() -> None:
    departures = Departures(most=4)
    departures.came("honest")
    honest = gone("honest", 3)
    departures.note(honest[0], Absence.LEASE_RAN_OUT, 0.0)
    for number in range(100):
        name = f"greedy-{number}"
        departures.came(name)
        departures.left(name)
        departures.note(gone(name, 0)[0], Absence.DEREGISTERED, float(number))
    assert remembered(departures, honest) == [3]
    assert [remembered(departures, gone(f"greedy-{number}", 0)) for number in (96, 97, 98, 99)] == [[], [0], [0], [0]]


def test_however_they_come_and_go_no_more_than_the_most_are_kept_and_all_of_them_are_found() -> None:
    seeded = random.Random(26)
    departures, here = Departures(most=50), set[str]()
    refs = [ref for engine in "abcdef" for ref in gone(engine, *range(20))]
    for when in range(5_000):
        ref = seeded.choice(refs)
        engine, what = ref.rank.engine, seeded.randrange(8)
        if what == 0 and engine not in here:
            departures.came(engine)
            here.add(engine)
        elif what == 1 and engine in here:
            departures.left(engine)
            here.discard(engine)
        elif what == 2:
            departures.forget(ref.rank)
        elif what > 2:
            departures.note(ref, Absence.DEREGISTERED, float(when))
        kept = departures.among(each.rank for each in refs)
        assert len(kept) == departures.count <= 50
