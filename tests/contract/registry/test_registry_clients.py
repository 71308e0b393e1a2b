"""The two clients of a registry against a real one: registrations, and resolvers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from kvgrpc.errors import (
    CredentialsInvalid,
    EngineNotFound,
    InvalidRequest,
    KvGrpcError,
    PeerUnreachable,
    RegistrationShapeConflict,
    StaleEpoch,
    StoreUnavailable,
)
from kvgrpc.model import Layout, Role
from kvgrpc.registry import wire
from kvgrpc.registry.client import registration as registration_module
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.client.resolver import Resolver
from kvgrpc.registry.model import Lease, RankRow, RankSelector
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.options import OWN_CONNECTION
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity, Token
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from tests.support.registry_builders import ranks, row
from tests.support.registry_serving import TP2, Served, dial
from tests.support.waiting import until

# One that was refused once dials again after ten minutes, where ours do it after 0.2 to 5 s.
LONG_BACKOFF = (
    *OWN_CONNECTION,
    ("grpc.initial_reconnect_backoff_ms", 600_000),
    ("grpc.max_reconnect_backoff_ms", 600_000),
)


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


class Hurried(RegistryServiceServicer):
    """A registry that names ``ttl`` and counts how often it is asked."""

    def __init__(self, ttl: Duration) -> None:
        self.ttl = ttl
        self.renewals = 0

    async def Register(self, request: pb.RegisterRequest, context: object) -> pb.RegisterResponse:
        leases = [pb.RankLease(rank=each.rank, lease_id=number) for number, each in enumerate(request.rows, 1)]
        return pb.RegisterResponse(leases=leases, ttl=self.ttl)

    async def KeepAlive(
        self, request_iterator: AsyncIterator[pb.KeepAliveRequest], context: object
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        async for _ in request_iterator:
            self.renewals += 1
            yield pb.KeepAliveResponse(ttl=self.ttl)

    async def Deregister(self, request: pb.DeregisterRequest, context: object) -> pb.DeregisterResponse:
        return pb.DeregisterResponse()


class Refusing(Hurried):
    """A registry that takes rows and renews none."""

    async def KeepAlive(
        self, request_iterator: AsyncIterator[pb.KeepAliveRequest], context: Any
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many\n2026-11-23 ERROR a line of somebody else's")
        yield pb.KeepAliveResponse()


class Forgetful(Hurried):
    """A registry that takes rows and names a lease of the first one alone."""

    deregistered = 0

    async def Register(self, request: pb.RegisterRequest, context: object) -> pb.RegisterResponse:
        answer = await super().Register(request, context)
        return pb.RegisterResponse(leases=answer.leases[:1], ttl=self.ttl)

    async def Deregister(self, request: pb.DeregisterRequest, context: object) -> pb.DeregisterResponse:
        self.deregistered += len(request.ranks)
        return pb.DeregisterResponse()


class Confusing(Forgetful):
    """A registry that names one lease for all rows."""

    async def Register(self, request: pb.RegisterRequest, context: object) -> pb.RegisterResponse:
        return pb.RegisterResponse(leases=[pb.RankLease(rank=each.rank, lease_id=7) for each in request.rows])


async def refused_by(told: Forgetful) -> InvalidRequest:
    """What whoever registers two ranks there is told, which names the registry."""
    server = grpc.aio.server()
    add_RegistryServiceServicer_to_server(told, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with pytest.raises(InvalidRequest) as wrong:
        await Registration(dial, address, ranks(TP2)).start(5)
    assert address in wrong.value.message
    await server.stop(0)
    return wrong.value


class TestRegistration:
    async def test_keeps_rows_registered_for_longer_than_their_ttl(self) -> None:
        brief = await Served(ttl=0.6).start()
        registration = Registration(dial, brief.address, ranks(TP2))
        await registration.start(5)
        assert (registration.state, registration.healthy) == ("registered", True)
        for _ in range(30):
            await asyncio.sleep(0.05)  # looked at for longer than a TTL
            assert brief.registry.rows == 2
        await registration.close()
        assert (registration.state, registration.healthy) == ("closed", False)
        assert brief.registry.rows == 0
        await brief.stop()

    @pytest.mark.parametrize("ttl", [Duration(), Duration(seconds=-1), Duration(nanos=1)])
    async def test_a_registry_with_a_wrong_time_to_live_is_not_asked_without_a_pause(self, ttl: Duration) -> None:
        """Each third of it is next to nothing: the loop of the rank did little else."""
        told = Hurried(ttl)  # type: ignore[abstract]
        server = grpc.aio.server()
        add_RegistryServiceServicer_to_server(told, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        registration = Registration(dial, address, ranks(TP2))
        await registration.start(5)
        await asyncio.sleep(0.5)  # a while in which it must not be asked often
        assert registration.state == "registered" and told.renewals <= 10
        await registration.close()
        await server.stop(0)

    async def test_registers_thousands_of_rows_in_chunks(self, served: Served) -> None:
        registration = Registration(dial, served.address, ranks(Layout(dp=300, tp=8)))
        await registration.start(10)
        assert served.registry.rows == 2_400
        await registration.close()
        assert served.registry.rows == 0

    async def test_registers_again_what_the_registry_forgot(self) -> None:
        brief = await Served(ttl=0.6).start()
        registration = Registration(dial, brief.address, ranks(TP2))
        await registration.start(5)
        brief.registry.deregister([row(tp=1).ref])
        await until(lambda: brief.registry.rows == 2)
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
        assert served.registry.rows == 2

    async def test_start_waits_for_a_registry_that_is_not_there_yet(self) -> None:
        late = await Served().start()
        port = late.port
        await late.stop()
        registration = Registration(dial, f"127.0.0.1:{port}", [row()])
        starting = asyncio.ensure_future(registration.start(10))
        await asyncio.sleep(0.3)  # in which it must not return
        assert not starting.done()
        late = await Served().start(port)
        await starting
        assert late.registry.rows == 1
        await registration.close()
        await late.stop()

    async def test_start_waits_while_older_incarnations_hold_another_shape(self) -> None:
        brief = await Served(ttl=0.6).start()
        await brief.register(row(tp=1, epoch=5, layout=TP2))
        registration = Registration(dial, brief.address, [row(epoch=6)])
        await registration.start(5)
        assert brief.registry.rows == 1
        await registration.close()
        await brief.stop()

    async def test_start_tries_again_when_the_library_dropped_the_call(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        register = served.registry.register
        dropped: list[list[RankRow]] = []

        def drop_the_first(rows: list[RankRow]) -> object:
            if not dropped:
                dropped.append(rows)
                error = KvGrpcError("too many calls are pending")
                error.code = "CANCELLED"  # type: ignore[misc]  # as the library does past 1,000 pending calls
                raise error
            return register(rows)

        monkeypatch.setattr(served.registry, "register", drop_the_first)
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
        await until(lambda: new.registry.rows == 2)
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
        assert brief.registry.rows == 2
        for each in newer:
            await each.close()
        await brief.stop()

    async def test_works_through_a_channel_that_sends_a_token(self) -> None:
        guarded = await Served(ttl=0.6, security=ServerSecurity(tokens=(Token(CallerRole.RANK, "s" * 32),))).start()
        registration = Registration(
            lambda address: open_channel(address, ClientSecurity(token="s" * 32)), guarded.address, [row()]
        )
        await registration.start(5)
        guarded.registry.deregister([row().ref])
        await until(lambda: guarded.registry.rows == 1)
        await guarded.stop()
        await until(lambda: registration.state == "retrying")
        await registration.close()

    async def test_a_registry_that_refuses_the_credentials_is_not_asked_again(self) -> None:
        guarded = await Served(security=ServerSecurity(tokens=(Token(CallerRole.RANK, "s" * 32),))).start()
        with pytest.raises(CredentialsInvalid):
            await Registration(dial, guarded.address, [row()]).start(5)
        await guarded.stop()

    async def test_where_every_renewal_is_refused_it_registers_less_and_less_often(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As past the bound of one caller's KeepAlive: thousands of ranks registered anew twice a second each."""
        attempts: list[int] = []

        def pause_before(attempt: int, *others: object) -> float:
            attempts.append(attempt)
            return 0.01

        monkeypatch.setattr(registration_module, "pause_before", pause_before)
        server = grpc.aio.server()
        add_RegistryServiceServicer_to_server(Refusing(Duration(seconds=10)), server)  # type: ignore[abstract]
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        registration = Registration(dial, address, ranks(TP2))
        await registration.start(5)
        await until(lambda: len(attempts) >= 4)
        assert attempts[:4] == [0, 1, 2, 3]
        await registration.close()
        await server.stop(0)
        assert caplog.messages and all("\n" not in message for message in caplog.messages)

    async def test_a_registry_that_names_too_few_leases_is_told_by_the_field_and_gets_the_rows_back(self) -> None:
        """A caller got Python's words about zip, and a cache in an engine never tried again."""
        told = Forgetful(Duration(seconds=10))  # type: ignore[abstract]
        wrong = await refused_by(told)
        assert wrong.metadata["field"] == "leases" and told.deregistered == 2

    @pytest.mark.parametrize(("at_a_time", "field"), [(2, "leases[1].lease_id"), (1, "leases[0].lease_id")])
    async def test_one_lease_for_two_rows_is_no_lease(
        self, at_a_time: int, field: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first of them was forgotten: it was said to be registered, was renewed by nobody and never came back."""
        monkeypatch.setattr(wire, "MAX_ROWS_PER_REQUEST", at_a_time)
        told = Confusing(Duration(seconds=10))  # type: ignore[abstract]
        wrong = await refused_by(told)
        assert (wrong.metadata["field"], wrong.metadata["value"]) == (field, "7") and told.deregistered == 2

    async def test_a_start_whose_answer_came_too_late_leaves_nothing_behind(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        register = served.store.register

        async def slow(rows: Sequence[RankRow]) -> Sequence[Lease]:
            leases = await register(rows)
            await asyncio.sleep(30)  # longer than the start waits: its answer never comes
            return leases

        monkeypatch.setattr(served.store, "register", slow)
        with pytest.raises(PeerUnreachable):
            await Registration(dial, served.address, ranks(TP2)).start(0.5)
        assert served.registry.rows == 0

    async def test_a_start_whose_store_wrote_and_did_not_say_so_leaves_nothing_behind(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As an etcd that took a transaction, and did not answer or tell of it in time."""
        register = served.store.register

        async def unheard(rows: Sequence[RankRow]) -> Sequence[Lease]:
            await register(rows)
            raise StoreUnavailable("it does not say what changes", retry_after=1.0)

        monkeypatch.setattr(served.store, "register", unheard)
        with pytest.raises(StoreUnavailable):
            await Registration(dial, served.address, ranks(TP2)).start(0.5)
        assert served.registry.rows == 0

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
        await until(lambda: served.waiting > 0)
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
        await until(lambda: served.waiting == 1)
        started = time.monotonic()
        with pytest.raises(EngineNotFound):
            await resolver.resolve(served.address, "P", Role.PREFILL, timeout=0.3)
        assert time.monotonic() - started < 8
        await served.register(row())
        assert (await patient).ready

    async def test_a_later_caller_gets_its_time_too(self, served: Served, resolver: Resolver) -> None:
        hasty = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=1.5))
        await until(lambda: served.waiting == 1)
        patient = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10))
        with pytest.raises(EngineNotFound):
            await hasty
        await served.register(row())
        assert (await patient).ready

    async def test_a_caller_that_goes_away_disturbs_nobody(self, served: Served, resolver: Resolver) -> None:
        asked = [
            asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10)) for _ in range(2)
        ]
        await until(lambda: served.waiting == 1)
        asked[0].cancel()
        await served.register(row())
        assert (await asked[1]).ready
        lone = asyncio.ensure_future(resolver.resolve(served.address, "Q", Role.PREFILL, timeout=10))
        await until(lambda: served.waiting == 1)
        lone.cancel()
        await until(lambda: served.waiting == 0)

    async def test_warming_up_is_waited_for(self, resolver: Resolver) -> None:
        fresh = await Served(ttl=0.6).start()
        asking = asyncio.ensure_future(resolver.resolve(fresh.address, "P", Role.PREFILL, timeout=5, wait_ready=False))
        await asyncio.sleep(0.1)  # the registry warms up; right whether it was asked by then or not
        await fresh.register(row())
        assert (await asking).ready
        with pytest.raises(EngineNotFound):
            await resolver.resolve(fresh.address, "Q", Role.PREFILL, timeout=5, wait_ready=False)
        await fresh.stop()

    async def test_a_registry_that_restarts_is_asked_again(self, resolver: Resolver) -> None:
        old = await Served().start()
        asking = asyncio.ensure_future(resolver.resolve(old.address, "P", Role.PREFILL, timeout=10))
        await until(lambda: old.waiting == 1)
        await old.stop()
        new = await Served().start(old.port)
        await new.register(row())
        assert (await asking).ready
        await new.stop()

    async def test_a_registry_is_met_as_soon_as_it_is_back_whoever_else_asks_it(self) -> None:
        """By a channel that did not meet it while it was away: one that did waits."""
        resolver = Resolver(lambda address: grpc.aio.insecure_channel(address, LONG_BACKOFF))
        gone = await Served().start()
        await gone.stop()
        patient = asyncio.ensure_future(resolver.resolve(gone.address, "P", Role.PREFILL, timeout=50))
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                await resolver.resolve(gone.address, "Q", Role.PREFILL, timeout=1.0, wait_ready=False)
        back = (await Served().start(gone.port)).grown_up()
        await back.register(row())
        assert (await resolver.resolve(back.address, "P", Role.PREFILL, timeout=40, wait_ready=False)).ready
        assert (await patient).ready
        await resolver.close()
        await back.stop()

    async def test_many_questions_at_a_registry_that_is_away_open_few_channels(self) -> None:
        opened: list[str] = []

        def counted(address: str) -> grpc.aio.Channel:
            opened.append(address)
            return open_channel(address, own_connection=True)

        resolver, gone = Resolver(counted), await Served().start()
        await gone.stop()
        asked = [resolver.resolve(gone.address, f"P{number}", Role.PREFILL, timeout=2.0) for number in range(40)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, PeerUnreachable) for answer in answers)
        assert len(opened) <= 6, "two a second"
        await resolver.close()

    async def test_a_registry_that_is_not_there_is_unreachable_after_the_timeout(self, resolver: Resolver) -> None:
        gone = await Served().start()
        await gone.stop()
        started = time.monotonic()
        with pytest.raises(PeerUnreachable) as refused:
            await resolver.resolve(gone.address, "P", Role.PREFILL, timeout=0.5)
        assert refused.value.metadata["address"] == gone.address
        assert time.monotonic() - started < 4

    async def test_one_that_refuses_is_given_up_after_the_time_that_the_caller_bears(self, resolver: Resolver) -> None:
        gone = await Served().start()
        await gone.stop()
        started = time.monotonic()
        with pytest.raises(PeerUnreachable):
            await resolver.resolve(gone.address, "P", Role.PREFILL, timeout=40, refused_for=1.0)
        assert 1.0 <= time.monotonic() - started < 6

    async def test_one_that_refused_for_less_is_waited_for(self, resolver: Resolver) -> None:
        gone = await Served().start()
        await gone.stop()
        asking = asyncio.ensure_future(
            resolver.resolve(gone.address, "P", Role.PREFILL, timeout=40, refused_for=5.0, wait_ready=False)
        )
        await asyncio.sleep(1.5)  # the time that it is away
        back = await Served().start(gone.port)
        await asyncio.sleep(5.0)  # it warms up, and says so, for longer than it may refuse
        await back.register(row())
        assert (await asking).ready
        await back.stop()

    async def test_what_cannot_become_right_is_not_repeated(self, served: Served, resolver: Resolver) -> None:
        for name in ("a", "b"):
            await served.register(row(name))
        started = time.monotonic()
        with pytest.raises(InvalidRequest):
            await resolver.resolve(served.address, "", Role.PREFILL, timeout=30)
        assert time.monotonic() - started < 10

    async def test_close_ends_open_questions(self, served: Served, resolver: Resolver) -> None:
        asking = asyncio.ensure_future(resolver.resolve(served.address, "P", Role.PREFILL, timeout=10))
        await until(lambda: served.waiting == 1)
        await resolver.close()
        with pytest.raises(PeerUnreachable):
            await asking
