"""What the registry promises about rows, epochs, shapes, leases and READY."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvgrpc.errors import (
    EngineNotFound,
    InvalidRequest,
    KvGrpcError,
    OldShapeStillLeased,
    RegistrationShapeConflict,
    StaleEpoch,
    TooManyRequests,
    WarmingUp,
)
from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, RankId, RankRef, Role
from kvgrpc.observability import metrics
from kvgrpc.registry.model import (
    BEFORE_ALL,
    EVERY_RANK,
    EngineChange,
    EngineFilter,
    RankRow,
    RankSelector,
    ResolvedEngine,
)
from kvgrpc.registry.store import memory
from kvgrpc.registry.store.memory import MemoryRegistry, MemoryStore
from tests.support.registry_builders import TTL, HandClock, pool, ranks, registry, row

TP2 = Layout(tp=2)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def known(clock: HandClock) -> MemoryRegistry:
    return registry(clock)


def names(found: MemoryRegistry, role: Role | None = None) -> list[str]:
    return [engine.name for engine in found.table.list_engines(role, "", 100, rows=False)]


class TestRegister:
    def test_gives_one_lease_a_row_in_the_order_of_the_rows(self, known: MemoryRegistry) -> None:
        rows = ranks(TP2)
        leases = known.register(rows)
        assert [lease.ref for lease in leases] == [asked.ref for asked in rows]
        assert len({lease.lease_id for lease in leases}) == 2

    async def test_nobody_guesses_the_lease_of_another_from_its_own(self) -> None:
        """Whoever names a lease renews it: one that runs on keeps the row of a dead rank."""
        store = MemoryStore()
        ids = sorted(lease.lease_id for lease in await store.register(ranks(Layout(tp=64))))
        assert ids[0] > 0 and ids[-1] < 2**63
        assert min(later - earlier for earlier, later in itertools.pairwise(ids)) > 2**20

    def test_a_number_that_a_lease_has_is_given_to_no_other(self, clock: HandClock) -> None:
        drawn = iter([5, 5, 5, 6])
        known = MemoryRegistry(clock=clock, registry_id="r", lease_ids=drawn, ttl=TTL)
        assert [lease.lease_id for lease in known.register(ranks(TP2))] == [5, 6]

    def test_the_same_rows_again_keep_their_leases_and_renew_them(
        self, known: MemoryRegistry, clock: HandClock
    ) -> None:
        first = known.register(ranks(TP2))
        clock.now += TTL - 1
        assert known.register(ranks(TP2)) == first
        clock.now += TTL - 1
        assert known.expire() == ()

    def test_a_newer_epoch_replaces_the_row_and_its_lease(self, known: MemoryRegistry) -> None:
        old = known.register([row(epoch=5)])[0]
        new = known.register([row(epoch=6, port=2)])[0]
        assert known.rows == 1
        assert resolve(known, "P", Role.PREFILL, [EVERY_RANK]).rows == (row(epoch=6, port=2),)
        assert known.keep_alive([old.lease_id, new.lease_id]) == [old.lease_id]

    def test_a_smaller_epoch_is_refused_and_hears_the_current_one(self, known: MemoryRegistry) -> None:
        known.register([row(epoch=6)])
        with pytest.raises(StaleEpoch) as refused:
            known.register([row(epoch=5)])
        assert refused.value.metadata == {"rank": "P/dp0/pp0/cp0/tp0", "requestEpoch": "5", "currentEpoch": "6"}

    @pytest.mark.parametrize("how", ["expired", "deregistered"])
    def test_an_older_incarnation_stays_fenced_when_the_newer_one_is_gone(
        self, known: MemoryRegistry, clock: HandClock, how: str
    ) -> None:
        known.register([row(epoch=6)])
        if how == "expired":
            clock.now += TTL
        else:
            known.deregister([row(epoch=6).ref])
        with pytest.raises(StaleEpoch):
            known.register([row(epoch=5)])
        known.register([row(epoch=6)])

    def test_fences_are_bounded_and_the_oldest_goes_first(self, clock: HandClock) -> None:
        known = registry(clock, max_rows=2)
        for engine in ("A", "B", "C"):
            known.register([row(engine, epoch=6)])
            known.deregister([row(engine, epoch=6).ref])
        known.register([row("A", epoch=5)])
        for engine in ("B", "C"):
            with pytest.raises(StaleEpoch):
                known.register([row(engine, epoch=5)])

    def test_the_row_of_one_incarnation_never_changes(self, known: MemoryRegistry) -> None:
        known.register([row(port=1, data_plane="a")])
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([row(port=2, data_plane="b")])
        assert refused.value.metadata["mismatchedFields"] == "endpoints.grpc,data_plane"
        assert refused.value.metadata["data_plane"] == "registered a, offered b"

    def test_the_pools_of_one_incarnation_never_change(self, known: MemoryRegistry) -> None:
        known.register([row(pools=(pool(), pool("swa")))])
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([row(pools=(pool(page_tokens=32), pool("mamba")))])
        told = refused.value.metadata
        assert told["mismatchedFields"] == "pools,pools[kv].page_tokens"
        assert (told["pools"], told["pools[kv].page_tokens"]) == (
            "registered kv,swa, offered kv,mamba",
            "registered 16, offered 32",
        )
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([row()])
        assert refused.value.metadata["pools"] == "registered kv,swa, offered none"

    def test_a_rank_without_layers_of_a_pool_says_nothing_of_its_bytes(self, known: MemoryRegistry) -> None:
        """Those that have some are compared with each other, whichever comes first."""
        three, without = Layout(tp=3), replace(pool(), regions=(), dtype="")
        known.register([row(tp=0, layout=three, pools=(without, pool("swa")))])
        known.register([row(tp=1, layout=three, pools=(pool(),))])
        for wrong, field in (
            (replace(pool(), dtype="int8"), "dtype"),
            (replace(without, page_tokens=32), "page_tokens"),
        ):
            with pytest.raises(RegistrationShapeConflict) as refused:
                known.register([row(tp=2, layout=three, pools=(wrong,))])
            assert refused.value.metadata["mismatchedFields"] == f"pools[kv].{field}"

    def test_a_rank_with_layers_of_a_pool_may_come_back_with_other_bytes(self, known: MemoryRegistry) -> None:
        """What the one that it replaces had is not remembered for the sake of those that have no layer of the pool."""

        def stage(tp: int, epoch: int, kv: Pool) -> RankRow:
            return row(tp=tp, epoch=epoch, layout=TP2, pools=(kv, pool("swa")))

        without = replace(pool(), regions=(), axes="")
        known.register([stage(0, 1, pool()), stage(1, 1, without)])
        known.register([stage(1, 3, without)])
        known.register([stage(0, 2, replace(pool(), axes="head,token,dim"))])

    def test_a_conflict_tells_at_most_16_fields_of_120_characters(self, known: MemoryRegistry) -> None:
        pools = [pool(f"kv{number}") for number in range(20)]
        known.register([row(tp=0, layout=TP2, pools=tuple(pools), model=ModelIdentity("a" * 130))])
        other = row(
            tp=1, layout=TP2, pools=tuple(replace(at, page_tokens=32) for at in pools), model=ModelIdentity("b")
        )
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([other])
        told = refused.value.metadata
        assert len(told["mismatchedFields"].split(",")) == len(told) - 2 == 16
        assert len(told["model.name"]) == 120

    def test_all_rows_are_taken_or_none(self, known: MemoryRegistry) -> None:
        known.register([row(tp=1, epoch=9, layout=TP2)])
        with pytest.raises(StaleEpoch):
            known.register(ranks(TP2, epoch=5))
        assert known.rows == 1

    def test_a_rank_may_not_be_there_twice_in_a_request(self, known: MemoryRegistry) -> None:
        with pytest.raises(InvalidRequest) as refused:
            known.register([row(epoch=1), row(epoch=2)])
        assert refused.value.violations[0].field == "rows[1].rank"

    def test_rows_and_engines_are_bounded(self, clock: HandClock) -> None:
        known = registry(clock, max_rows=2, max_engines=1)
        known.register([row("A", layout=Layout(tp=3))])
        with pytest.raises(TooManyRequests) as engines:
            known.register([row("B")])
        with pytest.raises(TooManyRequests) as rows:
            known.register([row("A", tp=tp, layout=Layout(tp=3)) for tp in range(3)])
        assert (engines.value.metadata["scope"], rows.value.metadata["scope"]) == ("engines", "rows")
        assert engines.value.retry_after == TTL
        known.register([row("A", tp=tp, epoch=2, layout=Layout(tp=3)) for tp in range(2)])

    def test_who_finds_no_room_is_told_when_the_first_lease_ends(
        self, clock: HandClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beside many leases that ran out together, and are ended turn by turn, that is at once and not a whole TTL."""
        monkeypatch.setattr(memory, "EXPIRED_AT_ONCE", 1)
        known = registry(clock, max_rows=3)
        known.register(ranks(Layout(tp=3)))
        clock.now += 4
        with pytest.raises(TooManyRequests) as refused:
            known.register([row("B")])
        assert refused.value.retry_after == pytest.approx(TTL - 4)
        clock.now += TTL - 4
        with pytest.raises(TooManyRequests) as refused:
            known.register(ranks(Layout(tp=2), engine="B"))
        assert refused.value.retry_after is not None and refused.value.retry_after < 0.1
        known.register(ranks(Layout(tp=2), engine="B"))


