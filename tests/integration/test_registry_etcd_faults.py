"""Registries over etcd, and etcd itself, go away, hang and come back: they lose nothing that its owner still holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from kvgrpc.errors import (
    StoreUnavailable,
    WarmingUp,
)
from kvgrpc.model import Layout
from kvgrpc.observability.logging import RateLimited
from kvgrpc.registry import wire
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.store.etcd import EtcdStore, view
from kvgrpc.registry.store.etcd.client import EtcdClient
from kvgrpc.registry.store.etcd.v1 import etcd_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.etcd import ETCD, Etcd, running_etcd
from tests.support.etcd_replicas import TTL, Replica
from tests.support.registry_builders import row
from tests.support.registry_serving import dial, failure
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")


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
        client, view_there = there.client, there.store._view
        await here.register(row("Q"))
        await until(lambda: bool(there.known()))
        view_there.revision, seen = 1, view_there.revision  # as after a long time away
        compact: Any = here.client.channel.unary_unary("/etcdserverpb.KV/Compact")
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
        client, tell = there.client, there.store._view._on_change

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
        client, keys = here.client, here.keys

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
        client, found = here.client, await _copied_rows(here)
        await until(lambda: all(view.knows_lease(0) for view in (here.store._view, there.store._view)))
        (lease,) = (await here.register(row("A"))).leases
        assert not (await here.store.keep_alive([lease.lease_id]))
        await client.transact(etcd_pb2.TxnRequest(success=[_deleted(each) for each in found]))
        await until(lambda: not there.known())
        await here.register(row("C"))
        await until(lambda: there.known() == {row("C")})
        assert "following etcd failed" not in caplog.text

    async def test_a_row_that_was_copied_with_its_lease_leaves_it_to_the_first_when_it_goes(
        self, replicas: list[Replica]
    ) -> None:
        """As `etcdctl put --lease` writes it: two rows of one number. With the copy the lease was unknown."""
        here = replicas[0]
        client, keys = here.client, here.keys
        (lease,) = (await here.register(row("A"))).leases
        _, (found,) = await client.read(keys.rows)
        stored = etcd_pb2.StoredRow.FromString(found.value)
        stored.row = wire.row_to_bytes(row("B"), None)
        put = etcd_pb2.PutRequest(key=keys.row(row("B").ref.rank), value=stored.SerializeToString(), lease=found.lease)
        await client.transact(etcd_pb2.TxnRequest(success=[etcd_pb2.RequestOp(request_put=put)]))
        await until(lambda: all(replica.known() == {row("A"), row("B")} for replica in replicas))
        await client.transact(etcd_pb2.TxnRequest(success=[_deleted(etcd_pb2.KeyValue(key=put.key))]))
        await until(lambda: all(replica.known() == {row("A")} for replica in replicas))
        for replica in replicas:
            assert not await replica.store.keep_alive([lease.lease_id])
        await client.transact(etcd_pb2.TxnRequest(success=[_deleted(found)]))
        await until(lambda: not any(replica.known() for replica in replicas))
        for replica in replicas:
            assert await replica.store.keep_alive([lease.lease_id]) == [lease.lease_id]

    async def test_rows_that_were_copied_without_their_leases_go_where_all_is_read_again(
        self, replicas: list[Replica]
    ) -> None:
        """They share one lease number: whoever counts them by it forgets all but one."""
        here, there = replicas
        client, found = here.client, await _copied_rows(here)
        await until(lambda: there.store._view.knows_lease(0))
        following = there.store._tasks[0]
        following.cancel()
        await asyncio.wait([following])
        await client.transact(etcd_pb2.TxnRequest(success=[_deleted(each) for each in found]))
        assert there.known() == {row("A"), row("B")}
        await there.store._view._load()
        assert not there.known()


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
    _, found = await replica.client.read(replica.keys.rows)
    await replica.client.transact(etcd_pb2.TxnRequest(success=[_copied(each) for each in found]))
    return found


def _copied(found: etcd_pb2.KeyValue) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=found.key, value=found.value))


def _deleted(found: etcd_pb2.KeyValue) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=found.key))
