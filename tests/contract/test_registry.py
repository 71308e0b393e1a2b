"""RegistryService over a real server: every RPC, every error that the proto names, and the two clients of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio

from kvgrpc.errors import (
    AddressNotAllowed,
    CredentialsInvalid,
    EngineNotFound,
    InvalidRequest,
    KvGrpcError,
    PeerUnreachable,
    RegistrationShapeConflict,
    ServerDraining,
    StaleEpoch,
    TooManyRequests,
    WarmingUp,
)
from kvgrpc.model import Layout, Role
from kvgrpc.registry import wire
from kvgrpc.registry.client import Registration, Resolver
from kvgrpc.registry.model import RankRow, RankSelector
from kvgrpc.registry.servicer import RegistryServicer
from kvgrpc.rpc.channel import open_channel
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity, Token
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub, add_RegistryServiceServicer_to_server
from kvgrpc.wire import rank_ref_to_pb
from tests.unit.registry.builders import pool, ranks, row

TP2 = Layout(tp=2)
POOLS = wire.PoolCache()


class Served:
    """A registry behind a server, and a stub that talks to it."""

    def __init__(
        self, ttl: float = 10.0, max_waiters: int = 2_048, peer: str = "", security: ServerSecurity | None = None
    ) -> None:
        self.servicer = RegistryServicer(ttl=ttl, max_waiters=max_waiters)
        if peer:
            self.servicer = _from_peer(self.servicer, peer)
        self.port = 0
        self.security = security or ServerSecurity()

    async def start(self, port: int = 0) -> Served:
        self.server = grpc.aio.server(interceptors=interceptors_of(self.security), options=SERVER_OPTIONS)
        add_RegistryServiceServicer_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()
        self.servicer.start()
        self.channel = open_channel(self.address, own_connection=True)
        self.stub = RegistryServiceStub(self.channel)
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def stop(self, grace: float = 0.0) -> None:
        await self.channel.close()
        await self.servicer.close()
        await self.server.stop(grace)

    async def register(self, *rows: RankRow) -> pb.RegisterResponse:
        return await self.stub.Register(request_of(*rows), timeout=10)

    def grown_up(self) -> Served:
        """As it is one TTL after its start."""
        self.servicer.registry._started -= self.servicer.registry.ttl
        return self


def _from_peer(servicer: RegistryServicer, peer: str) -> RegistryServicer:
    """The same servicer, for callers that seem to come from elsewhere."""

    class Elsewhere(RegistryServicer):
        async def Register(self, request: pb.RegisterRequest, context: object) -> pb.RegisterResponse:
            return await super().Register(request, type("Context", (), {"peer": lambda self: peer})())

    return Elsewhere(ttl=servicer.registry.ttl)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = (await Served().start()).grown_up()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def resolver() -> AsyncIterator[Resolver]:
    made = Resolver(dial)
    yield made
    await made.close()


def dial(address: str) -> grpc.aio.Channel:
    return open_channel(address, own_connection=True)


def request_of(*rows: RankRow) -> pb.RegisterRequest:
    return pb.RegisterRequest(rows=[wire.row_to_pb(at, POOLS) for at in rows])


async def failure(call: Awaitable[object]) -> KvGrpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return error_from(refused.value)


async def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


class TestRegister:
    async def test_returns_leases_their_ttl_and_which_registry_gave_them(self, served: Served) -> None:
        rows = ranks(TP2)
        first, second = await served.register(*rows), await served.register(*rows)
        assert [lease.rank for lease in first.leases] == [rank_ref_to_pb(at.ref) for at in rows]
        assert (first.ttl.ToSeconds(), first.leases[0].lease_id > 0) == (10, True)
        assert second == first

    async def test_rows_come_back_as_they_were_given(self, served: Served) -> None:
        given = row(pools=(pool(), pool("swa")), features=("a", "b"))
        await served.register(given)
        response = await served.stub.GetEngine(pb.GetEngineRequest(engine="P"))
        assert wire.engine_from_pb(response.engine, POOLS).rows == (given,)

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
        served.servicer.registry._max_rows = 1
        error = await failure(served.stub.Register(request_of(*ranks(TP2))))
        assert isinstance(error, TooManyRequests)
        assert error.retry_after == 10

    async def test_draining(self, served: Served) -> None:
        served.servicer.drain()
        assert isinstance(await failure(served.stub.Register(request_of(row()))), ServerDraining)


class TestKeepAlive:
    async def test_one_answer_a_message_in_order_naming_unknown_leases(self, served: Served) -> None:
        lease = (await served.register(row())).leases[0].lease_id
        call = served.stub.KeepAlive()
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
        call = brief.stub.KeepAlive()
        for _ in range(6):
            await call.write(pb.KeepAliveRequest(lease_ids=[lease]))
            assert not (await call.read()).unknown_lease_ids
            await asyncio.sleep(0.2)
        call.cancel()
        await until(lambda: brief.servicer.registry.rows == 0)
        await brief.stop()

    async def test_too_many_leases_end_the_stream_and_no_other(self, served: Served) -> None:
        good, bad = served.stub.KeepAlive(), served.stub.KeepAlive()
        await bad.write(pb.KeepAliveRequest(lease_ids=range(65_537)))
        assert isinstance(await failure(bad.read()), InvalidRequest)
        await good.write(pb.KeepAliveRequest(lease_ids=[5]))
        assert list((await good.read()).unknown_lease_ids) == [5]
        good.cancel()

    async def test_a_drain_ends_idle_streams_at_once(self, served: Served) -> None:
        call = served.stub.KeepAlive()
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
        token, seen = "", []
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
        fat = [row(tp=tp, layout=Layout(tp=12), features=("x" * 100_000,)) for tp in range(12)]
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
            await served.register(row(name, features=("x" * 200_000,) * 1))
        for tp in range(6):
            await served.register(row("d", tp=tp, layout=Layout(tp=6), features=("x" * 200_000,)))
        token, seen = "", []
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
        assert isinstance(await failure(served.stub.ListEngines(pb.ListEnginesRequest(role=7))), InvalidRequest)


class TestResolveRanks:
    async def test_returns_the_selected_rows_at_once_without_wait_ready(self, served: Served) -> None:
        await served.register(row(dp=1, layout=Layout(dp=2)))
        request = pb.ResolveRanksRequest(
            engine="P", role=ROLE_PREFILL, selectors=[pb.RankSelector(dp=1), pb.RankSelector(dp=0)]
        )
        engine = (await served.stub.ResolveRanks(request)).engine
        assert (engine.ready, engine.registered_ranks, engine.expected_ranks) == (False, 1, 2)
        assert [at.rank.rank.dp for at in engine.rows] == [1]

    async def test_wait_ready_is_woken_by_the_last_rank_within_tens_of_milliseconds(self, served: Served) -> None:
        first, second = ranks(TP2)
        request = pb.ResolveRanksRequest(role=ROLE_PREFILL, selectors=[pb.RankSelector()], wait_ready=True)
        took = []
        for _ in range(10):  # the best of ten: what the machine does besides is not ours
            await served.register(first)
            waiting = served.stub.ResolveRanks(request, timeout=30)
            await until(lambda: served.servicer._waiters.count == 1)
            started = time.monotonic()
            await served.register(second)
            response = await waiting
            took.append(time.monotonic() - started)
            assert len(response.engine.rows) == 2
            if took[-1] < 0.1:
                break
            served.servicer.registry.deregister([first.ref, second.ref])
        assert min(took) < 0.1

    async def test_a_thousand_calls_wait_and_are_all_woken(self, served: Served) -> None:
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = [asyncio.ensure_future(served.stub.ResolveRanks(request, timeout=30)) for _ in range(1_000)]
        await until(lambda: served.servicer._waiters.count == 1_000)
        started = time.monotonic()
        await served.register(row())
        responses = await asyncio.gather(*waiting)
        assert time.monotonic() - started < 15  # a call that is not woken waits for its deadline, 30 s
        assert all(response.engine.ready for response in responses)
        assert served.servicer._waiters.count == 0

    async def test_shortly_before_the_deadline_the_missing_ranks_are_named(self, served: Served) -> None:
        await served.register(row(tp=1, layout=TP2))
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        error = await failure(served.stub.ResolveRanks(request, timeout=2.0))
        assert isinstance(error, EngineNotFound)
        assert error.metadata == {"engine": "P", "role": "PREFILL", "missingRanks": "dp0/pp0/cp0/tp0"}

    async def test_while_warming_up_the_wait_ends_with_that(self) -> None:
        fresh = await Served().start()
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        assert isinstance(await failure(fresh.stub.ResolveRanks(request, timeout=2.0)), WarmingUp)
        await fresh.stop()

    async def test_a_caller_that_goes_away_waits_no_longer(self, served: Served) -> None:
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = served.stub.ResolveRanks(request, timeout=30)
        await until(lambda: served.servicer._waiters.count == 1)
        waiting.cancel()
        await until(lambda: served.servicer._waiters.count == 0)

    async def test_too_many_waiting_calls(self) -> None:
        small = (await Served(max_waiters=1).start()).grown_up()
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = small.stub.ResolveRanks(request, timeout=30)
        await until(lambda: small.servicer._waiters.count == 1)
        error = await failure(small.stub.ResolveRanks(request, timeout=30))
        assert isinstance(error, TooManyRequests)
        assert error.retry_after == 1.0
        waiting.cancel()
        await small.stop()

    async def test_more_rows_than_a_message_holds(self, served: Served) -> None:
        for tp in range(20):
            await served.register(row(tp=tp, layout=Layout(tp=20), features=("x" * 200_000,)))
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
            pb.ResolveRanksRequest(engine="a", role=9),
            pb.ResolveRanksRequest(role=ROLE_PREFILL, wait_ready=True),
            pb.ResolveRanksRequest(engine="a", selectors=[pb.RankSelector()] * 257),
        ):
            assert isinstance(await failure(served.stub.ResolveRanks(wrong, timeout=5)), InvalidRequest)

    async def test_a_drain_ends_waiting_calls(self, served: Served) -> None:
        request = pb.ResolveRanksRequest(engine="P", role=ROLE_PREFILL, wait_ready=True)
        waiting = served.stub.ResolveRanks(request, timeout=30)
        await until(lambda: served.servicer._waiters.count == 1)
        served.servicer.drain()
        assert isinstance(await failure(waiting), ServerDraining)


class TestRegistration:
    async def test_keeps_rows_registered_for_longer_than_their_ttl(self) -> None:
        brief = await Served(ttl=0.6).start()
        registration = Registration(dial, brief.address, ranks(TP2))
        await registration.start(5)
        assert (registration.state, registration.healthy) == ("registered", True)
        for _ in range(30):
            await asyncio.sleep(0.05)
            assert brief.servicer.registry.rows == 2
        await registration.close()
        assert (registration.state, registration.healthy) == ("closed", False)
        assert brief.servicer.registry.rows == 0
        await brief.stop()

    async def test_registers_thousands_of_rows_in_chunks(self, served: Served) -> None:
        registration = Registration(dial, served.address, ranks(Layout(dp=300, tp=8)))
        await registration.start(10)
        assert served.servicer.registry.rows == 2_400
        await registration.close()
        assert served.servicer.registry.rows == 0

    async def test_registers_again_what_the_registry_forgot(self) -> None:
        brief = await Served(ttl=0.6).start()
        registration = Registration(dial, brief.address, ranks(TP2))
        await registration.start(5)
        brief.servicer.registry.deregister([row(tp=1).ref])
        await until(lambda: brief.servicer.registry.rows == 2)
        await registration.close()
        await brief.stop()

    async def test_start_raises_conflicts_at_once_and_leaves_nothing_behind(self, served: Served) -> None:
        await served.register(row("A", epoch=9), row("B", epoch=9, layout=TP2))
        for rows, expected in (
            ([row("A", epoch=8)], StaleEpoch),
            ([row("B", tp=1, epoch=8, layout=Layout(tp=4))], RegistrationShapeConflict),
            ([*(row(str(index)) for index in range(1_024)), row("A", epoch=8)], StaleEpoch),
        ):
            with pytest.raises(expected):
                await Registration(dial, served.address, rows).start(5)
        assert served.servicer.registry.rows == 2

    async def test_start_waits_for_a_registry_that_is_not_there_yet(self) -> None:
        late = await Served().start()
        port = late.port
        await late.stop()
        registration = Registration(dial, f"127.0.0.1:{port}", [row()])
        starting = asyncio.ensure_future(registration.start(10))
        await asyncio.sleep(0.3)
        assert not starting.done()
        late = await Served().start(port)
        await starting
        assert late.servicer.registry.rows == 1
        await registration.close()
        await late.stop()

    async def test_start_waits_while_older_incarnations_hold_another_shape(self) -> None:
        brief = await Served(ttl=0.6).start()
        await brief.register(row(tp=1, epoch=5, layout=TP2))
        registration = Registration(dial, brief.address, [row(epoch=6)])
        await registration.start(5)
        assert brief.servicer.registry.rows == 1
        await registration.close()
        await brief.stop()

    async def test_start_tries_again_when_the_library_dropped_the_call(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        register, dropped = served.servicer.registry.register, []

        def drop_the_first(rows: list[RankRow]) -> object:
            if not dropped:
                dropped.append(rows)
                error = KvGrpcError("too many calls are pending")
                error.code = "CANCELLED"  # type: ignore[misc]  # as the library does past 1,000 pending calls
                raise error
            return register(rows)

        monkeypatch.setattr(served.servicer.registry, "register", drop_the_first)
        registration = Registration(dial, served.address, [row()])
        await registration.start(5)
        assert dropped
        await registration.close()

    async def test_start_gives_up_at_its_deadline(self) -> None:
        gone = await Served().start()
        await gone.stop()
        started = time.monotonic()
        with pytest.raises(PeerUnreachable) as refused:
            await Registration(dial, gone.address, [row()]).start(0.5)
        assert refused.value.metadata == {"address": gone.address}
        assert time.monotonic() - started < 4  # one call alone may take 5 s

    async def test_comes_back_after_the_registry_was_restarted(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.ERROR)
        old = await Served(ttl=1.5).start()
        registration = Registration(dial, old.address, ranks(TP2))
        await registration.start(5)
        await old.stop()
        await until(lambda: registration.state == "retrying")
        assert registration.healthy
        new = await Served(ttl=1.5).start(old.port)
        await until(lambda: new.servicer.registry.rows == 2)
        await until(lambda: registration.state == "registered")
        await registration.close()
        await new.stop()
        assert caplog.records == []

    async def test_a_row_that_a_newer_incarnation_took_is_reported_and_left_to_it(self) -> None:
        brief = await Served(ttl=0.6).start()
        heard: list[int] = []
        registration = Registration(dial, brief.address, ranks(TP2, epoch=5), on_superseded=heard.append)
        await registration.start(5)
        newer = [Registration(dial, brief.address, [row(tp=tp, epoch=7 + tp, layout=TP2)]) for tp in range(2)]
        await newer[1].start(5)
        await until(lambda: heard == [8])
        await until(lambda: registration.state == "registered")
        await newer[0].start(5)
        await until(lambda: heard == [8, 7])
        assert (registration.state, registration.healthy) == ("superseded", False)
        await registration.close()
        assert brief.servicer.registry.rows == 2
        for each in newer:
            await each.close()
        await brief.stop()

    async def test_works_through_a_channel_that_sends_a_token(self) -> None:
        guarded = await Served(ttl=0.6, security=ServerSecurity(tokens=(Token(CallerRole.RANK, "s" * 32),))).start()
        registration = Registration(
            lambda address: open_channel(address, ClientSecurity(token="s" * 32)), guarded.address, [row()]
        )
        await registration.start(5)
        guarded.servicer.registry.deregister([row().ref])
        await until(lambda: guarded.servicer.registry.rows == 1)
        await guarded.stop()
        await until(lambda: registration.state == "retrying")
        await registration.close()

    async def test_a_registry_that_refuses_the_credentials_is_not_asked_again(self) -> None:
        guarded = await Served(security=ServerSecurity(tokens=(Token(CallerRole.RANK, "s" * 32),))).start()
        with pytest.raises(CredentialsInvalid):
            await Registration(dial, guarded.address, [row()]).start(5)
        await guarded.stop()

    async def test_close_is_bounded_and_may_be_repeated(self) -> None:
        gone = await Served().start()
        registration = Registration(dial, gone.address, [row()])
        await registration.start(5)
        await gone.stop()
        started = time.monotonic()
        await registration.close()
        await registration.close()
        assert time.monotonic() - started < 4  # one call alone may take 5 s


class TestResolver:
    async def test_returns_the_engine_with_the_selected_rows(self, served: Served, resolver: Resolver) -> None:
        rows = ranks(TP2)
        await served.register(*rows)
        engine = await resolver.resolve(served.address, "", Role.PREFILL, [RankSelector(tp=1)], timeout=5)
        assert (engine.name, engine.role, engine.layout, engine.ready) == ("P", Role.PREFILL, TP2, True)
        assert engine.rows == (rows[1],)

    async def test_equal_questions_at_one_time_are_asked_once(self, served: Served, resolver: Resolver) -> None:
        asked = [
            asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10)) for _ in range(100)
        ]
        await until(lambda: served.servicer._waiters.count > 0)
        await served.register(row())
        assert len(set(await asyncio.gather(*asked))) == 1
        assert resolver._pending == {}

    async def test_the_registry_is_asked_again_for_the_next_question(self, served: Served, resolver: Resolver) -> None:
        await served.register(row(epoch=1))
        first = await resolver.resolve(served.address, "P", Role.PREFILL, [RankSelector()], timeout=5)
        await served.register(row(epoch=2))
        second = await resolver.resolve(served.address, "P", Role.PREFILL, [RankSelector()], timeout=5)
        assert [engine.rows[0].ref.epoch for engine in (first, second)] == [1, 2]

    async def test_each_caller_has_its_own_timeout(self, served: Served, resolver: Resolver) -> None:
        patient = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=30))
        await until(lambda: served.servicer._waiters.count == 1)
        started = time.monotonic()
        with pytest.raises(EngineNotFound):
            await resolver.resolve(served.address, "P", Role.PREFILL, timeout=0.3)
        assert time.monotonic() - started < 8
        await served.register(row())
        assert (await patient).ready

    async def test_a_later_caller_gets_its_time_too(self, served: Served, resolver: Resolver) -> None:
        hasty = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=0.5))
        await until(lambda: served.servicer._waiters.count == 1)
        patient = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10))
        with pytest.raises(EngineNotFound):
            await hasty
        await served.register(row())
        assert (await patient).ready

    async def test_a_caller_that_goes_away_disturbs_nobody(self, served: Served, resolver: Resolver) -> None:
        asked = [
            asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10)) for _ in range(2)
        ]
        await until(lambda: served.servicer._waiters.count == 1)
        asked[0].cancel()
        await served.register(row())
        assert (await asked[1]).ready
        lone = asyncio.ensure_future(resolver.resolve(served.address, "Q", Role.PREFILL, timeout=10))
        await until(lambda: served.servicer._waiters.count == 1)
        lone.cancel()
        await until(lambda: served.servicer._waiters.count == 0)

    async def test_warming_up_is_waited_for(self, resolver: Resolver) -> None:
        fresh = await Served(ttl=0.6).start()
        asking = asyncio.ensure_future(resolver.resolve(fresh.address, "P", Role.PREFILL, timeout=5, wait_ready=False))
        await asyncio.sleep(0.1)
        await fresh.register(row())
        assert (await asking).ready
        with pytest.raises(EngineNotFound):
            await resolver.resolve(fresh.address, "Q", Role.PREFILL, timeout=5, wait_ready=False)
        await fresh.stop()

    async def test_a_registry_that_restarts_is_asked_again(self, resolver: Resolver) -> None:
        old = await Served().start()
        asking = asyncio.ensure_future(resolver.resolve(old.address, "P", Role.PREFILL, timeout=10))
        await until(lambda: old.servicer._waiters.count == 1)
        await old.stop()
        new = await Served().start(old.port)
        await new.register(row())
        assert (await asking).ready
        await new.stop()

    async def test_a_registry_that_is_not_there_is_unreachable_after_the_timeout(self, resolver: Resolver) -> None:
        gone = await Served().start()
        await gone.stop()
        started = time.monotonic()
        with pytest.raises(PeerUnreachable) as refused:
            await resolver.resolve(gone.address, "P", Role.PREFILL, timeout=0.5)
        assert refused.value.metadata["address"] == gone.address
        assert time.monotonic() - started < 4

    async def test_what_cannot_become_right_is_not_repeated(self, served: Served, resolver: Resolver) -> None:
        for name in ("a", "b"):
            await served.register(row(name))
        started = time.monotonic()
        with pytest.raises(InvalidRequest):
            await resolver.resolve(served.address, "", Role.PREFILL, timeout=30)
        assert time.monotonic() - started < 10

    async def test_close_ends_open_questions(self, served: Served, resolver: Resolver) -> None:
        asking = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10))
        await until(lambda: served.servicer._waiters.count == 1)
        await resolver.close()
        with pytest.raises(PeerUnreachable):
            await asking