class TestShape:
    def test_newer_ranks_wait_while_the_other_shape_is_of_older_incarnations(
        self, known: MemoryRegistry, clock: HandClock
    ) -> None:
        known.register(ranks(TP2, epoch=5))
        clock.now += 4
        with pytest.raises(OldShapeStillLeased) as refused:
            known.register([row(epoch=6, layout=Layout(tp=4))])
        assert refused.value.code == "UNAVAILABLE"
        assert refused.value.retry_after == pytest.approx(TTL - 4)
        assert refused.value.metadata["layout.tp"] == "registered 2, offered 4"
        clock.now += TTL - 4
        known.register([row(epoch=6, layout=Layout(tp=4))])

    def test_an_older_rank_of_another_shape_is_a_conflict_with_both_values(self, known: MemoryRegistry) -> None:
        known.register([row(tp=1, epoch=7, layout=TP2)])
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([row(epoch=6, layout=Layout(tp=4), role=Role.DECODE)])
        assert refused.value.code == "ALREADY_EXISTS"
        assert refused.value.metadata == {
            "rank": "P/dp0/pp0/cp0/tp0",
            "mismatchedFields": "role,layout.tp",
            "role": "registered PREFILL, offered DECODE",
            "layout.tp": "registered 2, offered 4",
        }

    def test_one_newer_rank_among_older_ones_makes_it_a_conflict(self, known: MemoryRegistry) -> None:
        known.register([row(tp=0, epoch=5, layout=TP2), row(tp=1, epoch=8, layout=TP2)])
        with pytest.raises(RegistrationShapeConflict):
            known.register([row(tp=0, epoch=7, layout=Layout(tp=4))])

    def test_it_is_no_conflict_any_more_once_the_newer_rank_is_gone(self, known: MemoryRegistry) -> None:
        known.register([row(tp=0, epoch=5, layout=TP2), row(tp=1, epoch=8, layout=TP2)])
        other = row(tp=3, epoch=7, layout=Layout(tp=4))
        with pytest.raises(RegistrationShapeConflict):
            known.register([other])
        known.deregister([row(tp=1, epoch=8).ref])
        with pytest.raises(OldShapeStillLeased):
            known.register([other])

    def test_ranks_that_the_request_itself_replaces_do_not_count(self, known: MemoryRegistry) -> None:
        known.register([row(tp=0, epoch=8, layout=TP2), row(tp=1, epoch=1, layout=TP2)])
        wider = Layout(tp=3)
        with pytest.raises(OldShapeStillLeased):
            known.register([row(tp=2, epoch=5, layout=wider), row(tp=0, epoch=9, layout=wider)])

    def test_a_request_that_replaces_every_rank_brings_a_new_shape(self, known: MemoryRegistry) -> None:
        known.register(ranks(TP2, epoch=5))
        known.register(ranks(TP2, epoch=6, role=Role.DECODE))
        assert known.table.find("P", Role.PREFILL) is None
        assert names(known, Role.DECODE) == ["P"]

    def test_rows_of_one_request_must_agree(self, known: MemoryRegistry) -> None:
        with pytest.raises(RegistrationShapeConflict, match="rows of one request"):
            known.register([row(layout=TP2), row(tp=1, layout=Layout(tp=3))])

    def test_pools_of_one_name_in_one_request_share_their_page_geometry(self, known: MemoryRegistry) -> None:
        rows = [row(tp=tp, layout=TP2, pools=(pool(page_tokens=16 * (tp + 1)),)) for tp in range(2)]
        with pytest.raises(RegistrationShapeConflict, match="rows of one request") as refused:
            known.register(rows)
        assert refused.value.metadata["pools[kv].page_tokens"] == "registered 16, offered 32"

    def test_a_rank_as_new_as_the_others_does_not_wait_for_them_to_go(self, known: MemoryRegistry) -> None:
        known.register([row(tp=1, epoch=7, layout=TP2)])
        with pytest.raises(RegistrationShapeConflict, match="other ranks of the engine"):
            known.register([row(tp=0, epoch=7, layout=Layout(tp=4))])

    def test_a_rank_that_is_gone_leaves_the_page_geometry_of_its_pools_free(self, known: MemoryRegistry) -> None:
        holder = row(tp=0, layout=TP2, pools=(pool("swa", page_tokens=16),))
        known.register([holder, row(tp=1, layout=TP2)])
        known.deregister([holder.ref])
        known.register([row(tp=0, epoch=2, layout=TP2, pools=(pool("swa", page_tokens=32),))])

    def test_ranks_of_one_engine_run_one_model(self, known: MemoryRegistry) -> None:
        llama = ModelIdentity("llama", "main", "bfloat16", Attention.MHA)
        known.register([row(tp=0, epoch=9, layout=TP2, model=llama)])
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([row(tp=1, epoch=1, layout=TP2, model=replace(llama, revision="v2"))])
        assert refused.value.metadata["model.revision"] == "registered 'main', offered 'v2'"
        known.register([row(tp=1, epoch=1, layout=TP2, model=llama)])
        assert resolve(known, "P", None).model == llama

    def test_pools_of_one_name_share_their_page_geometry(self, known: MemoryRegistry) -> None:
        known.register([row(tp=0, epoch=9, layout=TP2, pools=(pool(page_tokens=16),))])
        with pytest.raises(RegistrationShapeConflict) as refused:
            known.register([row(tp=1, epoch=1, layout=TP2, pools=(pool(page_tokens=32),))])
        assert refused.value.metadata["pools[kv].page_tokens"] == "registered 16, offered 32"

    def test_pools_may_differ_in_what_differs_from_rank_to_rank(self, known: MemoryRegistry) -> None:
        known.register([row(tp=0, layout=TP2, pools=(pool(pages=8, head_start=0),))])
        known.register([row(tp=1, layout=TP2, pools=(pool(pages=9, head_start=4, layers=3), pool("swa")))])
        assert known.table.find("P", None).ready  # type: ignore[union-attr]  # it was just registered

    def test_a_pool_that_only_the_replaced_row_held_may_change(self, known: MemoryRegistry) -> None:
        known.register([row(tp=0, layout=TP2, pools=(pool("swa", page_tokens=16),)), row(tp=1, layout=TP2)])
        known.register([row(tp=0, epoch=2, layout=TP2, pools=(pool("swa", page_tokens=32),))])


