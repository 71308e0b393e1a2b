"""Any order of registrations, renewals, removals and waiting, against a model that is a plain list of rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import OldShapeStillLeased, RegistrationShapeConflict, StaleEpoch
from kvgrpc.model import Layout, RankId, RankRef, Role
from kvgrpc.registry import wire
from kvgrpc.registry.model import EVERY_RANK, EngineChange, EngineFilter, RankRow, RankSelector
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.mirrored import change_message, known_engines
from tests.support.registry_builders import TTL, HandClock, registry, row

ENGINES = st.sampled_from(["A", "B"])
COORDINATES = st.integers(0, 1)
LAYOUTS = st.sampled_from([Layout(dp=2, tp=2), Layout(tp=2), Layout(dp=2)])
EPOCHS = st.integers(1, 6)
ROLES = st.sampled_from(list(Role))


class TheRegistry(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.registry = registry(self.clock)
        self.rows: dict[RankId, tuple[RankRow, float]] = {}
        self.leases: dict[int, RankRef] = {}
        self.largest: dict[RankId, int] = {}
        followed = (EngineFilter(), EngineFilter(role=Role.PREFILL), EngineFilter(role=Role.DECODE), EngineFilter("A"))
        self.followers = {only: EngineMirror() for only in followed}

    @rule(
        engine=ENGINES,
        ranks=st.sets(st.tuples(COORDINATES, COORDINATES), min_size=1),
        layout=LAYOUTS,
        role=ROLES,
        epoch=EPOCHS,
    )
    def register(self, engine: str, ranks: set[tuple[int, int]], layout: Layout, role: Role, epoch: int) -> None:
        rows = [
            row(engine, dp=dp, tp=tp, epoch=epoch, layout=layout, role=role)
            for dp, tp in sorted(ranks)
            if dp < layout.dp and tp < layout.tp
        ]
        if not rows:
            return
        self.expire()
        refusal = self.refusal(rows)
        if refusal is not None:
            with pytest.raises(refusal):
                self.registry.register(rows)
            return
        registered = self.registry.register(rows)
        for taken, lease in zip(rows, registered, strict=True):
            assert lease.ref == taken.ref
            assert self.leases.setdefault(lease.lease_id, lease.ref) == lease.ref
            self.rows[taken.ref.rank] = (taken, self.clock.now + TTL)
            self.largest[taken.ref.rank] = taken.ref.epoch

    @rule(data=st.data())
    def keep_alive(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        asked = data.draw(st.lists(st.sampled_from(sorted(self.leases)), max_size=4))
        self.expire()
        alive = {taken.ref for taken, _ in self.rows.values()}
        newest = {self.leases[lease_id]: lease_id for lease_id in sorted(self.leases)}
        known = [ref for lease_id in asked if (ref := self.leases[lease_id]) in alive and newest[ref] == lease_id]
        unknown = self.registry.keep_alive(asked)
        assert len(unknown) == len(asked) - len(known)
        for ref in known:
            self.rows[ref.rank] = (self.rows[ref.rank][0], self.clock.now + TTL)

    @rule(engine=ENGINES, dp=COORDINATES, tp=COORDINATES, epoch=EPOCHS)
    def deregister(self, engine: str, dp: int, tp: int, epoch: int) -> None:
        self.expire()
        rank = RankId(engine, dp=dp, tp=tp)
        there = rank in self.rows and self.rows[rank][0].ref.epoch == epoch
        assert self.registry.deregister([RankRef(rank, epoch)]) == there
        if there:
            del self.rows[rank]

    @rule(seconds=st.floats(0.0, TTL * 1.2))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        due = {rank for rank, (_, expires_at) in self.rows.items() if expires_at <= self.clock.now}
        gone = self.registry.expire()
        assert sorted(gone) == sorted(self.rows[rank][0].ref for rank in due)
        for rank in due:
            del self.rows[rank]

    @invariant()
    def the_registry_shows_exactly_the_rows_of_the_model(self) -> None:
        self.expire()
        engines = self.registry.table.list_engines(None, "", 10, rows=True)
        shown = [shown for engine in engines for shown in engine.rows]
        assert len({at.ref.rank for at in shown}) == len(shown) == self.registry.rows
        assert {at.ref.rank: at for at in shown} == {rank: kept for rank, (kept, _) in self.rows.items()}
        assert [engine.name for engine in engines] == sorted({rank.engine for rank in self.rows})

    @invariant()
    def an_engine_is_ready_iff_all_of_its_ranks_are_there_with_one_shape(self) -> None:
        self.expire()
        for engine in self.registry.table.list_engines(None, "", 10, rows=True):
            assert {(at.role, at.layout) for at in engine.rows} == {(engine.role, engine.layout)}
            wanted = set(EVERY_RANK.ranks(engine.name, engine.layout))
            assert engine.ready == (wanted == {at.ref.rank for at in engine.rows})
            assert engine.registered_ranks == len(engine.rows)

    @invariant()
    def selectors_choose_what_a_filter_would(self) -> None:
        self.expire()
        for engine in self.registry.table.list_engines(None, "", 10, rows=True):
            for dp, tp in itertools.product((None, 0, 1), (None, 0, 1)):
                found = self.registry.table.select(engine.name, engine.role, [RankSelector(dp=dp, tp=tp)])
                assert found is not None
                assert tuple(row for row in found[1] if row is not None) == tuple(
                    at for at in engine.rows if dp in (None, at.ref.rank.dp) and tp in (None, at.ref.rank.tp)
                )

    @invariant()
    def whoever_follows_the_changes_knows_what_the_registry_shows(self) -> None:
        changes = self.registry.table.take_changes()
        for only, follower in self.followers.items():
            for change in changes:
                if (told := only.applied_to(change)) is not None:
                    follower.apply(message_of(told))
            shown = self.registry.table.list_engines(only.role, "", 10, rows=True)
            assert known_engines(follower) == {at.name: at for at in shown if only.takes(at.name, at.role)}

    def refusal(self, rows: list[RankRow]) -> type[Exception] | None:
        asked = {taken.ref.rank for taken in rows}
        for taken in rows:
            if taken.ref.epoch < self.largest.get(taken.ref.rank, 0):
                return StaleEpoch
            current = self.rows.get(taken.ref.rank)
            if current is not None and current[0].ref.epoch == taken.ref.epoch and current[0] != taken:
                return RegistrationShapeConflict
        others = [
            kept
            for rank, (kept, _) in self.rows.items()
            if rank.engine == rows[0].ref.rank.engine and rank not in asked
        ]
        if all((other.role, other.layout) == (rows[0].role, rows[0].layout) for other in others):
            return None
        older = all(other.ref.epoch < rows[0].ref.epoch for other in others)
        return OldShapeStillLeased if older else RegistrationShapeConflict


def message_of(change: EngineChange) -> pb.WatchEnginesResponse:
    rows = [wire.row_to_pb(at, None) for at in change.engine.rows]
    return pb.WatchEnginesResponse(changes=[change_message(change.engine, rows, change.gone)])


TheRegistry.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTheRegistry = TheRegistry.TestCase
