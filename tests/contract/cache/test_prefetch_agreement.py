"""Two ranks of a replica over real streams: they prefetch the same prefix, in whatever order, and nobody hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest, StaleEpoch, TooManyRequests, WrongRank
from kvgrpc.model import Layout, RankId, RankRef, Role
from kvgrpc.prefetch import wire
from kvgrpc.prefetch.agreement.leader import LeaderAgreement, _Stream
from kvgrpc.prefetch.agreement.member import JoinedAgreement
from kvgrpc.prefetch.model import OperationKind, OperationState, PageOutcome, Stop
from kvgrpc.prefetch.protocol.book import MAX_OPEN_PAGES
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import MAX_PAGES, Order
from kvgrpc.prefetch.protocol.votes import Decision, Stage, Vote
from kvgrpc.prefetch.storage.base import PageBuffers, PageResult, failed
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from kvgrpc.wire import layout_to_pb, rank_ref_to_pb
from tests.support.cache_serving import LIMITS, REPLICATED, SHAPE, CacheRank, ended, hashes_of, open_cache_rank, prompt
from tests.support.waiting import until, wait_until

# For a vote that never comes; where one comes, a busy machine may need longer.
QUICK, PATIENT = (replace(LIMITS, agreement_timeout=seconds) for seconds in (2.0, 20.0))


@dataclass
class Replica:
    leader: CacheRank
    other: CacheRank

    def store(self, leader_hashes: list[str], other_hashes: list[str]) -> None:
        """What each rank finds in storage under its own keys."""
        for rank, hashes in ((self.leader, leader_hashes), (self.other, other_hashes)):
            rank.fill(hashes)
            assert rank.back_up(hashes).wait(20)
            rank.evict()

    def fill(self, leader_hashes: list[str], other_hashes: list[str]) -> None:
        """What the host of each has."""
        self.leader.fill(leader_hashes)
        if other_hashes:
            self.other.fill(other_hashes)

    def client_backup(self, pages: int) -> pb.CacheOperation:
        """Of ``prompt(pages)``, by a remote client; in its last state."""
        with SyncClient(self.leader.address) as client:
            return ended(client, client.start_backup(pb.PromptPages(tokens=prompt(pages))))

    def prefetch(self, rank: CacheRank, name: str, hashes: list[str]) -> Operation:
        """As the rank's own scheduler begins it, under a name that all ranks use."""
        return rank.manager.controller.prefetch(hashes, operation_id=name)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    yield from opened(tmp_path)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Replica]:
    """One that does not wait long for votes."""
    yield from opened(tmp_path, limits=QUICK)


def opened(folder: Path, **changes: Any) -> Iterator[Replica]:
    settings = {"layout": Layout(tp=2), "limits": PATIENT, **changes}
    leader = open_cache_rank(folder, tp=0, **settings)
    other = open_cache_rank(folder, tp=1, leader=leader.address, **settings)
    wait_until(lambda: leader.manager.agreeing_ranks() == 2 and other.manager.agreeing_ranks() == 2)
    yield Replica(leader, other)
    other.close()
    leader.close()