class TestLeases:
    def test_a_row_lives_for_one_ttl_and_expires_once(self, known: MemoryRegistry, clock: HandClock) -> None:
        known.register([row(epoch=3)])
        clock.now += TTL - 0.01
        assert known.expire() == ()
        clock.now += 0.01
        assert known.expire() == (RankRef(RankId("P"), 3),)
        assert known.expire() == ()
        assert (known.rows, known.table.engines) == (0, 0)

    def test_keepalive_renews_and_names_what_it_does_not_know(self, known: MemoryRegistry, clock: HandClock) -> None:
        lease = known.register([row()])[0].lease_id
        for _ in range(5):
            clock.now += TTL - 1
            assert known.keep_alive([77, lease, 78]) == [77, 78]
        clock.now += TTL
        assert known.keep_alive([lease]) == [lease]

    def test_an_expired_row_is_not_seen_by_any_question(self, known: MemoryRegistry, clock: HandClock) -> None:
        known.register([row()])
        clock.now += TTL
        assert known.table.find("P", Role.PREFILL) is None
        assert names(known) == []
        assert known.table.get("P", BEFORE_ALL, 10) is None

    def test_deregister_takes_the_very_incarnation_only(self, known: MemoryRegistry) -> None:
        known.register([row(epoch=6)])
        unknown = RankRef(RankId("Q"), 1)
        assert known.deregister([row(epoch=5).ref, row(epoch=7).ref, unknown]) == 0
        assert known.deregister([row(epoch=6).ref, row(epoch=6).ref]) == 1


