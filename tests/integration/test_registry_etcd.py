"""Several registries over one real etcd are one registry, and lose nothing that its owner still holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import (
    OldShapeStillLeased,
    RegistrationShapeConflict,
    StaleEpoch,
    StoreUnavailable,
    TooManyRequests,
    WarmingUp,
)
from kvgrpc.model import Layout, Role
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited
from kvgrpc.registry import wire
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.model import BEFORE_ALL, EVERY_RANK, Absence, RankRow
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.etcd import EtcdStore, view
from kvgrpc.registry.store.etcd.client import EtcdClient
from kvgrpc.registry.store.etcd.housekeeping import Housekeeping
from kvgrpc.registry.store.etcd.keys import etcd_lease
from kvgrpc.registry.store.etcd.v1 import etcd_pb2
from kvgrpc.rpc.audience import Audiences
from kvgrpc.rpc.channel import open_channel
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.common_pb2 import ROLE_PREFILL
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.etcd import ETCD, Etcd, free_port, running_etcd
from tests.support.mirrored import known_engines
from tests.support.registry_serving import POOLS, TP2, dial, failure, request_of
from tests.support.secrets import bearer, tokens_of
from tests.support.waiting import until
from tests.unit.registry.builders import pool, ranks, row

pytestmark = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")

TTL = 2.0


class Replica:
    """One registry over etcd behind a server."""

    def __init__(self, etcd: Etcd, prefix: str, ttl: float = TTL) -> None:
        self.store = EtcdStore([etcd.address], ttl=ttl, prefix=prefix)
        self.servicer = RegistryServicer(self.store)

    async def start(self, port: int = 0, security: ServerSecurity | None = None) -> Replica:
        audiences = Audiences()
        interceptors = interceptors_of(security or ServerSecurity(), audiences=audiences)
        self.server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        add_registry_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.servicer.start()
        await self.server.start()
        self.address = f"127.0.0.1:{self.port}"
        audiences.add(self.address)
        self.channel = open_channel(self.address, own_connection=True)
        self.stub = RegistryServiceStub(self.channel)
        await until(lambda: self.store.warming_up_for == 0)
        return self

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.servicer.close()

    async def register(self, *rows: RankRow) -> pb.RegisterResponse:
        return await self.stub.Register(request_of(*rows), timeout=20)

    async def resolve(self, engine: str, timeout: float = 10.0) -> list[RankRow]:
        request = pb.ResolveRanksRequest(
            engine=engine, role=ROLE_PREFILL, selectors=[wire.selector_to_pb(EVERY_RANK)], wait_ready=True
        )
        found = (await self.stub.ResolveRanks(request, timeout=timeout)).engine
        return list(wire.engine_from_pb(found, POOLS).rows)

    def known(self) -> set[RankRow]:
        engines = self.store.table.list_engines(None, "", 10_000, rows=True)
        return {at for engine in engines for at in engine.rows}


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as running:
        yield running


@pytest_asyncio.fixture
async def replicas(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[list[Replica]]:
    """Two registries over one etcd, with keys that no other test uses."""
    made = [await Replica(etcd, f"/{request.node.name}/").start() for _ in range(2)]
    yield made
    for replica in made:
        with contextlib.suppress(Exception):
            await replica.stop()


async def test_one_caller_leaves_rows_to_others_whichever_replica_it_asks(
    etcd: Etcd, request: pytest.FixtureRequest
) -> None:
    """Who registered a row stands beside it, so all replicas count alike, and one that starts later does."""
    security = ServerSecurity(tokens=tokens_of("rank greedy-*:greedy\nrank honest-*:honest"))
    prefix = f"/{request.node.name}/"
    async with contextlib.AsyncExitStack() as stack:

        async def replica() -> Replica:
            made = await Replica(etcd, prefix, ttl=60.0).start(security=security)
            stack.push_async_callback(made.stop)
            made.store._view.owners._rows._limit = 32
            return made

        async def register(at: Replica, name: str, number: int) -> None:
            metadata = (("authorization", bearer(name, at.address)),)
            await at.stub.Register(request_of(row(engine=f"{name}-{number}")), timeout=20, metadata=metadata)

        here, there = await replica(), await replica()
        for number in range(16):
            await register(here, "greedy", number)
        await until(lambda: len(there.known()) == 16)
        for each in (here, there, await replica()):
            refused = await failure(register(each, "greedy", 16))
            assert isinstance(refused, TooManyRequests) and refused.retry_after
            assert refused.metadata["scope"] == "rows of one caller"
        await register(there, "greedy", 3)  # a renewal takes no place
        await register(there, "honest", 0)
        told = {("rank greedy-*", "127.0.0.1"): 16, ("rank honest-*", "127.0.0.1"): 1}
        await until(lambda: here.store.rows_by_owner() == there.store.rows_by_owner() == told)
        metadata = (("authorization", bearer("greedy", here.address)),)
        gone = [rank_ref_to_pb(row(engine=f"greedy-{number}").ref) for number in range(8)]
        await here.stub.Deregister(pb.DeregisterRequest(ranks=gone), timeout=20, metadata=metadata)
        await until(lambda: len(there.known()) == 9)
        await register(there, "greedy", 16)


class TestReplicasAreOneRegistry:
    async def test_what_registers_at_one_is_found_at_the_other(self, replicas: list[Replica]) -> None:
        here, there = replicas
        given = [replace(at, pools=(pool(), pool("swa"))) for at in ranks(TP2)]
        waiting = asyncio.ensure_future(there.resolve("P"))
        await here.register(*given)
        assert await waiting == given
        assert await here.resolve("P") == given

    async def test_they_have_one_id_and_leases_hold_at_each(self, replicas: list[Replica]) -> None:
        here, there = replicas
        first = await here.register(row())
        await until(lambda: there.known() == {row()})
        second = await there.register(row())
        assert first == second
        call = there.stub.KeepAlive()
        lease = first.leases[0].lease_id
        for _ in range(8):
            await call.write(pb.KeepAliveRequest(lease_ids=[lease, 77]))
            answer = await call.read()
            assert isinstance(answer, pb.KeepAliveResponse)
            assert list(answer.unknown_lease_ids) == [77]
            await asyncio.sleep(TTL / 5)  # renewed at this interval
        assert here.known() == {row()}
        call.cancel()

    async def test_a_row_that_nobody_renews_goes_at_all(self, replicas: list[Replica]) -> None:
        await replicas[0].register(row())
        await until(lambda: bool(replicas[1].known()))
        await until(lambda: not replicas[0].known() and not replicas[1].known())

    async def test_leases_that_ran_out_are_counted_and_not_what_was_taken_out(self, etcd: Etcd) -> None:
        """At each replica, which are both in this process."""
        replicas = [await Replica(etcd, "/ran-out/", ttl=60.0).start() for _ in range(2)]
        before = leases_that_ran_out()

        async def until_gone() -> None:
            await until(lambda: not any(replica.known() for replica in replicas))

        for epoch in (1, 2):
            await replicas[0].register(row("P", epoch=epoch))
        await replicas[0].register(row("P", epoch=3, role=Role.DECODE))
        await until(lambda: all(replica.known() for replica in replicas))
        await replicas[1].stub.Deregister(pb.DeregisterRequest(ranks=[rank_ref_to_pb(row("P", epoch=3).ref)]))
        await until_gone()
        assert leases_that_ran_out() == before
        (lease,) = (await replicas[0].register(row("P", epoch=4))).leases
        await until(lambda: all(replica.known() for replica in replicas))
        await replicas[0].store._client.revoke(etcd_lease(lease.lease_id))
        await until_gone()
        assert leases_that_ran_out() == before + 2
        for replica in replicas:
            await replica.stop()

    async def test_each_says_how_the_ranks_left_that_are_missing(self, etcd: Etcd) -> None:
        replicas = [await Replica(etcd, "/left/", ttl=60.0).start() for _ in range(2)]
        layout = Layout(tp=4)
        leases = [(await replicas[0].register(row(tp=tp, layout=layout))).leases[0].lease_id for tp in range(4)]
        await until(lambda: all(len(replica.known()) == 4 for replica in replicas))
        gone = rank_ref_to_pb(row(tp=1).ref)
        await replicas[1].stub.Deregister(pb.DeregisterRequest(ranks=[gone]), timeout=20)
        await replicas[0].store._client.revoke(etcd_lease(leases[2]))
        await replicas[1].register(row(tp=3, epoch=2, layout=layout))
        await until(lambda: all(len(replica.known()) == 2 for replica in replicas))
        for replica in replicas:
            found = replica.store.table.get("P", BEFORE_ALL, 10)
            assert found is not None
            left = [(each.ref.rank.tp, each.absence) for each in found.absent_ranks]
            assert left == [(1, Absence.DEREGISTERED), (2, Absence.LEASE_RAN_OUT)]
            await replica.stop()

    async def test_a_newer_epoch_replaces_and_fences_everywhere(self, replicas: list[Replica]) -> None:
        here, there = replicas
        old = (await here.register(row(epoch=5))).leases[0].lease_id
        await there.register(row(epoch=6, port=2))
        assert isinstance(await failure(here.register(row(epoch=5))), StaleEpoch)
        await until(lambda: here.known() == {row(epoch=6, port=2)})
        call = here.stub.KeepAlive()
        await call.write(pb.KeepAliveRequest(lease_ids=[old]))
        answer = await call.read()
        assert isinstance(answer, pb.KeepAliveResponse) and list(answer.unknown_lease_ids) == [old]
        call.cancel()
        newest = rank_ref_to_pb(row(epoch=6).ref)
        assert (await here.stub.Deregister(pb.DeregisterRequest(ranks=[newest]))).removed == 1
        error = await failure(there.register(row(epoch=5)))
        assert isinstance(error, StaleEpoch) and error.metadata["currentEpoch"] == "6"

    async def test_ranks_that_both_remove_at_once_are_gone_and_counted_once(self, replicas: list[Replica]) -> None:
        here, there = replicas
        layout = Layout(tp=6)
        for tp in range(6):
            await here.register(row(tp=tp, layout=layout))
        await until(lambda: all(len(replica.known()) == 6 for replica in replicas))
        refs = [rank_ref_to_pb(row(tp=tp).ref) for tp in range(6)]
        answers = await asyncio.gather(
            here.stub.Deregister(pb.DeregisterRequest(ranks=[*refs[:4], refs[0]]), timeout=20),
            there.stub.Deregister(pb.DeregisterRequest(ranks=refs[2:]), timeout=20),
        )
        assert sum(answer.removed for answer in answers) == 6
        await until(lambda: not any(replica.known() for replica in replicas))

    async def test_ranks_of_one_engine_that_register_everywhere_at_once_have_one_shape(
        self, replicas: list[Replica]
    ) -> None:
        """Two shapes of one engine are offered at the same moment, again and again: never are both there."""
        for attempt in range(12):
            name = f"E{attempt}"
            narrow = [row(name, tp=tp, layout=TP2, epoch=7) for tp in range(2)]
            wide = [row(name, tp=tp, layout=Layout(tp=3), epoch=7) for tp in range(3)]
            offers = [(narrow, 0), (wide, 1)] if attempt % 2 else [(wide, 0), (narrow, 1)]
            calls = [replicas[at].register(given) for rows, at in offers for given in rows]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert any(isinstance(result, pb.RegisterResponse) for result in results)
            shapes = {at.layout for at in replicas[0].known() if at.ref.rank.engine == name}
            assert len(shapes) == 1
        await until(lambda: replicas[0].known() == replicas[1].known())

    async def test_another_shape_waits_for_older_ranks_and_conflicts_with_newer(self, replicas: list[Replica]) -> None:
        here, there = replicas
        await here.register(row(tp=1, epoch=5, layout=TP2))
        await until(lambda: bool(there.known()))
        older = await failure(there.register(row(epoch=6, layout=Layout(tp=4))))
        assert isinstance(older, OldShapeStillLeased | RegistrationShapeConflict) and older.code == "UNAVAILABLE"
        newer = await failure(there.register(row(epoch=4, layout=Layout(tp=4))))
        assert isinstance(newer, RegistrationShapeConflict) and newer.code == "ALREADY_EXISTS"

    async def test_a_request_that_replaces_every_rank_brings_a_new_shape(self, replicas: list[Replica]) -> None:
        here, there = replicas
        await here.register(*ranks(Layout(dp=50, tp=2), epoch=5))
        await until(lambda: len(there.known()) == 100)
        decode = ranks(Layout(dp=50, tp=2), epoch=6, role=Role.DECODE)
        await there.register(*decode)
        await until(lambda: here.known() == set(decode))

    async def test_many_rows_are_taken_or_none(self, replicas: list[Replica]) -> None:
        """More rows than one transaction takes, and the last of them is stale."""
        here, there = replicas
        layout = Layout(tp=120)
        await here.register(row(tp=119, epoch=9, layout=layout))
        await until(lambda: bool(there.known()))
        rows = [row(tp=tp, epoch=5, layout=layout) for tp in range(120)]
        there.store._acceptance = _Lenient(there.store._acceptance)  # type: ignore[assignment]  # only etcd refuses
        there.store._view.fences.clear()
        await failure(there.register(*rows))
        await until(lambda: not any(at.ref.epoch == 5 for at in here.known() | there.known()))

    async def test_watchers_follow_what_registers_elsewhere(self, replicas: list[Replica]) -> None:
        call = replicas[1].stub.WatchEngines(pb.WatchEnginesRequest())
        state = await call.read()
        assert isinstance(state, pb.WatchEnginesResponse) and state.state_complete
        await replicas[0].register(row())
        change = await call.read()
        assert isinstance(change, pb.WatchEnginesResponse) and change.changes[0].engine.name == "P"
        call.cancel()

    async def test_what_is_left_of_ranks_that_are_gone_is_forgotten_in_the_end(self, replicas: list[Replica]) -> None:
        here, there = replicas
        await here.register(row(epoch=6), row("Q"))
        gone = rank_ref_to_pb(row(epoch=6).ref)
        await here.stub.Deregister(pb.DeregisterRequest(ranks=[gone]))
        keeper = Housekeeping(here.store._client, here.store._keys, here.store._view, forget_seconds=60.0)
        assert await keeper.look(lambda: 0.0) == 0
        assert await keeper.look(lambda: 59.0) == 0
        assert await keeper.look(lambda: 60.0) == 2  # its fence and the engine's shape; Q's stay
        await until(lambda: list(there.store._view.fences) == [row("Q").ref.rank])
        await there.register(row(epoch=1))


class TestFaults:
    @pytest.mark.slow
    async def test_a_registration_moves_to_another_replica_and_is_never_gone(self, replicas: list[Replica]) -> None:
        """The whole way: the replica that took it is killed, and its keepalive goes on elsewhere."""
        here, there = replicas
        registration = Registration(dial, f"{here.address},{there.address}", [row()])
        await registration.start(10.0)
        await until(lambda: there.known() == {row()})
        await here.stop()
        end = asyncio.get_running_loop().time() + 2 * TTL
        while asyncio.get_running_loop().time() < end:
            assert there.known() == {row()}
            await asyncio.sleep(0.05)
        assert (registration.state, registration.address) == ("registered", there.address)
        await registration.close()

    @pytest.mark.slow
    @pytest.mark.timeout(240)
    async def test_etcd_killed_and_restarted_under_load_loses_nothing(self) -> None:
        """A restarted etcd gives each lease its whole time again: a rank that comes later than that, on whatever
        machine, has lost its row rightly. So the time is long, and nothing is judged by how soon ranks come."""
        ttl = 20.0
        with running_etcd() as etcd:
            replicas = [await Replica(etcd, "/load/", ttl).start() for _ in range(2)]
            expected = {row(tp=tp, layout=Layout(tp=60)) for tp in range(60)}
            registrations = [
                Registration(dial, replicas[number % 2].address, [each]) for number, each in enumerate(expected)
            ]
            await asyncio.gather(*(registration.start(20.0) for registration in registrations))
            await until(lambda: all(replica.known() == expected for replica in replicas))
            fewest = [rows_from_now_on(replica) for replica in replicas]
            leases = {lease for registration in registrations for lease in registration._leases}
            etcd.kill()
            await asyncio.sleep(ttl + 1.0)  # longer than the leases live
            assert all(replica.known() == expected for replica in replicas)
            assert all(replica.store.warming_up_for > 0 for replica in replicas)
            with pytest.raises(StoreUnavailable):
                await replicas[0].store.register([row("Q")])
            await until(lambda: all(registration.state == "retrying" for registration in registrations))
            await asyncio.to_thread(etcd.start)  # ranks do not wait for it
            await until(lambda: all(registration.state == "registered" for registration in registrations))
            # The leases of before, which etcd has renewed.
            assert {lease for registration in registrations for lease in registration._leases} == leases
            for replica in replicas:
                assert await replica.store.keep_alive(list(leases)) == []
                assert replica.known() == expected
            assert fewest == [[60], [60]]
            await asyncio.gather(*(registration.close() for registration in registrations))
            await until(lambda: not replicas[0].known() and not replicas[1].known())
            for replica in replicas:
                await replica.stop()

    async def test_an_etcd_that_lost_its_data_is_filled_again_by_the_ranks(self) -> None:
        with running_etcd() as etcd:
            replica = await Replica(etcd, "/lost/").start()
            registration = Registration(dial, replica.address, [row()])
            await registration.start(10.0)
            etcd.kill()
            etcd.lose_everything()
            etcd.start()
            await until(lambda: replica.store.warming_up_for == 0 and replica.known() == {row()}, seconds=30)
            fresh = await Replica(etcd, "/lost/").start()
            await until(lambda: fresh.known() == {row()}, seconds=30)
            await registration.close()
            await replica.stop()
            await fresh.stop()

    async def test_an_etcd_that_hangs_is_noticed_and_its_rows_stand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(view, "IDLE_TIMEOUT_SECONDS", 1.0)
        monkeypatch.setattr(view, "PROGRESS_SECONDS", 0.2)
        with running_etcd() as etcd:
            replica = await Replica(etcd, "/hangs/", ttl=30.0).start()
            await replica.register(row())
            etcd.pause()
            await until(lambda: replica.store.warming_up_for > 0)
            assert replica.known() == {row()}
            absent = await failure(replica.stub.GetEngine(pb.GetEngineRequest(engine="Q")))
            assert isinstance(absent, WarmingUp)
            etcd.go_on()
            await until(lambda: replica.store.warming_up_for == 0)
            await replica.stop()

    async def test_a_history_that_etcd_compacted_is_read_again(self, replicas: list[Replica]) -> None:
        here, there = replicas
        client, view_there = there.store._client, there.store._view
        await here.register(row("Q"))
        await until(lambda: bool(there.known()))
        view_there.revision, seen = 1, view_there.revision  # as after a long time away
        compact: Any = here.store._client.channel.unary_unary("/etcdserverpb.KV/Compact")
        await compact(b"\x08" + bytes([seen]) if seen < 128 else b"\x08" + bytes([seen & 127 | 128, seen >> 7]))
        client._leave(client.channel)
        await until(lambda: view_there.revision > 1 and there.store.warming_up_for == 0)
        assert there.known() == {row("Q")}
        await here.register(row())
        await until(lambda: row() in there.known())

    async def test_a_member_that_is_left_between_two_answers_of_a_watch_is_followed_again(
        self, replicas: list[Replica]
    ) -> None:
        """A call that failed closes the channel, and with it the watch, at which nobody looks in that moment."""
        here, there = replicas
        client, tell = there.store._client, there.store._view._on_change

        def leave() -> None:
            there.store._view._on_change = tell
            with contextlib.suppress(StoreUnavailable), client.errors(client.channel):
                raise asyncio.TimeoutError
            tell()

        there.store._view._on_change = leave
        await here.register(row())
        await until(lambda: there.store._view._on_change is tell)
        await here.register(row("Q"))
        await until(lambda: there.known() == {row(), row("Q")} and there.store.warming_up_for == 0)
        assert there.store.healthy

    async def test_a_call_that_fails_late_leaves_no_channel_that_was_opened_after_its_own(self, etcd: Etcd) -> None:
        client = EtcdClient([etcd.address])
        old, opened = client.channel, []
        for _ in range(2):
            with contextlib.suppress(StoreUnavailable), client.errors(old):
                raise asyncio.TimeoutError
            opened.append(client.channel)
        assert opened[0] is opened[1] and opened[0] is not old
        await client.close()

    async def test_a_store_that_closes_as_its_member_is_left_stops_following(self, etcd: Etcd) -> None:
        store = EtcdStore([etcd.address], prefix="/closes/")
        await store.start(lambda changes: None)
        await until(lambda: store.warming_up_for == 0)
        with contextlib.suppress(StoreUnavailable), store._client.errors(store._client.channel):
            raise asyncio.TimeoutError
        await asyncio.wait_for(store.close(), 10.0)
        assert all(task.done() for task in store._tasks)

    async def test_a_value_that_is_no_row_takes_nothing_else_with_it(self, replicas: list[Replica]) -> None:
        here, there = replicas
        client, keys = here.store._client, here.store._keys

        for key in (keys.rows + b"X/0/0/0/0", keys.rows + b"nonsense", keys.fences + b"X/0/0/0/0"):
            put = etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=b"\xff\xfe"))
            await client.transact(etcd_pb2.TxnRequest(success=[put]))
        await here.register(row())
        await until(lambda: there.known() == {row()})

    async def test_an_etcd_that_is_not_there_from_the_start_is_said_once_and_its_coming_too(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "kvgrpc.registry")
        with running_etcd() as etcd:
            etcd.kill()
            store = EtcdStore([etcd.address], prefix="/absent/")
            await store.start(lambda changes: None)
            await until(lambda: bool(caplog.messages))
            await asyncio.sleep(1.0)  # in which it tries again some times
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert f"etcd at {etcd.address} did not answer" in caplog.text
            etcd.start()
            await until(lambda: store.warming_up_for == 0)
            assert caplog.messages[1:] == [f"etcd answers again, at {etcd.address}"]
            await store.close()

    async def test_lines_that_were_held_back_are_summed_up_while_etcd_answers_and_while_it_does_not(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(view, "PROGRESS_SECONDS", 0.2)
        with running_etcd() as etcd:
            store = EtcdStore([etcd.address], prefix="/held-back/")
            await store.start(lambda changes: None)
            await until(lambda: store.warming_up_for == 0)
            lines = store._view._lines = RateLimited(logging.getLogger("kvgrpc.registry"), lines=1, seconds=1.0)
            for _ in range(3):
                lines.warning("answers", "it failed")
            await until(lambda: "2 more like these of answers in 1 s" in caplog.text)
            etcd.kill()
            await until(lambda: store.warming_up_for > 0)
            for _ in range(3):
                lines.warning("silence", "it failed")
            await until(lambda: "2 more like these of silence in 1 s" in caplog.text)
            await store.close()

    async def test_a_registry_that_could_not_write_its_id_tries_again(
        self, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transact = EtcdClient.transact
        failed: list[etcd_pb2.TxnRequest] = []

        async def fail_once(client: EtcdClient, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
            if not failed:
                failed.append(request)
                raise client.unavailable(client.address, "it was slow")
            return await transact(client, request)

        monkeypatch.setattr(EtcdClient, "transact", fail_once)
        store = EtcdStore([etcd.address], prefix="/nameless/")
        await store.start(lambda changes: None)
        await until(lambda: store.registry_id != "")
        await store.close()

    async def test_rows_that_were_copied_without_their_leases_stop_nobody_from_following(
        self, replicas: list[Replica], caplog: pytest.LogCaptureFixture
    ) -> None:
        """As `etcdctl make-mirror` writes them."""
        here, there = replicas
        client, found = here.store._client, await _copied_rows(here)
        await until(lambda: all(view.knows_lease(0) for view in (here.store._view, there.store._view)))
        (lease,) = (await here.register(row("A"))).leases
        assert not (await here.store.keep_alive([lease.lease_id]))
        await client.transact(etcd_pb2.TxnRequest(success=[_deleted(each) for each in found]))
        await until(lambda: not there.known())
        await here.register(row("C"))
        await until(lambda: there.known() == {row("C")})
        assert "following etcd failed" not in caplog.text

    async def test_rows_that_were_copied_without_their_leases_go_where_all_is_read_again(
        self, replicas: list[Replica]
    ) -> None:
        """They share one lease number: whoever counts them by it forgets all but one."""
        here, there = replicas
        client, found = here.store._client, await _copied_rows(here)
        await until(lambda: there.store._view.knows_lease(0))
        following = there.store._tasks[0]
        following.cancel()
        await asyncio.wait([following])
        await client.transact(etcd_pb2.TxnRequest(success=[_deleted(each) for each in found]))
        assert there.known() == {row("A"), row("B")}
        await there.store._view._load()
        assert not there.known()


def leases_that_ran_out() -> float:
    return metrics.REGISTRY.get_sample_value("kvgrpc_registry_leases_expired_total") or 0.0


def rows_from_now_on(replica: Replica) -> list[int]:
    """The least number of rows that it has known, which goes on to be counted."""
    table, tell = replica.store.table, replica.store._view._on_change
    fewest = [table.rows]

    def note() -> None:
        fewest[0] = min(fewest[0], table.rows)
        tell()

    replica.store._view._on_change = note
    return fewest


async def _copied_rows(replica: Replica) -> Sequence[etcd_pb2.KeyValue]:
    """Two ranks register, and their rows lose their leases."""
    await replica.register(row("A"))
    await replica.register(row("B"))
    _, found = await replica.store._client.read(replica.store._keys.rows)
    await replica.store._client.transact(etcd_pb2.TxnRequest(success=[_copied(each) for each in found]))
    return found


def _copied(found: etcd_pb2.KeyValue) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=found.key, value=found.value))


def _deleted(found: etcd_pb2.KeyValue) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=found.key))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kills", "longest"), [(2, 1.0), pytest.param(6, 4.0, marks=pytest.mark.slow)])
async def test_replicas_and_etcd_are_killed_under_load_and_no_rank_is_lost(kills: int, longest: float) -> None:
    """Three registry processes over one etcd; one after another is killed and comes back, and etcd with every other.

    A reader at each replica sees at every moment every rank whose registration was taken.
    """
    chance = random.Random(7)
    with running_etcd() as etcd, contextlib.ExitStack() as started:
        processes = [RegistryProcess(etcd, free_port()) for _ in range(3)]
        for process in processes:
            started.callback(process.kill)
        addresses = [process.address for process in processes]
        layout = Layout(dp=10, tp=8)
        registrations = []
        for dp in range(10):
            rows = [row(dp=dp, tp=tp, layout=layout) for tp in range(8)]
            turned = ",".join(addresses[dp % 3 :] + addresses[: dp % 3])
            registrations.append(Registration(dial, turned, rows))
        await asyncio.gather(*(registration.start(20.0) for registration in registrations))
        readers = [Follower(process.address) for process in processes]
        await until(lambda: all(len(reader.ranks) == 80 for reader in readers), 60.0)
        for number in range(kills):
            victim = chance.choice(processes)
            victim.kill()
            if number % 2 == 0:
                etcd.kill()
                await asyncio.sleep(chance.uniform(0.1, longest))  # between two faults
                await asyncio.to_thread(etcd.start)  # whoever renews lives here, and must not stand meanwhile
            await asyncio.sleep(chance.uniform(0.1, longest))  # the outage itself
            await asyncio.to_thread(victim.start)
            await asyncio.sleep(chance.uniform(0.0, longest / 2))  # between two faults
        await until(lambda: all(registration.state == "registered" for registration in registrations), 60.0)
        assert [reader.lost for reader in readers] == [set()] * 3
        await until(lambda: sum(reader.full_states for reader in readers) > 3, 60.0)
        await until(lambda: all(len(reader.ranks) == 80 for reader in readers), 60.0)
        newcomer = Follower(processes[0].address)
        await until(lambda: len(newcomer.ranks) == 80, 60.0)
        for reader in readers:
            reader.judging = False
        await asyncio.gather(*(registration.close() for registration in registrations))
        await until(lambda: all(not reader.ranks for reader in readers), 60.0)
        for reader in [*readers, newcomer]:
            await reader.close()


class RegistryProcess:
    """``kvgrpc serve registry --store etcd`` at an address that it keeps."""

    def __init__(self, etcd: Etcd, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._etcd = etcd.address
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvgrpc", "serve", "registry", "--listen", self.address]
        command += ["--lease-ttl", "30", "--store", "etcd", "--etcd", self._etcd, "--log-level", "ERROR"]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline().strip() == f"kvgrpc registry listens on {self.address}"

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


class Follower:
    """Follows the engines of one replica through its deaths, and notes ranks that it once said and no longer says."""

    def __init__(self, address: str) -> None:
        self.full_states = 0
        self.lost: set[str] = set()
        self.judging = True
        self._mirror = EngineMirror()
        self._seen: set[str] = set()
        self._channel = dial(address)
        self._task = asyncio.create_task(self._follow())

    @property
    def ranks(self) -> set[str]:
        return {str(at.ref) for engine in known_engines(self._mirror).values() for at in engine.rows}

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._channel.close()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                call = RegistryServiceStub(self._channel).WatchEngines(pb.WatchEnginesRequest(without_pools=True))
                while isinstance(message := await call.read(), pb.WatchEnginesResponse):
                    self._mirror.apply(message)
                    self.full_states += message.state_complete
                    self._judge()
            await asyncio.sleep(0.05)

    def _judge(self) -> None:
        """An absence counts unless the registry itself says that it means nothing."""
        if self._mirror.complete and not self._mirror.warming_up:
            ranks = self.ranks
            self.lost |= self._seen - ranks if self.judging else set()
            self._seen |= ranks


class _Lenient:
    """Accepts everything: what only etcd can refuse is left to it."""

    def __init__(self, real: object) -> None:
        self._real = real

    def check(self, rows: object) -> None: ...
