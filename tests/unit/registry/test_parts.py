"""The small parts: the clock that stands still with its process, page tokens, and pools that become one object."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import AddressNotAllowed, InvalidRequest, KvGrpcError, PeerUnreachable, WarmingUp
from kvgrpc.model import Layout, RankId, RankRef, Role
from kvgrpc.paging import numbers_token, page_token, read_numbers_token, read_page_token
from kvgrpc.registry import engine as engine_module
from kvgrpc.registry import feed, wire
from kvgrpc.registry.calls import domain_errors, pause_before
from kvgrpc.registry.clock import MAX_STEP_SECONDS, RunningClock
from kvgrpc.registry.engine import LeasedRow, RegisteredEngine, SharedShape, holders
from kvgrpc.registry.feed import Feed
from kvgrpc.registry.model import Endpoints, EngineFilter, RankRow, RankSelector, ResolvedEngine
from kvgrpc.registry.table import EngineTable
from kvgrpc.rpc.status import trailing
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.wire import pool_to_pb
from tests.support.registry_builders import HandClock, pool, registry, row


def test_the_running_clock_counts_what_it_ticks() -> None:
    real = HandClock()
    clock = RunningClock(real)
    for _ in range(8):
        real.now += 0.25
        clock.tick()
    real.now += 0.125
    assert clock() == pytest.approx(2.125)


def test_a_rank_serves_events_or_selects_dp_only_where_it_says_so_and_a_filter_takes_pools() -> None:
    plain = RankRow(row().ref, Role.PREFILL, Endpoints(), Layout())
    assert not plain.serves_events and not plain.engine_selects_dp
    assert EngineFilter().pools


def test_the_running_clock_does_not_count_a_stop_of_its_process() -> None:
    real = HandClock()
    clock = RunningClock(real)
    real.now += 3_600
    assert clock() == MAX_STEP_SECONDS
    clock.tick()
    real.now += 0.5
    assert clock() == pytest.approx(MAX_STEP_SECONDS + 0.5)


@given(st.text(min_size=1), st.text())
def test_a_page_token_reads_as_what_it_was_made_of(after: str, question: str) -> None:
    if after.isascii():
        assert read_page_token(question, page_token(question, after)) == after


@pytest.mark.parametrize("token", ["x", "AAAA", "!!!!", "é", page_token("list", "a")[:-4], page_token("other", "a")])
def test_a_token_that_is_not_ours_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_page_token("list", token)
    assert refused.value.metadata["field"] == "page_token"


@given(st.binary())
def test_no_token_breaks_the_reader(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_page_token("list", base64.urlsafe_b64encode(raw + b"x").decode())


def test_coordinates_survive_a_token_and_forged_ones_do_not() -> None:
    assert read_numbers_token("q", numbers_token("q", (1, 2, 3, 4)), 4) == (1, 2, 3, 4)
    assert read_numbers_token("q", "", 4) is None
    for forged in ("1,2,x,4", "1,2,3", "1,2,3,4,5"):
        with pytest.raises(InvalidRequest):
            read_numbers_token("q", page_token("q", forged), 4)


def test_equal_pools_become_one_object_without_addresses() -> None:
    pools = wire.PoolCache()
    first = pools.decode(pool_to_pb(pool()), "pools[0]")
    assert pools.decode(pool_to_pb(pool()), "pools[0]") is first
    assert pools.encode(first) is pools.encode(first)
    message = pool_to_pb(pool("other"))
    message.regions[0].address = 4_096
    assert pools.decode(message, "pools[0]") == pool("other")


def test_a_pool_of_thousands_of_regions_is_read_in_pieces() -> None:
    pools, large = wire.PoolCache(), pool(layers=4_000)
    assert len(list(pools.read(pool_to_pb(large), "pools[0]"))) >= 8
    made = pools.decode(pool_to_pb(large), "pools[0]")
    assert made == large.without_addresses()
    assert len(list(pools.read(pool_to_pb(large), "pools[0]"))) == 1, "it is there"
    assert pools.decode(pool_to_pb(large), "pools[0]") is made
    message = pool_to_pb(large)
    message.regions[3_999].layer = 0
    with pytest.raises(InvalidRequest) as refused:
        list(pools.read(message, "rows[7].pools[0]"))
    assert refused.value.metadata["field"] == "rows[7].pools[0].regions[3999]"


def test_the_pool_cache_is_bounded() -> None:
    pools = wire.PoolCache(size=2)
    kept = [pools.decode(pool_to_pb(pool(pages=pages)), "pools[0]") for pages in (1, 2, 3)]
    assert pools.decode(pool_to_pb(pool(pages=2)), "pools[0]") is kept[1]
    assert pools.decode(pool_to_pb(pool(pages=1)), "pools[0]") is not kept[0]
    assert pools.decode(pool_to_pb(pool(pages=2)), "pools[0]") is kept[1]
    for made in kept:
        assert common_pb2.PagePool.FromString(pools.encode(made)).pages == made.pages


def test_the_pool_cache_holds_so_many_regions_and_the_last_pool_in_any_case() -> None:
    pools = wire.PoolCache(regions=5)
    small, large = pool(layers=2), pool(layers=6)
    kept = pools.decode(pool_to_pb(small), "pools[0]")
    assert pools.decode(pool_to_pb(small), "pools[0]") is kept
    alone = pools.decode(pool_to_pb(large), "pools[0]")
    assert pools.decode(pool_to_pb(large), "pools[0]") is alone
    assert pools.decode(pool_to_pb(small), "pools[0]") is not kept
    assert pools.decode(pool_to_pb(large), "pools[0]") is not alone


def test_rows_engines_and_selectors_survive_the_wire() -> None:
    pools = wire.PoolCache()
    full = RankRow(
        ref=row(dp=1, tp=2, epoch=7).ref,
        role=Role.DECODE,
        endpoints=Endpoints("[fe80::1]:5", "tcp://10.0.0.1:6"),
        layout=Layout(2, 1, 1, 4),
        pools=(pool(), pool("swa")),
        data_plane="mooncake",
    )
    assert wire.row_from_pb(wire.row_to_pb(full, pools), wire.PoolCache()) == full
    engine = ResolvedEngine("P", Role.DECODE, Layout(2, 1, 1, 4), False, (full,), 1)
    message = wire.engine_to_pb(engine, [wire.row_to_pb(full, pools)])
    assert message.expected_ranks == 8
    assert wire.engine_from_pb(message, pools) == engine
    selectors = [RankSelector(), RankSelector(dp=0, tp=3), RankSelector(1, 2, 3, 4)]
    assert wire.selectors_from_pb([wire.selector_to_pb(selector) for selector in selectors]) == selectors


def decode(message: pb.RankRow) -> None:
    list(wire.rows_to_register(pb.RegisterRequest(rows=[message]), wire.PoolCache(), peer_is_local=True))


def message_of(at: RankRow) -> pb.RankRow:
    return wire.row_to_pb(at, wire.PoolCache())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.rank.rank.ClearField("engine"), "rows[0].rank.rank.engine"),
        (lambda m: m.rank.ClearField("epoch"), "rows[0].rank.epoch"),
        (lambda m: setattr(m.rank, "epoch", 2**53), "rows[0].rank.epoch"),
        (lambda m: setattr(m.rank.rank, "tp", 2), "rows[0].rank.rank.tp"),
        (lambda m: setattr(m.layout, "pp", 0), "rows[0].layout.pp"),
        (lambda m: setattr(m.layout, "pp", 65_537), "rows[0].layout"),
        (lambda m: m.ClearField("role"), "rows[0].role"),
        (lambda m: setattr(m, "role", 9), "rows[0].role"),
        (lambda m: m.endpoints.ClearField("grpc"), "rows[0].endpoints.grpc"),
        (lambda m: setattr(m.endpoints, "grpc", "nonsense"), "rows[0].endpoints.grpc"),
        (lambda m: setattr(m.endpoints, "events_pub", "nonsense"), "rows[0].endpoints.events_pub"),
        (lambda m: m.pools.append(m.pools[0]), "rows[0].pools[1].name"),
        (lambda m: setattr(m.pools[0], "pages", 0), "rows[0].pools[0].pages"),
        (lambda m: setattr(m.pools[0], "kind", 0), "rows[0].pools[0].kind"),
        (lambda m: m.pools[0].ClearField("regions"), "rows[0].pools[0].regions"),
        (lambda m: setattr(m, "data_plane", "x" * 300_000), "rows[0]"),
    ],
)
def test_each_wrong_field_of_a_row_is_named(change: object, field: str) -> None:
    message = message_of(row(pools=(pool(),)))
    change(message)  # type: ignore[operator]  # a lambda of the table above
    with pytest.raises(InvalidRequest) as refused:
        decode(message)
    assert refused.value.metadata["field"] == field
    assert refused.value.metadata["rule"] and refused.value.metadata["value"] != "None"


def test_a_decode_rank_may_serve_nothing() -> None:
    message = message_of(row(role=Role.DECODE))
    message.ClearField("endpoints")
    decode(message)


def test_a_wildcard_address_is_refused() -> None:
    message = message_of(row())
    message.endpoints.grpc = "0.0.0.0:80"
    with pytest.raises(AddressNotAllowed):
        decode(message)


@pytest.mark.parametrize("count", [0, 1_025])
def test_a_request_has_1_to_1024_rows(count: int) -> None:
    with pytest.raises(InvalidRequest):
        list(
            wire.rows_to_register(
                pb.RegisterRequest(rows=[message_of(row())] * count), wire.PoolCache(), peer_is_local=True
            )
        )


def test_a_pool_of_an_engine_may_change_when_its_last_holder_has_gone() -> None:
    first, second = row(dp=0, pools=(pool(),), layout=Layout(dp=2)), row(dp=1, pools=(pool(),), layout=Layout(dp=2))
    other = row(dp=1, pools=(pool(page_tokens=32),), layout=Layout(dp=2))
    shape = SharedShape(Role.PREFILL, Layout(dp=2), first.model)
    shape.add(first)
    shape.add(second)
    shape.remove(second)
    assert shape.differences(other), "the first rank still has the pool as it was"
    assert not shape.differences(other, holders([first]))
    shape.remove(first)
    assert not shape.differences(other)
    assert not shape.covers(first)


def test_a_shape_covers_rows_of_its_engine_that_bring_no_new_pool() -> None:
    known = row(pools=(pool(),))
    shape = SharedShape(known.role, known.layout, known.model)
    shape.add(known)
    assert shape.covers(known) and shape.covers(row())
    assert not shape.covers(row(pools=(pool("swa"),)))
    assert not shape.covers(row(pools=(pool(page_tokens=32),)))
    assert not shape.covers(row(role=Role.DECODE))


def test_the_newest_epoch_of_an_engine_is_that_of_the_rows_it_has() -> None:
    engine = RegisteredEngine(row(dp=0, epoch=5, layout=Layout(dp=3)))
    leased = [
        LeasedRow(row(dp=dp, epoch=epoch, layout=Layout(dp=3)), dp, 0.0, engine) for dp, epoch in [(0, 5), (1, 9)]
    ]
    assert engine.newest_epoch(frozenset()) == 0
    engine.add(leased[0])
    assert engine.newest_epoch(frozenset()) == 5
    engine.add(leased[1])
    assert engine.newest_epoch(frozenset()) == 9
    assert engine.newest_epoch({leased[1].row.ref.rank}) == 5
    assert engine.newest_epoch({each.row.ref.rank for each in leased}) == 0
    engine.remove(leased[1])
    assert engine.newest_epoch(frozenset()) == 5


def test_pauses_double_up_to_the_longest_and_are_never_shorter_than_asked_for() -> None:
    for attempt, most in enumerate([1.0, 2.0, 4.0, 5.0, 5.0]):
        pauses = [pause_before(attempt, 1.0, 5.0, None) for _ in range(300)]
        assert 0.0 < min(pauses) < 0.5 * most < 0.9 * most < max(pauses) <= most
    unasked = PeerUnreachable("no", metadata={"address": "a:1"})
    assert pause_before(0, 1.0, 5.0, unasked) <= 1.0
    asked = WarmingUp("not yet", retry_after=7.0)
    pauses = [pause_before(0, 1.0, 5.0, asked) for _ in range(300)]
    assert 7.0 <= min(pauses) < 7.02 < 7.08 < max(pauses) <= 7.1, (
        "ranks that were told the same do not all come at once"
    )
    for_ever = WarmingUp("not yet", retry_after=1e9)
    assert pause_before(0, 1.0, 5.0, for_ever) <= 600.1, "one wrong answer would keep a rank away for years"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerUnreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, PeerUnreachable),
        (grpc.StatusCode.CANCELLED, PeerUnreachable),
        (grpc.StatusCode.INTERNAL, KvGrpcError),
    ],
)
def test_a_registry_that_does_not_answer_is_told_from_one_that_failed(
    code: grpc.StatusCode, kind: type[KvGrpcError]
) -> None:
    with pytest.raises(KvGrpcError) as raised, domain_errors("a:1"):
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why")
    assert type(raised.value) is kind
    assert kind is not PeerUnreachable or raised.value.metadata == {"address": "a:1"}


@pytest.mark.parametrize(("details", "told"), [("connection refused", "connection refused"), ("", "UNAVAILABLE")])
def test_why_a_registry_did_not_answer_is_told(details: str, told: str) -> None:
    with pytest.raises(PeerUnreachable, match=told), domain_errors("a:1"):
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def test_a_registry_that_says_why_is_believed_whatever_the_code() -> None:
    code, text, details = trailing(WarmingUp("not yet", retry_after=7.0))
    with pytest.raises(WarmingUp) as raised, domain_errors("a:1"):
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*details), text)
    assert raised.value.retry_after == 7.0


async def test_a_reader_of_one_engine_costs_what_that_has_whatever_else_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each new one would hold the loop for 70 ms where 4,096 engines are there, and a consumer may open many."""
    known = registry(HandClock())
    looked: list[str] = []
    for name in ("A", "B", "C"):
        known.register([row(name)])
    rows = RegisteredEngine.rows

    def counted(engine: RegisteredEngine) -> tuple[RankRow, ...]:
        looked.append(engine.name)
        return rows(engine)

    monkeypatch.setattr(RegisteredEngine, "rows", counted)
    for only, names in (
        (EngineFilter("B"), ["B"]),
        (EngineFilter("B", Role.DECODE), []),
        (EngineFilter("none"), []),
        (EngineFilter(), ["A", "B", "C"]),
    ):
        looked.clear()
        messages, _ = await Feed(only, lambda: known.table, wire.PoolCache()).behind(-1)
        read = [pb.WatchEnginesResponse.FromString(message) for message in messages]
        assert [change.engine.name for message in read for change in message.changes] == names
        assert looked == names