class TestChanges:
    def test_only_the_last_distinct_rank_makes_an_engine_ready(self, known: MemoryRegistry) -> None:
        first, second = ranks(TP2)
        known.register([first])
        known.register([first])
        assert [(change.engine.ready, change.engine.rows) for change in changes(known)] == [(False, (first,))]
        known.register([second])
        assert [(change.engine.ready, change.engine.rows) for change in changes(known)] == [(True, (second,))]
        known.register([first, second])
        assert changes(known) == []

    def test_a_rank_that_is_gone_ends_it_and_its_return_is_news(self, known: MemoryRegistry) -> None:
        rows = ranks(TP2)
        known.register(rows)
        changes(known)
        known.deregister([rows[0].ref])
        (gone,) = changes(known)
        assert (gone.gone, gone.engine.rows, gone.engine.ready) == ((rows[0].ref,), (), False)
        known.register([rows[0]])
        (back,) = changes(known)
        assert (back.gone, back.engine.rows, back.engine.ready) == ((), (rows[0],), True)

    def test_a_replaced_rank_is_new_and_not_gone(self, known: MemoryRegistry) -> None:
        known.register(ranks(TP2))
        changes(known)
        newer = row(tp=1, epoch=2, layout=TP2)
        known.register([newer])
        (change,) = changes(known)
        assert (change.gone, change.engine.rows, change.engine.ready) == ((), (newer,), True)
        assert change.before == (row(tp=1, epoch=1).ref,)

    def test_an_engine_without_ranks_is_gone(self, known: MemoryRegistry) -> None:
        known.register(ranks(TP2))
        changes(known)
        known.deregister([at.ref for at in ranks(TP2)])
        (change,) = changes(known)
        assert (change.engine.registered_ranks, len(change.gone), change.engine.ready) == (0, 2, False)

    def test_what_came_and_went_before_anybody_asked_is_no_news(self, known: MemoryRegistry) -> None:
        known.register([row("Q")])
        known.deregister([row("Q").ref])
        assert changes(known) == []

    def test_who_follows_a_role_hears_that_an_engine_has_left_it(self, known: MemoryRegistry) -> None:
        known.register(ranks(TP2, epoch=1))
        changes(known)
        known.register(ranks(TP2, epoch=2, role=Role.DECODE))
        (change,) = changes(known)
        left = EngineFilter(role=Role.PREFILL).applied_to(change)
        assert left is not None
        assert change.engine.ready and not left.engine.ready
        assert (left.engine.registered_ranks, set(left.gone)) == (0, {at.ref for at in ranks(TP2, epoch=1)})
        assert EngineFilter(role=Role.DECODE).applied_to(change) == change
        assert EngineFilter("Q").applied_to(change) is None