def nothing_is_locked(replica: Replica) -> None:
    for rank in (replica.leader, replica.other):
        wait_until(lambda rank=rank: not rank.manager.controller.book.open())  # type: ignore[misc]
        counts = rank.manager.host.table.counts()
        assert (counts["reserved"], counts["read"]) == (0, 0)


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

    def test_a_rank_whose_scheduler_never_comes_to_it_declines_it_for_all(self, quick: Replica) -> None:
        hashes = hashes_of(prompt(6))
        quick.store(hashes, hashes)
        for rank in (quick.leader, quick.other):
            alone = quick.prefetch(rank, f"only {rank.rank.ref.rank.tp}", hashes)
            assert ends(alone) == [("DECLINED", 0)] and alone.stop is Stop.RANK_ABSENT
            assert rank.manager.host.table.counts()["reserved"] == 0

    def test_a_rank_that_leaves_declines_what_waits_for_it_at_once(self, replica: Replica) -> None:
        hashes = hashes_of(prompt(6))
        replica.store(hashes, hashes)
        manager = replica.leader.manager
        waiting = replica.prefetch(replica.leader, "one", hashes)
        wait_until(lambda: waiting.state is OperationState.AGREEING)
        replica.other.close()
        assert waiting.wait(PATIENT.agreement_timeout - 5.0), "it waited for the whole time of the agreement"
        assert waiting.stop is Stop.RANK_ABSENT
        wait_until(lambda: manager.agreeing_ranks() == 1)
        after = replica.prefetch(replica.leader, "two", hashes)
        assert after.wait(PATIENT.agreement_timeout - 5.0) and after.stop is Stop.RANK_ABSENT

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
        wait_until(lambda: not replica.other.manager.controller.book.open())
        for rank in (replica.leader, replica.other):
            counts = rank.manager.host.table.counts()
            assert counts["reserved"] == 0 and rank.manager.controller.occupied == 0


SHAPES = (SHAPE, REPLICATED), ("each has its own pages", "all have the same pages")


@pytest.fixture(params=SHAPES[0], ids=SHAPES[1])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replica]:
    """A replica for backups, of either kind of model."""
    yield from opened(tmp_path, shape=request.param)


@pytest.fixture(params=SHAPES[0], ids=SHAPES[1])
def quick_full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replica]:
    """One that does not wait long for pages that others were to write."""
    yield from opened(tmp_path, shape=request.param, limits=QUICK)


