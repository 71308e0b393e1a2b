"""Two ranks of a replica over real streams: they prefetch the same prefix, in whatever order, and nobody hangs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest, StaleEpoch, WrongRank
from kvgrpc.model import Layout
from kvgrpc.prefetch.controller.operation import Operation
from kvgrpc.prefetch.model import OperationState, Stop
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from tests.contract.cache_serving import LIMITS, CacheRank, hashes_of, open_cache_rank, prompt, until

QUICK = replace(LIMITS, agreement_timeout=2.0)


@dataclass
class Replica:
    leader: CacheRank
    other: CacheRank

    def store(self, leader_hashes: list[str], other_hashes: list[str]) -> None:
        """What each rank finds in storage under its own keys."""
        for rank, hashes in ((self.leader, leader_hashes), (self.other, other_hashes)):
            rank.fill(hashes)
            controller = rank.manager.controller
            operation = controller.backup_operation(hashes, "", 0, "", None)
            controller.start_backup(operation, rank.manager.known_cache().pages_of(hashes))
            assert operation.wait(20)
            rank.evict()

    def prefetch(self, rank: CacheRank, name: str, hashes: list[str]) -> Operation:
        """As the rank's own scheduler begins it, under a name that all ranks use."""
        return rank.manager.controller.prefetch(hashes, operation_id=name)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    layout = Layout(tp=2)
    leader = open_cache_rank(tmp_path, layout=layout, tp=0, limits=QUICK)
    other = open_cache_rank(tmp_path, layout=layout, tp=1, limits=QUICK, leader=leader.address)
    until(lambda: other.manager.joined is not None and other.manager.joined.connected)
    yield Replica(leader, other)
    other.close()
    leader.close()


def ends(*operations: Operation) -> list[tuple[str, int]]:
    for operation in operations:
        assert operation.wait(20), operation.state
    return [(operation.state.name, operation.completed) for operation in operations]


class TestAgreement:
    def test_all_ranks_bring_the_prefix_that_every_one_finds(self, replica: Replica) -> None:
        hashes = hashes_of(prompt(12))
        replica.store(hashes, hashes[:7])
        with SyncClient(replica.leader.address) as client:
            operation = client.start_prefetch(pb.PromptPages(tokens=prompt(12)))
            for message in client.watch_operations([operation.operation_id]):
                for each in message.operations:
                    operation = each
        assert (operation.agreed_pages, operation.completed_pages) == (7, 7)
        there = replica.other.manager.controller.book.get(operation.operation_id)
        assert ends(there) == [("DONE", 7)]
        replica.leader.assert_bytes(hashes[:7])
        replica.other.assert_bytes(hashes[:7])

    def test_opposite_orders_on_two_ranks_agree_all_the_same(self, replica: Replica) -> None:
        one, two = hashes_of(prompt(6, first=1)), hashes_of(prompt(8, first=2))
        replica.store(one, one)
        replica.store(two, two)
        a1 = replica.prefetch(replica.leader, "one", one)
        b2 = replica.prefetch(replica.other, "two", two)
        a2 = replica.prefetch(replica.leader, "two", two)
        b1 = replica.prefetch(replica.other, "one", one)
        assert ends(a1, b1, a2, b2) == [("DONE", 6), ("DONE", 6), ("DONE", 8), ("DONE", 8)]

    def test_a_rank_whose_scheduler_never_comes_to_it_declines_it_for_all(self, replica: Replica) -> None:
        hashes = hashes_of(prompt(6))
        replica.store(hashes, hashes)
        for rank in (replica.leader, replica.other):
            alone = replica.prefetch(rank, f"only {rank.rank.ref.rank.tp}", hashes)
            assert ends(alone) == [("DECLINED", 0)] and alone.stop is Stop.RANK_ABSENT
            assert rank.manager.host.table.counts()["reserved"] == 0

    def test_a_rank_that_leaves_declines_what_waits_for_it_at_once(self, replica: Replica) -> None:
        hashes = hashes_of(prompt(6))
        replica.store(hashes, hashes)
        manager = replica.leader.manager
        waiting = replica.prefetch(replica.leader, "one", hashes)
        until(lambda: waiting.state is OperationState.AGREEING)
        replica.other.close()
        assert waiting.wait(1.5), "it waited for the whole time of the agreement"
        assert waiting.stop is Stop.RANK_ABSENT
        until(lambda: manager.agreeing_ranks() == 1)
        after = replica.prefetch(replica.leader, "two", hashes)
        assert after.wait(0.5) and after.stop is Stop.RANK_ABSENT

    def test_a_page_that_is_lost_on_one_rank_is_used_on_none(
        self, replica: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hashes = hashes_of(prompt(10))
        replica.store(hashes, hashes)
        other = replica.other.manager.controller
        storage = other.storage
        assert storage is not None
        count = storage.count_leading

        def count_then_lose(keys: Sequence[str], timeout: float) -> int:
            found = count(keys, timeout)
            if len(keys) < LIMITS.batch_pages:  # the last batch: all of them were counted
                other.delete_from_storage(hashes[6:7], 5.0)
            return found

        monkeypatch.setattr(storage, "count_leading", count_then_lose)
        one = replica.prefetch(replica.leader, "one", hashes)
        two = replica.prefetch(replica.other, "one", hashes)
        assert [pages for _, pages in ends(one, two)] == [6, 6]
        assert two.stop is Stop.PAGE_LOST
        replica.leader.assert_bytes(hashes[: one.completed])

    def test_a_cancel_at_the_leader_ends_it_everywhere(self, replica: Replica) -> None:
        hashes = hashes_of(prompt(10))
        replica.store(hashes, hashes)
        with SyncClient(replica.leader.address) as client:
            operation = client.start_prefetch(pb.PromptPages(tokens=prompt(10)))
            ended = client.terminate_prefetch(operation.operation_id)
            assert ended.quiescent
        until(lambda: not replica.other.manager.controller.book.open())
        for rank in (replica.leader, replica.other):
            counts = rank.manager.host.table.counts()
            assert counts["reserved"] == 0 and rank.manager.controller.occupied == 0


class TestRoles:
    def test_starts_are_for_the_leading_rank(self, replica: Replica) -> None:
        with SyncClient(replica.other.address) as client, pytest.raises(WrongRank) as refused:
            client.start_prefetch(pb.PromptPages(tokens=prompt(4)))
        assert refused.value.metadata["expected"] == "E/dp0/pp0/cp0/tp0"
        assert refused.value.metadata["address"] == replica.leader.address

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"tp": 2}, WrongRank),
            ({"tp": 0}, WrongRank),
            ({"epoch": 5}, StaleEpoch),
            ({"layout": 3}, InvalidRequest),
            ({"hello": False}, InvalidRequest),
        ],
    )
    def test_a_rank_that_is_none_of_the_replica_is_refused(
        self, replica: Replica, change: dict[str, int], error: type[Exception]
    ) -> None:
        request = pb.JoinAgreementRequest()
        if change.get("hello", True):
            speaker = request.hello.member
            speaker.rank.engine, speaker.rank.tp, speaker.epoch = "E", change.get("tp", 1), 7
            request.hello.to.epoch = change.get("epoch", 0)
            layout = request.hello.layout
            layout.dp = layout.pp = layout.cp = 1
            layout.tp = change.get("layout", 2)
        with grpc.insecure_channel(replica.leader.address) as channel:
            call = PrefetchServiceStub(channel).JoinAgreement(iter([request]), timeout=10)
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
        assert isinstance(error_from(refused.value), error)