class TestQuestions:
    def test_resolve_returns_what_any_selector_fits_once_and_in_order(self, known: MemoryRegistry) -> None:
        rows = ranks(Layout(dp=3, tp=2))
        known.register(rows)
        asked = [RankSelector(tp=1), RankSelector(dp=1), RankSelector(dp=9), RankSelector(dp=1, tp=1)]
        found = resolve(known, "P", Role.PREFILL, asked)
        assert [(at.ref.rank.dp, at.ref.rank.tp) for at in found.rows] == [(0, 1), (1, 0), (1, 1), (2, 1)]
        assert resolve(known, "P", Role.PREFILL, [EVERY_RANK, RankSelector(dp=1)]).rows == tuple(rows)
        assert resolve(known, "P", Role.PREFILL, [RankSelector(tp=1), RankSelector(dp=1)]).rows == found.rows
        assert resolve(known, "P", Role.PREFILL).rows == ()

    def test_resolve_finds_the_ranks_that_are_there_of_an_incomplete_engine(self, known: MemoryRegistry) -> None:
        known.register([row(dp=2, tp=1, layout=Layout(dp=3, tp=2))])
        found = resolve(known, "P", Role.PREFILL, [RankSelector(tp=1)])
        assert (found.ready, found.registered_ranks, len(found.rows)) == (False, 1, 1)

    def test_an_empty_name_means_the_one_engine_of_the_role(self, known: MemoryRegistry) -> None:
        known.register([row("P1"), row("D1", role=Role.DECODE)])
        assert resolve(known, "", Role.PREFILL).name == "P1"
        known.register([row("P2")])
        with pytest.raises(InvalidRequest) as refused:
            resolve(known, "", Role.PREFILL)
        assert refused.value.metadata["field"] == "engine"
        with pytest.raises(InvalidRequest):
            resolve(known, "", None)

    def test_an_engine_of_another_role_is_not_found(self, known: MemoryRegistry) -> None:
        known.register([row("D1", role=Role.DECODE)])
        with pytest.raises(EngineNotFound) as refused:
            resolve(known, "D1", Role.PREFILL)
        assert refused.value.metadata == {"engine": "D1", "role": "PREFILL", "missingRanks": "all"}
        assert resolve(known, "D1", None).role == Role.DECODE

    def test_absence_names_some_missing_ranks_and_counts_the_rest(self, known: MemoryRegistry) -> None:
        known.register([row(tp=1, layout=Layout(tp=20))])
        missing = absence(known, "P", Role.PREFILL).metadata["missingRanks"]
        assert missing.startswith("dp0/pp0/cp0/tp0, dp0/pp0/cp0/tp2, ")
        assert missing.endswith("and 11 more")
        assert absence(known, "", Role.PREFILL).metadata["engine"] == "P"

    def test_absence_is_a_sentence_whatever_was_asked(self, known: MemoryRegistry) -> None:
        assert absence(known, "Q", None).message == "engine Q is not registered"
        assert absence(known, "Q", Role.DECODE).message == "decode engine Q is not registered"
        assert absence(known, "", Role.DECODE).message == "no decode engine is registered"
        known.register([row(tp=1, layout=TP2)])
        missing = "1 of 2 ranks are registered, missing: dp0/pp0/cp0/tp0"
        assert absence(known, "P", None).message == f"engine P is not READY: {missing}"
        assert absence(known, "", Role.PREFILL).message == f"prefill engine P is not READY: {missing}"

    def test_one_engine_is_asked_for_by_name(self, known: MemoryRegistry) -> None:
        known.register([row()])
        with pytest.raises(InvalidRequest) as refused:
            known.table.get("", BEFORE_ALL, 10)
        assert refused.value.metadata["field"] == "engine"

    def test_engines_are_listed_by_name_from_any_place(self, known: MemoryRegistry) -> None:
        for name in ("b", "a", "d", "c"):
            known.register([row(name, role=Role.DECODE if name == "c" else Role.PREFILL)])
        assert [engine.name for engine in known.table.list_engines(None, "a", 2, rows=False)] == ["b", "c"]
        assert [engine.name for engine in known.table.list_engines(None, "bb", 9, rows=False)] == ["c", "d"]
        assert names(known, Role.PREFILL) == ["a", "b", "d"]
        assert [len(engine.rows) for engine in known.table.list_engines(None, "", 9, rows=True)] == [1, 1, 1, 1]

    def test_rows_are_paged_by_coordinates(self, known: MemoryRegistry) -> None:
        known.register(ranks(Layout(dp=3, tp=2)))
        page = known.table.get("P", (0, 0, 0, 1), 2)
        assert page is not None
        assert [(at.ref.rank.dp, at.ref.rank.tp) for at in page.rows] == [(1, 0), (1, 1)]