class TestBackup:
    """Over gRPC at one rank: what it says is in storage is there for every rank."""

    def test_what_all_ranks_backed_up_comes_back_at_all_of_them(self, full: Replica) -> None:
        hashes = hashes_of(prompt(24))
        full.fill(hashes, hashes)
        backup = full.client_backup(24)
        assert (backup.state, backup.completed_pages) == (pb.OPERATION_STATE_DONE, 24)
        there = full.other.manager.controller.book.get(backup.operation_id)
        assert ends(there) == [("DONE", 24)]
        wrote = [
            list(rank.manager.controller.book.get(backup.operation_id).outcomes).count(PageOutcome.OK)
            for rank in (full.leader, full.other)
        ]
        replicated = full.leader.manager.namespace.replicated
        assert sum(wrote) == (24 if replicated else 48) and min(wrote) > 0
        for rank in (full.leader, full.other):
            assert rank.evict() == 24
        with SyncClient(full.leader.address) as client:
            prefetch = ended(client, client.start_prefetch(pb.PromptPages(tokens=prompt(24))))
        assert (prefetch.state, prefetch.completed_pages) == (pb.OPERATION_STATE_DONE, 24)
        ends(full.other.manager.controller.book.get(prefetch.operation_id))
        for rank in (full.leader, full.other):
            rank.assert_bytes(hashes)

    def test_as_many_pages_are_written_as_the_host_of_each_has(self, full: Replica) -> None:
        hashes = hashes_of(prompt(9))
        full.fill(hashes, hashes[:5])
        backup = full.client_backup(9)
        assert (backup.state, backup.hit_pages, backup.agreed_pages, backup.completed_pages) == (
            pb.OPERATION_STATE_DONE,
            9,
            5,
            5,
        )
        nothing_is_locked(full)

    def test_a_rank_that_has_none_of_them_declines_it_for_all(self, full: Replica) -> None:
        hashes = hashes_of(prompt(9))
        full.fill(hashes, [])
        backup = full.client_backup(9)
        assert (backup.state, backup.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_NOT_PRESENT)
        nothing_is_locked(full)

    @pytest.mark.parametrize("who", ["leader", "other"])
    def test_a_keeper_that_raises_has_none_of_them_and_ends_no_stream(
        self, full: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, who: str
    ) -> None:
        """An engine's own radix cache, at any rank: the next backup finds the ranks together."""
        hashes = hashes_of(prompt(9))
        full.fill(hashes, hashes)
        rank: CacheRank = getattr(full, who)

        def raises(hashes: Sequence[str]) -> Any:
            raise RuntimeError("a bug of the engine")

        with monkeypatch.context() as broken:
            broken.setattr(rank.manager.controller.keeper, "pages_of", raises)
            broken.setattr(rank.manager._lines, "_seconds", 600.0)
            for _ in range(7):
                backup = full.client_backup(9)
                assert (backup.state, backup.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_NOT_PRESENT)
                there = rank.manager.controller.book.get(backup.operation_id)
                assert ends(there) == [("DECLINED", 0)]
                assert there.failure is not None and "pages_of: RuntimeError: a bug" in there.failure.message
        logged = [record.getMessage() for record in caplog.records]
        assert sum("a bug of the engine" in line for line in logged) == 5, "a few of them"
        assert not any("no leader to agree with" in line for line in logged)
        assert full.client_backup(9).state == pb.OPERATION_STATE_DONE
        nothing_is_locked(full)

    def test_a_page_that_one_rank_cannot_write_is_completed_at_none(
        self, quick_full: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hashes = hashes_of(prompt(12))
        quick_full.fill(hashes, hashes)
        storage, key_of = quick_full.other.manager.storage, quick_full.other.manager.controller._key_of
        assert storage is not None
        writers = quick_full.other.manager._writes()
        mine = next(index for index, each in enumerate(hashes) if index > 2 and writers(each))
        write = storage.write

        def broken(keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
            bad = key_of(hashes[mine], "")
            left = [index for index, key in enumerate(keys) if key != bad]
            done = dict(zip(left, write([keys[i] for i in left], [pages[i] for i in left], timeout), strict=True))
            return [done.get(index, failed("injected")) for index in range(len(keys))]

        monkeypatch.setattr(storage, "write", broken)
        backup = quick_full.client_backup(12)
        if quick_full.leader.manager.namespace.replicated:
            # The leader sees that it does not come, and writes it.
            assert backup.page_outcomes[mine] == pb.PAGE_OUTCOME_OK
        assert (backup.state, backup.stop) == (pb.OPERATION_STATE_PARTIAL, pb.OPERATION_STOP_PAGE_LOST)
        assert backup.completed_pages == mine
        nothing_is_locked(quick_full)

    def test_a_rank_that_writes_for_longer_than_others_vote_is_waited_for(
        self, quick: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hashes = hashes_of(prompt(6))
        quick.fill(hashes, hashes)
        storage, gate = quick.other.manager.storage, threading.Event()
        assert storage is not None
        write = storage.write

        def slow(keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
            assert gate.wait(20)
            return write(keys, pages, timeout)

        monkeypatch.setattr(storage, "write", slow)
        first = quick.leader.start(OperationKind.BACKUP, hashes)
        wait_until(lambda: first.finishing or first.ended)
        assert not first.wait(QUICK.agreement_timeout + 0.2), "it has written, and did not wait for the other"
        gate.set()
        assert ends(first, quick.other.manager.controller.book.get(first.operation_id)) == [("DONE", 6)] * 2
        nothing_is_locked(quick)

    def test_a_rank_that_is_gone_declines_it(self, full: Replica) -> None:
        hashes = hashes_of(prompt(6))
        full.fill(hashes, hashes)
        full.other.close()
        wait_until(lambda: full.leader.manager.agreeing_ranks() == 1)
        backup = full.client_backup(6)
        assert (backup.state, backup.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_RANK_ABSENT)

    def test_a_cancel_at_the_leader_ends_it_everywhere(self, full: Replica) -> None:
        hashes = hashes_of(prompt(30))
        full.fill(hashes, hashes)
        with SyncClient(full.leader.address) as client:
            backup = client.start_backup(pb.PromptPages(tokens=prompt(30)))
            assert client.terminate_prefetch(backup.operation_id).quiescent
        wait_until(lambda: not full.other.manager.controller.book.open())
        nothing_is_locked(full)


def test_an_order_that_raises_takes_no_other_along() -> None:
    """The leader's messages are read on one stream: what one order does to this rank's engine must not end it."""
    joined = JoinedAgreement(RankRef(RankId("E", tp=1), 1), Layout(tp=2))
    begun: list[str] = []

    def begin(order: Order) -> None:
        begun.append(order.operation_id)
        raise RuntimeError("a bug")

    joined._begin = begin
    kind = pb.OPERATION_KIND_BACKUP
    joined._heard(pb.JoinAgreementResponse(starts=[pb.AgreementStart(operation_id=each, kind=kind) for each in "ab"]))
    assert begun == ["a", "b"]
    assert [(vote.key, vote.pages) for vote in joined._unsent] == [("a", 0), ("b", 0)], "the leader need not wait"
    assert joined.close(5.0)


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


async def test_votes_of_one_message_are_counted_in_many_turns_of_the_loop() -> None:
    leader = LeaderAgreement(RankRef(RankId("E"), 1), Layout(tp=2))
    vote = pb.AgreementVote(operation_id="x", stage=pb.AGREEMENT_STAGE_HITS)
    messages = iter([pb.JoinAgreementRequest(votes=[vote] * 1_000)])
    member = RankId("E", tp=1)
    stream = leader._streams[member] = _Stream(asyncio.get_running_loop(), 1.0)

    class Context:
        async def read(self) -> pb.JoinAgreementRequest | None:
            return next(messages, None)

    reading, others = asyncio.ensure_future(leader._read_all(member, stream, Context())), 0
    while not reading.done():
        others += 1
        await asyncio.sleep(0)
    assert others > 4
    assert leader.close(5.0)


async def test_what_a_rank_leaves_behind_is_told_in_many_turns_of_the_loop() -> None:
    leader = LeaderAgreement(RankRef(RankId("E"), 1), Layout(tp=3))
    leaves, stays = (RankId("E", tp=tp) for tp in (1, 2))
    leader._streams = {member: _Stream(asyncio.get_running_loop(), 60.0) for member in (leaves, stays)}
    for member in leader._streams:
        leader._core.join(member)
    for number in range(4_096):
        leader._core.vote(leaves, Vote(str(number), Stage.HITS, 7, Stop.NONE), time.monotonic(), 60.0)
    told, turns = 0, list[int]()

    async def write(message: pb.JoinAgreementResponse) -> None:
        nonlocal told
        told += len(message.decisions)
        turns.append(len(message.decisions))

    writing = asyncio.ensure_future(leader._streams[stays].write_all(write))
    leader._leave(leaves, leader._streams[leaves])
    await until(lambda: told == 4_096)
    assert max(turns) <= 512
    # And where all of it waits, because the other end reads nothing for a while.
    writing.cancel()
    stream = leader._streams[stays]
    for number in range(4_096):
        decision = Decision(str(number), Stage.HITS, 0, Stop.RANK_ABSENT)
        stream.put(pb.JoinAgreementResponse(decisions=[wire.decision_to_pb(decision)]))
    assert [len(stream._next_message().decisions) for _ in range(9)] == [512] * 8 + [0]
    assert leader.close(5.0)


class _Member:
    """A rank's end of a stream whose messages it never reads."""

    def __init__(self, epoch: int) -> None:
        self.reads = 0
        self.voted = asyncio.Event()
        self._said: asyncio.Queue[pb.JoinAgreementRequest] = asyncio.Queue()
        hello = pb.AgreementHello(
            member=rank_ref_to_pb(RankRef(RankId("E", tp=1), epoch)), layout=layout_to_pb(Layout(tp=2))
        )
        hello.to.rank.engine = "E"
        self._said.put_nowait(pb.JoinAgreementRequest(hello=hello))

    def say(self, operation_ids: Iterable[str], pages: int) -> None:
        """Its last word of each."""
        stage, beat = pb.AGREEMENT_STAGE_COMPLETED, wire.beat_to_pb(time.monotonic())
        votes = [pb.AgreementVote(operation_id=each, stage=stage, pages=pages, beat=beat) for each in operation_ids]
        self._said.put_nowait(pb.JoinAgreementRequest(votes=votes))

    async def read(self) -> pb.JoinAgreementRequest:
        self.reads += 1
        message = await self._said.get()
        if message.votes:
            self.voted.set()
        return message

    async def write(self, message: pb.JoinAgreementResponse) -> None:
        await asyncio.Event().wait()


class _Slow(_Member):
    """One that reads once it ``goes_on``. ``told``: how many orders it has read."""

    def __init__(self) -> None:
        super().__init__(epoch=1)
        self.goes_on, self.told = asyncio.Event(), 0

    async def write(self, message: pb.JoinAgreementResponse) -> None:
        await self.goes_on.wait()
        self.told += len(message.starts)


@pytest.mark.parametrize("hangs", [True, False], ids=["one that hangs", "one that reads"])
async def test_a_rank_that_reads_nothing_is_kept_no_more_orders_than_there_may_be_open(hangs: bool) -> None:
    """Each of 65,536 pages takes 2 MB here: a rank that hangs and a router that goes on cost gigabytes."""
    leader, member = LeaderAgreement(RankRef(RankId("E"), 1), Layout(tp=2)), _Slow()
    serving = asyncio.ensure_future(leader.serve(member, Role.PREFILL))
    await until(lambda: member.reads == 2)
    largest, orders = Order(kind=OperationKind.PREFETCH, hashes=("ab" * 32,) * MAX_PAGES), 24
    assert orders * MAX_PAGES > MAX_OPEN_PAGES
    if not hangs:
        member.goes_on.set()
    for number in range(1, orders + 1):
        leader.tell_start(largest, 60.0)
        if not hangs:
            await until(lambda number=number: member.told == number)  # type: ignore[misc]
    if hangs:
        member.goes_on.set()
        with pytest.raises(TooManyRequests, match="too slow") as slow:  # it is to come anew
            await asyncio.wait_for(serving, 10.0)
        assert slow.value.metadata["limit"] == str(MAX_OPEN_PAGES)
        assert MAX_OPEN_PAGES < int(slow.value.metadata["value"]) <= MAX_OPEN_PAGES + MAX_PAGES
    assert serving.done() is hangs
    serving.cancel()
    assert leader.close(5.0)


async def test_a_stream_that_is_ended_while_something_is_put_on_it_has_ended() -> None:
    """It would have been told beats for as long as its connection stood."""
    stream = _Stream(asyncio.get_running_loop(), 60.0)
    ending = threading.Thread(target=stream.end)

    class Message:
        @property
        def starts(self) -> Sequence[pb.AgreementStart]:
            ending.start()
            ending.join(0.2)  # as long as the loop's thread has the interpreter, where nothing holds it up
            return ()

    message: Any = Message()
    stream.put(message)
    ending.join()
    with pytest.raises(TooManyRequests):
        stream.check()


async def test_votes_of_a_former_self_decide_nothing_once_its_successor_joined() -> None:
    leader = LeaderAgreement(RankRef(RankId("E"), 1), Layout(tp=2))
    former, successor = _Member(epoch=1), _Member(epoch=2)
    former.say(map(str, range(4_096)), pages=3)
    old = asyncio.ensure_future(leader.serve(former, Role.PREFILL))
    await former.voted.wait()
    new = asyncio.ensure_future(leader.serve(successor, Role.PREFILL))
    await until(lambda: successor.reads == 2 and (old.done() or former.reads == 3))

    decided: list[Decision] = []
    leader.vote(Vote("4095", Stage.COMPLETED, 3, Stop.NONE), 30.0, decided.append)
    assert decided == [], "the successor has not said anything of it"
    successor.say(["4095"], pages=2)
    await until(lambda: decided)
    assert [(each.pages, each.stop) for each in decided] == [(2, Stop.NONE)]
    with pytest.raises(TooManyRequests, match="a newer one took its place"):
        await old
    new.cancel()
    assert leader.close(5.0)
