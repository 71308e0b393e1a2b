"""Several registries over one real etcd are one registry."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from kvgrpc.errors import (
    OldShapeStillLeased,
    RegistrationShapeConflict,
    StaleEpoch,
    TooManyRequests,
)
from kvgrpc.model import Layout, Role
from kvgrpc.observability import metrics
from kvgrpc.registry.model import BEFORE_ALL, Absence, RankRow
from kvgrpc.registry.store.etcd.housekeeping import Housekeeping
from kvgrpc.registry.store.etcd.keys import etcd_lease
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.wire import rank_ref_to_pb
from tests.support.etcd import ETCD, Etcd
from tests.support.etcd_replicas import TTL, Replica
from tests.support.registry_builders import pool, ranks, row
from tests.support.registry_serving import TP2, failure, request_of
from tests.support.secrets import bearer, tokens_of
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")


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
        await replicas[0].client.revoke(etcd_lease(lease.lease_id))
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
        await replicas[0].client.revoke(etcd_lease(leases[2]))
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

    async def test_a_rank_that_comes_back_with_another_pool_takes_no_other_out(self, replicas: list[Replica]) -> None:
        """Another stage has no layer of it: that one was gone until it registered anew, and its engine not READY."""
        here, there = replicas

        def stage(tp: int, epoch: int, axes: str = "") -> RankRow:
            kv = replace(pool(), axes=axes, regions=() if tp else pool().regions)
            return row(tp=tp, epoch=epoch, layout=TP2, pools=(kv, pool("swa")))

        await here.register(stage(0, 5), stage(1, 5))
        await until(lambda: len(there.known()) == 2)
        await there.register(stage(0, 6, "head,token,dim"))
        assert {known.ref for known in there.known()} == {stage(0, 6).ref, stage(1, 5).ref}

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
        keeper = Housekeeping(here.client, here.keys, here.store._view, forget_seconds=60.0)
        assert await keeper.look(lambda: 0.0) == 0
        assert await keeper.look(lambda: 59.0) == 0
        assert await keeper.look(lambda: 60.0) == 2  # its fence and the engine's shape; Q's stay
        await until(lambda: list(there.store._view.fences) == [row("Q").ref.rank])
        await there.register(row(epoch=1))


def leases_that_ran_out() -> float:
    return metrics.REGISTRY.get_sample_value("kvgrpc_registry_leases_expired_total") or 0.0


class _Lenient:
    """Accepts everything: what only etcd can refuse is left to it."""

    def __init__(self, real: object) -> None:
        self._real = real

    def check(self, rows: object) -> None: ...