class TestWarmingUp:
    def test_for_one_ttl_an_absent_engine_is_warming_up(self, clock: HandClock) -> None:
        known = registry(clock, warm=False)
        clock.now += TTL - 0.5
        assert isinstance(error_of(known), WarmingUp)
        assert error_of(known).message.startswith("prefill engine P is not READY here, and the registry does not know")
        assert error_of(known).retry_after == pytest.approx(0.5)
        clock.now += 0.5
        assert isinstance(error_of(known), EngineNotFound)
        assert known.warming_up_for == 0

    def test_an_engine_that_is_there_is_found_meanwhile(self, clock: HandClock) -> None:
        known = registry(clock, warm=False)
        known.register([row()])
        assert resolve(known, "P", Role.PREFILL).ready


def error_of(known: MemoryRegistry) -> KvGrpcError:
    with pytest.raises(KvGrpcError) as refused:
        resolve(known, "P", Role.PREFILL)
    return refused.value


def absence(known: MemoryRegistry, engine: str, role: Role | None) -> KvGrpcError:
    return known.table.absence(engine, role, known.warming_up_for)


def resolve(
    known: MemoryRegistry, engine: str, role: Role | None, selectors: Sequence[RankSelector] = ()
) -> ResolvedEngine:
    found = known.table.select(engine, role, selectors)
    if found is None:
        raise absence(known, engine, role)
    view, matching = found
    return replace(view, rows=tuple(row for row in matching if row is not None))


def changes(known: MemoryRegistry) -> list[EngineChange]:
    return known.table.take_changes()


async def test_a_lease_that_ran_out_is_counted_and_said_whoever_noticed_it_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nearly always a reader does, of a registry that is asked more often than it looks by itself."""
    store, now = MemoryStore(ttl=10.0), [0.0]
    monkeypatch.setattr(store.registry, "_clock", lambda: now[0])
    before = metrics.REGISTRY.get_sample_value("kvgrpc_registry_leases_expired_total")
    assert before is not None
    await store.register([row()])
    now[0] = 20.0
    assert store.table.rows == 0
    await store.start(lambda changes: None)
    await asyncio.sleep(0)  # its first look
    assert metrics.REGISTRY.get_sample_value("kvgrpc_registry_leases_expired_total") == before + 1
    assert caplog.messages == [f"the lease of {row().ref} ran out: nobody renewed it for 10 s"]
    await store.close()
