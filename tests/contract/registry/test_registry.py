"""RegistryService over a real server: every RPC, and every error that the proto names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvgrpc.errors import (
    AddressNotAllowed,
    EngineNotFound,
    InvalidRequest,
    KvGrpcError,
    RegistrationShapeConflict,
    ServerDraining,
    StaleEpoch,
    TooManyRequests,
    WarmingUp,
)
from kvgrpc.model import Attention, Layout, ModelIdentity, Role
from kvgrpc.registry import wire
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from kvgrpc.v1.common_pb2 import Role as WireRole
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.registry_builders import pool, ranks, row
from tests.support.registry_serving import POOLS, TP2, Served, dial, failure, request_of
from tests.support.waiting import until

IMPOSSIBLE = ["a b", "é", "a/b", "x" * 129]


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = (await Served().start()).grown_up()
    yield made
    await made.stop()


class TestRegister:
    async def test_returns_leases_their_ttl_and_which_registry_gave_them(self, served: Served) -> None:
        rows = ranks(TP2)
        first, second = await served.register(*rows), await served.register(*rows)
        assert [lease.rank for lease in first.leases] == [rank_ref_to_pb(at.ref) for at in rows]
        assert (first.ttl.ToSeconds(), first.leases[0].lease_id > 0) == (10, True)
        assert second == first

    async def test_a_page_above_the_bound_is_one_of_the_bound(self, served: Served) -> None:
        await served.register(row())
        engine = await served.stub.GetEngine(pb.GetEngineRequest(engine="P", page_size=2**32 - 1))
        engines = await served.stub.ListEngines(pb.ListEnginesRequest(page_size=1_001))
        assert (len(engine.engine.rows), len(engines.engines)) == (1, 1)

    async def test_rows_come_back_as_they_were_given(self, served: Served) -> None:
        model = ModelIdentity("llama", "main", "fp8_e4m3", Attention.MLA)
        given = row(pools=(pool(), pool("swa")), model=model)
        await served.register(given)
        response = await served.stub.GetEngine(pb.GetEngineRequest(engine="P"))
        engine = wire.engine_from_pb(response.engine, POOLS)
        assert (engine.rows, engine.model) == ((given,), model)

    async def test_addresses_of_memory_stay_with_their_rank(self, served: Served) -> None:
        request = request_of(row(pools=(pool(),)))
        request.rows[0].pools[0].regions[0].address = 0x7F00_0000_0000
        await served.stub.Register(request)
        response = await served.stub.GetEngine(pb.GetEngineRequest(engine="P"))
        assert [region.address for region in response.engine.rows[0].pools[0].regions] == [0, 0]

    async def test_invalid_request_names_the_field(self, served: Served) -> None:
        error = await failure(served.stub.Register(request_of(row(), row(tp=3, layout=TP2))))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "rows[1].rank.rank.tp"
        assert isinstance(await failure(served.stub.Register(pb.RegisterRequest())), InvalidRequest)

    async def test_wildcard_address_is_not_allowed(self, served: Served) -> None:
        request = request_of(row())
        request.rows[0].endpoints.grpc = "0.0.0.0:5"
        error = await failure(served.stub.Register(request))
        assert isinstance(error, AddressNotAllowed)
        assert error.metadata == {"address": "0.0.0.0:5", "configKey": "advertise"}

    async def test_loopback_address_of_another_host_is_not_allowed(self) -> None:
        far = await Served(peer="ipv4:10.0.0.9:4711").start()
        error = await failure(far.stub.Register(request_of(row())))
        assert isinstance(error, AddressNotAllowed)
        assert "Set advertise" in error.message
        await far.stop()

    async def test_stale_epoch_names_the_current_one(self, served: Served) -> None:
        await served.register(row(epoch=9))
        error = await failure(served.stub.Register(request_of(row(epoch=8))))
        assert isinstance(error, StaleEpoch)
        assert (error.code, error.metadata["currentEpoch"]) == ("FAILED_PRECONDITION", "9")

    async def test_other_shape_of_older_incarnations_is_unavailable_for_their_ttl(self, served: Served) -> None:
        await served.register(row(epoch=8, layout=TP2))
        error = await failure(served.stub.Register(request_of(row(tp=1, epoch=9, layout=Layout(tp=4)))))
        assert isinstance(error, RegistrationShapeConflict)
        assert error.code == "UNAVAILABLE"
        assert error.retry_after is not None
        assert 9 < error.retry_after <= 10

    async def test_other_shape_of_newer_incarnations_exists_already(self, served: Served) -> None:
        await served.register(row(epoch=9, layout=TP2))
        error = await failure(served.stub.Register(request_of(row(tp=1, epoch=8, layout=Layout(tp=4)))))
        assert isinstance(error, RegistrationShapeConflict)
        assert (error.code, error.retry_after) == ("ALREADY_EXISTS", None)
        assert error.metadata["layout.tp"] == "registered 2, offered 4"

    async def test_too_many_rows(self, served: Served) -> None:
        served.registry._acceptance = replace(served.registry._acceptance, max_rows=1)
        error = await failure(served.stub.Register(request_of(*ranks(TP2))))
        assert isinstance(error, TooManyRequests)
        assert error.retry_after == 10

    async def test_draining(self, served: Served) -> None:
        served.servicer.drain()
        assert isinstance(await failure(served.stub.Register(request_of(row()))), ServerDraining)


class TestKeepAlive:
    async def test_one_answer_a_message_in_order_naming_unknown_leases(self, served: Served) -> None:
        lease = (await served.register(row())).leases[0].lease_id
        call: Any = served.stub.KeepAlive()
        for wrong in range(1, 51):
            await call.write(pb.KeepAliveRequest(lease_ids=[wrong, lease]))
        for wrong in range(1, 51):
            response = await call.read()
            assert list(response.unknown_lease_ids) == [wrong]
            assert response.ttl.ToSeconds() == 10
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK

    async def test_it_keeps_a_row_alive_and_its_end_lets_it_expire(self) -> None:
        brief = await Served(ttl=0.6).start()
        lease = (await brief.register(row())).leases[0].lease_id
        call: Any = brief.stub.KeepAlive()
        for _ in range(6):
            await call.write(pb.KeepAliveRequest(lease_ids=[lease]))
            assert not (await call.read()).unknown_lease_ids
            await asyncio.sleep(0.2)  # renewed at this interval for two TTLs
        call.cancel()
        await until(lambda: brief.registry.rows == 0)
        await brief.stop()

    async def test_too_many_leases_end_the_stream_and_no_other(self, served: Served) -> None:
        good: Any = served.stub.KeepAlive()
        bad = served.stub.KeepAlive()
        await bad.write(pb.KeepAliveRequest(lease_ids=range(65_537)))
        assert isinstance(await failure(bad.read()), InvalidRequest)
        await good.write(pb.KeepAliveRequest(lease_ids=[5]))
        assert list((await good.read()).unknown_lease_ids) == [5]
        good.cancel()

    async def test_a_drain_ends_idle_streams_at_once(self, served: Served) -> None:
        call: Any = served.stub.KeepAlive()
        await call.write(pb.KeepAliveRequest())
        await call.read()
        served.servicer.drain()
        started = time.monotonic()
        assert isinstance(await failure(call.read()), ServerDraining)
        await served.server.stop(15)
        assert time.monotonic() - started < 8  # a stream that was left open would use up the grace


class TestDeregister:
    async def test_removes_the_very_incarnations_and_counts_them(self, served: Served) -> None:
        await served.register(*ranks(TP2, epoch=5))
        wrong, right = row(epoch=4).ref, row(tp=1, epoch=5).ref
        request = pb.DeregisterRequest(ranks=[rank_ref_to_pb(wrong), rank_ref_to_pb(right)])
        assert (await served.stub.Deregister(request)).removed == 1
        assert (await served.stub.Deregister(request)).removed == 0

    async def test_too_many_are_invalid(self, served: Served) -> None:
        request = pb.DeregisterRequest(ranks=[rank_ref_to_pb(row().ref)] * 1_025)
        assert isinstance(await failure(served.stub.Deregister(request)), InvalidRequest)


class TestGetEngine:
    async def test_pages_through_the_rows(self, served: Served) -> None:
        rows = ranks(Layout(dp=3, tp=2))
        await served.register(*rows)
        token = ""
        seen: list[Any] = []
        while True:
            page = await served.stub.GetEngine(pb.GetEngineRequest(engine="P", page_size=4, page_token=token))
            engine = wire.engine_from_pb(page.engine, POOLS)
            assert (engine.ready, engine.registered_ranks, page.engine.expected_ranks) == (True, 6, 6)
            seen += engine.rows
            token = page.next_page_token
            if not token:
                break
        assert seen == rows

    async def test_a_page_ends_at_one_mebibyte(self, served: Served) -> None:
        fat = [row(tp=tp, layout=Layout(tp=12), data_plane="x" * 100_000) for tp in range(12)]
        for at in fat:
            await served.register(at)
        page = await served.stub.GetEngine(pb.GetEngineRequest(engine="P"))
        assert len(page.engine.rows) == 10
        rest = await served.stub.GetEngine(pb.GetEngineRequest(engine="P", page_token=page.next_page_token))
        assert (len(rest.engine.rows), rest.next_page_token) == (2, "")

    async def test_unknown_engine(self, served: Served) -> None:
        error = await failure(served.stub.GetEngine(pb.GetEngineRequest(engine="Q")))
        assert isinstance(error, EngineNotFound)
        assert error.metadata == {"engine": "Q", "role": "", "missingRanks": "all"}

    async def test_unknown_engine_after_a_restart(self) -> None:
        fresh = await Served().start()
        error = await failure(fresh.stub.GetEngine(pb.GetEngineRequest(engine="Q")))
        assert isinstance(error, WarmingUp)
        assert (error.code, error.metadata) == ("UNAVAILABLE", {"engine": "Q"})
        assert error.retry_after is not None
        assert error.retry_after <= 1
        await fresh.stop()

    async def test_a_bad_token_is_invalid(self, served: Served) -> None:
        await served.register(row())
        error = await failure(served.stub.GetEngine(pb.GetEngineRequest(engine="P", page_token="x")))
        assert error.metadata["field"] == "page_token"

    @pytest.mark.parametrize("name", IMPOSSIBLE)
    async def test_a_name_that_no_engine_can_have_is_invalid(self, served: Served, name: str) -> None:
        error = await failure(served.stub.GetEngine(pb.GetEngineRequest(engine=name)))
        assert isinstance(error, InvalidRequest) and error.metadata["field"] == "engine"

    @pytest.mark.parametrize("name", IMPOSSIBLE)
    async def test_nobody_watches_for_a_name_that_no_engine_can_have(self, served: Served, name: str) -> None:
        error = await failure(served.stub.WatchEngines(pb.WatchEnginesRequest(engine=name)).read())
        assert isinstance(error, InvalidRequest) and error.metadata["field"] == "engine"


class TestListEngines:
    async def test_pages_by_name_and_filters_by_role(self, served: Served) -> None:
        for name in ("e", "a", "d", "b", "c"):
            await served.register(row(name, role=Role.DECODE if name == "c" else Role.PREFILL))
        first = await served.stub.ListEngines(pb.ListEnginesRequest(page_size=2, role=ROLE_PREFILL))
        await served.stub.Deregister(pb.DeregisterRequest(ranks=[rank_ref_to_pb(row("b").ref)]))
        rest = await served.stub.ListEngines(
            pb.ListEnginesRequest(page_size=2, role=ROLE_PREFILL, page_token=first.next_page_token)
        )
        assert [engine.name for engine in first.engines] == ["a", "b"]
        assert [engine.name for engine in rest.engines] == ["d", "e"]
        assert (rest.next_page_token, rest.warming_up) == ("", False)
        assert not first.engines[0].rows
        decodes = await served.stub.ListEngines(pb.ListEnginesRequest(role=ROLE_DECODE, include_rows=True))
        assert [len(engine.rows) for engine in decodes.engines] == [1]

    async def test_with_rows_a_page_ends_at_one_mebibyte_and_a_huge_engine_comes_without(self, served: Served) -> None:
        for name in ("a", "b", "c"):
            await served.register(row(name, data_plane="x" * 200_000))
        for tp in range(6):
            await served.register(row("d", tp=tp, layout=Layout(tp=6), data_plane="x" * 200_000))
        token = ""
        seen: list[Any] = []
        for _ in range(9):
            page = await served.stub.ListEngines(pb.ListEnginesRequest(include_rows=True, page_token=token))
            assert page.ByteSize() < 1 << 20
            seen += [(engine.name, len(engine.rows), engine.registered_ranks) for engine in page.engines]
            token = page.next_page_token
            if not token:
                break
        assert seen == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("d", 0, 6)]

    async def test_says_that_it_is_warming_up(self) -> None:
        fresh = await Served().start()
        assert (await fresh.stub.ListEngines(pb.ListEnginesRequest())).warming_up
        await fresh.stop()

    async def test_a_token_of_another_filter_is_invalid(self, served: Served) -> None:
        for name in ("a", "b"):
            await served.register(row(name))
        page = await served.stub.ListEngines(pb.ListEnginesRequest(page_size=1))
        request = pb.ListEnginesRequest(page_token=page.next_page_token, role=ROLE_PREFILL)
        assert isinstance(await failure(served.stub.ListEngines(request)), InvalidRequest)
        assert isinstance(
            await failure(served.stub.ListEngines(pb.ListEnginesRequest(role=WireRole.ValueType(9)))), InvalidRequest
        )


class TestResolveRanks:
    async def test_returns_the_selected_rows_at_once_without_wait_ready(self, served: Served) -> None:
        await served.register(row(dp=1, layout=Layout(dp=2)))
        request = pb.ResolveRanksRequest(
            engine="P", role=ROLE_PREFILL, selectors=[pb.RankSelector(dp=1), pb.RankSelector(dp=0)]
        )
        engine = (await served.stub.ResolveRanks(request)).engine
        assert (engine.ready, engine.registered_ranks, engine.expected_ranks) == (False, 1, 2)
        assert [at.rank.rank.dp for at in engine.rows] == [1]

    async def test_leaves_the_pools_out_for_who_only_wants_to_dial(self, served: Served) -> None:
        await served.register(row(pools=(pool(),)))
        whole = pb.ResolveRanksRequest(engine="P", selectors=[pb.RankSelector()])
        bare = pb.ResolveRanksRequest(engine="P", selectors=[pb.RankSelector()], without_pools=True)
        (with_pools,) = (await served.stub.ResolveRanks(whole)).engine.rows
        (without,) = (await served.stub.ResolveRanks(bare)).engine.rows
        assert with_pools.pools and not without.pools
        with_pools.ClearField("pools")
        assert with_pools == without

    async def test_wait_ready_is_woken_by_the_last_rank_within_tens_of_milliseconds(self, served: Served) -> None:
        first, second = ranks(TP2)
        request = pb.ResolveRanksRequest(role=ROLE_PREFILL, selectors=[pb.RankSelector()], wait_ready=True)
        took = []
        for _ in range(10):  # the best of ten: what the machine does besides is not ours
            await served.register(first)
            waiting = served.stub.ResolveRanks(request, timeout=30)
            await until(lambda: served.waiting == 1)
            started = time.monotonic()
            await served.register(second)
            response = await waiting
            took.append(time.monotonic() - started)
            assert len(response.engine.rows) == 2
            if took[-1] < 0.1:
                break
            served.registry.deregister([first.ref, second.ref])
        assert min(took) < 0.1

    async def test_a_thousand_calls_wait_and_are_all_woken(self) -> None:
        """Of one host, over four connections: one alone has 512 of the calls at most."""
        served = (await Served(max_waiters=8_192).start()).grown_up()
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        channels = [dial(served.address) for _ in range(4)]
        stubs = [RegistryServiceStub(channel) for channel in channels]
        waiting = [asyncio.ensure_future(stubs[n % 4].ResolveRanks(request, timeout=30)) for n in range(1_000)]
        await until(lambda: served.waiting == 1_000)
        started = time.monotonic()
        await served.register(row())
        responses = await asyncio.gather(*waiting)
        assert time.monotonic() - started < 15  # a call that is not woken waits for its deadline, 30 s
        assert all(response.engine.ready for response in responses)
        assert served.waiting == 0
        for channel in channels:
            await channel.close()
        await served.stop()

    async def answer_in_time(self, served: Served, request: pb.ResolveRanksRequest) -> KvGrpcError:
        """It comes 250 ms before the deadline, too late on a busy machine: then it is asked for again."""
        for _ in range(8):
            error = await failure(served.stub.ResolveRanks(request, timeout=1.0))
            if error.code != "DEADLINE_EXCEEDED":
                break
        return error

    async def test_shortly_before_the_deadline_the_missing_ranks_are_named(self, served: Served) -> None:
        await served.register(row(tp=1, layout=TP2))
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        error = await self.answer_in_time(served, request)
        assert isinstance(error, EngineNotFound)
        assert error.metadata == {"engine": "P", "role": "PREFILL", "missingRanks": "dp0/pp0/cp0/tp0"}

    async def test_while_warming_up_the_wait_ends_with_that(self) -> None:
        fresh = await Served().start()
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        assert isinstance(await self.answer_in_time(fresh, request), WarmingUp)
        await fresh.stop()

    async def test_a_caller_that_goes_away_waits_no_longer(self, served: Served) -> None:
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = served.stub.ResolveRanks(request, timeout=30)
        await until(lambda: served.waiting == 1)
        waiting.cancel()
        await until(lambda: served.waiting == 0)

    async def test_too_many_waiting_calls(self) -> None:
        small = (await Served(max_waiters=1).start()).grown_up()
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = small.stub.ResolveRanks(request, timeout=30)
        await until(lambda: small.waiting == 1)
        error = await failure(small.stub.ResolveRanks(request, timeout=30))
        assert isinstance(error, TooManyRequests)
        assert error.retry_after == 1.0
        waiting.cancel()
        await small.stop()

    async def test_more_rows_than_a_message_holds(self, served: Served) -> None:
        for tp in range(20):
            await served.register(row(tp=tp, layout=Layout(tp=20), data_plane="x" * 200_000))
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, selectors=[pb.RankSelector()])
        error = await failure(served.stub.ResolveRanks(request))
        assert isinstance(error, TooManyRequests)
        assert error.retry_after is None
        request.selectors[0].tp = 3
        assert len((await served.stub.ResolveRanks(request)).engine.rows) == 1

    async def test_invalid_questions(self, served: Served) -> None:
        for name in ("a", "b"):
            await served.register(row(name))
        for wrong in (
            pb.ResolveRanksRequest(),
            pb.ResolveRanksRequest(engine="a", role=WireRole.ValueType(9)),
            pb.ResolveRanksRequest(role=ROLE_PREFILL, wait_ready=True),
            pb.ResolveRanksRequest(engine="a", selectors=[pb.RankSelector()] * 257),
            *(pb.ResolveRanksRequest(engine=name, wait_ready=True) for name in IMPOSSIBLE),
        ):
            assert isinstance(await failure(served.stub.ResolveRanks(wrong, timeout=5)), InvalidRequest)

    async def test_a_drain_ends_waiting_calls(self, served: Served) -> None:
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = served.stub.ResolveRanks(request, timeout=30)
        await until(lambda: served.waiting == 1)
        served.servicer.drain()
        assert isinstance(await failure(waiting), ServerDraining)