_SIZES = st.integers(1, 3)


@given(st.builds(Layout, _SIZES, _SIZES, _SIZES, _SIZES), st.data())
def test_rows_are_in_order_and_the_missing_ranks_named_after_any_changes(layout: Layout, data: st.DataObject) -> None:
    table, leases = EngineTable(), itertools.count(1)
    every = list(RankSelector().ranks("P", layout))
    there: dict[RankId, LeasedRow] = {}
    for rank in data.draw(st.lists(st.sampled_from(every), max_size=2 * len(every))):
        if rank in there:
            table.remove(there.pop(rank))
        else:
            there[rank] = table.add(replace(row(layout=layout), ref=RankRef(rank, 1)), next(leases), 1e9)
    engine, most = table.engine("P"), data.draw(st.integers(0, len(every)))
    assert (engine is None) == (not there)
    if engine is not None:
        assert [each.ref.rank for each in engine.rows()] == [rank for rank in every if rank in there]
        assert engine.missing_ranks(most) == [rank for rank in every if rank not in there][:most]


def test_a_page_of_a_large_engine_costs_the_page_though_a_row_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its rows were put in order anew, and all ranks of its layout gone through: 90 ms of 32,768 of them."""
    known, layout = registry(HandClock(), max_rows=10_000), Layout(dp=8_000)
    for first in range(0, 4_000, 1_000):
        known.register([row(dp=dp, layout=layout) for dp in range(first, first + 1_000)])
    looked_at = 0

    def counted(real: Callable[[RankRow], Any]) -> Callable[[RankRow], Any]:
        def count(each: RankRow) -> Any:
            nonlocal looked_at
            looked_at += 1
            return real(each)

        return count

    for name in ("_coordinates_of_row", "_number"):
        monkeypatch.setattr(engine_module, name, counted(getattr(engine_module, name)))
    known.register([row(dp=2_000, epoch=2, layout=layout)])
    found = known.table.get("P", (1_999, 0, 0, 0), 10)
    assert found is not None and [each.ref.epoch for each in found.rows] == [2] + 9 * [1]
    assert [rank.dp for rank in found.missing_ranks] == list(range(4_000, 4_064))
    assert looked_at < 200


async def test_a_reader_gets_the_full_state_though_more_changes_meanwhile_than_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second change is larger than all that is kept, so it is let go before the reader comes to it."""
    monkeypatch.setattr(feed, "MAX_LOG_BYTES", 2_000)
    monkeypatch.setattr(feed, "MAX_MESSAGE_BYTES", 800)
    known = EngineTable()
    leases = itertools.count(1)

    def register(*rows: RankRow) -> None:
        for each in rows:
            known.add(each, next(leases), 1e9)
        told.publish(known.take_changes())

    told = Feed(EngineFilter(), lambda: known, wire.PoolCache())
    register(row("A"))
    state_of = told._state_of

    async def meanwhile(engines: Sequence[ResolvedEngine]) -> list[bytes]:
        state = await state_of(engines)
        if known.engine("large") is None:
            register(row("small"))
            register(*(row("large", dp=dp, layout=Layout(dp=40)) for dp in range(40)))
        return state

    monkeypatch.setattr(told, "_state_of", meanwhile)
    mirror = EngineMirror()
    messages, _ = await told.behind(-1)
    for message in messages:
        mirror.apply(pb.WatchEnginesResponse.FromString(message))
    assert mirror.complete
    assert {name: len(engine.rows) for name, engine in mirror.engines.items()} == {"A": 1, "small": 1, "large": 40}


async def test_a_reader_that_reads_nothing_costs_no_more_rows_than_the_log_may_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only what is encoded counts: ranks that come and go were all kept for it."""
    monkeypatch.setattr(feed, "MAX_LOG_BYTES", 100 * feed._ROW_BYTES)
    known = registry(HandClock())
    told, mirror = Feed(EngineFilter(), lambda: known.table, wire.PoolCache()), EngineMirror()
    _, position = await told.behind(-1)
    for epoch in range(1, 31):
        known.register([row(dp=dp, epoch=epoch, layout=Layout(dp=20)) for dp in range(20)])
        told.publish(known.table.take_changes())
    assert sum(len(each._change.engine.rows) for each in told._log) <= 100
    messages, _ = await told.behind(position)
    for message in messages:
        mirror.apply(pb.WatchEnginesResponse.FromString(message))
    assert [each.rank.epoch for each in mirror.engines["P"].rows] == 20 * [30]
