"""Callers of the cache and of the index that ask too much: others are served, and nothing stays of them."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import IdentityMismatch, InvalidRequest, KvGrpcError, PermissionDenied, TooManyRequests, WrongRank
from kvgrpc.events.following import index_servicer
from kvgrpc.model import Layout, RankId
from kvgrpc.prefetch import servicer as servicer_module
from kvgrpc.prefetch.agreement.leader import LeaderAgreement
from kvgrpc.prefetch.model import OperationKind, OperationState, PageOutcome, PrefetchLimits
from kvgrpc.prefetch.protocol.book import MAX_OPEN_PAGES, MAX_REMEMBERED_PAGES, OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import Stage
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.rpc.interceptors import ALLOWED, CallLimits
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.server import IndexServer
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import index_service_pb2 as index_pb
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from tests.support.cache_serving import LIMITS, CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.faults.storage import FaultyBackend
from tests.support.hostile.http2 import DATA, Connection
from tests.support.scoring import question
from tests.support.secrets import bearer, proof, tokens_of
from tests.support.waiting import wait_until

TOKENS = (
    "operator alice:a\noperator bob:b\nrank E:own\nrank other-*:other\nrank E role=decode:wrong-side\nconsumer c:c\n"
)
SECURITY = ServerSecurity(tokens=tokens_of(TOKENS))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyBackend]:
    backend = FaultyBackend(open_backend("file", {"path": str(tmp_path)}))
    yield backend
    assert backend.close(5.0)


def opened(tmp_path: Path, storage: FaultyBackend, layout: Layout) -> CacheRank:
    return open_cache_rank(
        tmp_path,
        storage,
        limits=replace(LIMITS, operations=8, storage_timeout=20.0),
        layout=layout,
        server_security=SECURITY,
        call_limits=CallLimits(watches_per_caller=2),
    )


@pytest.fixture
def cache(tmp_path: Path, storage: FaultyBackend) -> Iterator[CacheRank]:
    """Of a replica of two, the other of which is not there."""
    rank = opened(tmp_path, storage, Layout(tp=2))
    yield rank
    rank.close()


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def client_of(cache: CacheRank, name: str) -> SyncClient:
    return SyncClient(cache.address, security=proof(name))


def refusal(call: Any) -> KvGrpcError:
    """Of a bare stub's call."""
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    return error_from(refused.value)


def stub_of(channel: grpc.Channel, cache: CacheRank, name: str) -> Any:
    headers = (("authorization", bearer(name, cache.address)),)
    stub: Any = PrefetchServiceStub(channel)

    class WithToken:
        def __getattr__(self, name: str) -> Any:
            return lambda request, **options: getattr(stub, name)(request, metadata=headers, timeout=20, **options)

    return WithToken()


@contextlib.contextmanager
def hanging(storage: FaultyBackend) -> Iterator[threading.Event]:
    """Nothing that it is asked comes back, until the event that this gives is set, or the end."""
    release, count = threading.Event(), storage.count_leading

    def count_leading(keys: Any, timeout: float) -> int:
        release.wait(20)
        return count(keys, timeout)

    storage.count_leading = count_leading  # type: ignore[method-assign]
    try:
        yield release
    finally:
        release.set()


class TestWhatIsKept:
    @pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
    def test_names_of_megabytes_are_refused_before_anything_is_kept(self, cache: CacheRank, field: str) -> None:
        pages: Any = pb.PromptPages(tokens=prompt(2))
        setattr(pages, field, "x" * (1 << 20))
        with client_of(cache, "a") as client:
            for call in (client.lookup, client.start_prefetch, client.start_backup):
                with pytest.raises(InvalidRequest) as refused:
                    call(pages)
                assert refused.value.metadata["field"] == f"pages.{field}"
        assert not cache.manager.controller.book.all()

    def test_the_pages_of_what_ended_are_bounded_not_only_its_number(self) -> None:
        book = OperationBook(PrefetchLimits(), contextlib.nullcontext(), lambda: 0.0)
        controller_pages = ["0" * 64] * 65_536
        kept: list[str] = []
        for _ in range(20):
            operation = book.add(Operation(Order(kind=OperationKind.PREFETCH, hashes=tuple(controller_pages))))
            book.end(operation, OperationState.DECLINED)
            kept.append(operation.operation_id)
        assert sum(len(each.hashes) for each in book.all()) <= MAX_REMEMBERED_PAGES
        assert [each.operation_id for each in book.all()] == kept[-16:]
        for _ in range(16):
            book.add(Operation(Order(kind=OperationKind.PREFETCH, hashes=tuple(controller_pages))))
        with pytest.raises(TooManyRequests) as refused:
            book.add(Operation(Order(kind=OperationKind.PREFETCH, hashes=("0" * 64,))))
        assert refused.value.metadata["limit"] == str(MAX_OPEN_PAGES)
        for operation in book.open():
            book.end(operation, OperationState.DECLINED)
        book.forget_ended()
        assert (book._open_pages, book._remembered_pages) == (0, 0)

    def test_what_a_watch_is_told_fits_a_message_of_any_client(self, cache: CacheRank) -> None:
        """Sixteen operations of 65,536 pages each, and what became of every page."""
        book = cache.manager.controller.book
        for _ in range(16):
            operation = book.add(Operation(Order(kind=OperationKind.PREFETCH, hashes=("0" * 64,) * 65_536)))
            operation.outcomes = [PageOutcome.FAILED] * 65_536
            book.end(operation, OperationState.DECLINED)
        with grpc.insecure_channel(cache.address) as channel:
            told, sizes = 0, []
            for message in stub_of(channel, cache, "c").WatchOperations(pb.WatchOperationsRequest()):
                if message.complete:
                    break
                told += len(message.operations)
                sizes.append(message.ByteSize())
        assert told == 16 and max(sizes) < 2 << 20


class TestOneCallerAndTheOthers:
    def test_operations_of_one_caller_leave_place_for_the_others(self, tmp_path: Path, storage: FaultyBackend) -> None:
        """They do not end: storage hangs."""
        cache = opened(tmp_path, storage, Layout())
        with (
            hanging(storage) as release,
            client_of(cache, "a") as greedy,
            client_of(cache, "b") as other,
            grpc.insecure_channel(cache.address) as channel,
        ):
            for number in range(2):
                greedy.start_prefetch(pb.PromptPages(tokens=prompt(2, number + 1)))
            with pytest.raises(grpc.RpcError) as refused:
                request = pb.StartPrefetchRequest(pages=pb.PromptPages(tokens=prompt(2, 9)))
                stub_of(channel, cache, "a").StartPrefetch(request)
            error = error_from(refused.value)
            assert isinstance(error, TooManyRequests) and error.retry_after
            assert error.metadata["scope"] == "cache operations of one caller"
            assert other.start_prefetch(pb.PromptPages(tokens=prompt(2, 9))).operation_id
            release.set()
            wait_until(lambda: not cache.manager.controller.book.open())
            assert greedy.start_prefetch(pb.PromptPages(tokens=prompt(2, 9))).operation_id
        cache.close()

    def test_callers_together_leave_operations_to_the_engine_itself(
        self, tmp_path: Path, storage: FaultyBackend
    ) -> None:
        """Four of them had all there are, and the engine's own prefetches were refused."""
        cache = opened(tmp_path, storage, Layout())
        with hanging(storage), grpc.insecure_channel(cache.address) as channel:
            refusals = 0
            for number in range(16):
                asked = stub_of(channel, cache, ("a", "b", "c", "own")[number % 4])
                try:
                    asked.StartPrefetch(pb.StartPrefetchRequest(pages=pb.PromptPages(tokens=prompt(2, number + 1))))
                except grpc.RpcError as error:
                    refusals += 1
                    assert error_from(error).metadata["scope"].startswith("cache operations")
            assert refusals
            for number in range(4):
                own = Order(kind=OperationKind.PREFETCH, hashes=tuple(hashes_of(prompt(2, 100 + number))))
                assert not cache.manager.start(own).ended
        cache.close()

    def test_watches_of_one_caller_lock_out_neither_others_nor_who_ends_an_operation(self, cache: CacheRank) -> None:
        with grpc.insecure_channel(cache.address) as channel, client_of(cache, "b") as bob:
            consumer, alice = stub_of(channel, cache, "c"), stub_of(channel, cache, "a")
            watches = [consumer.WatchOperations(pb.WatchOperationsRequest()) for _ in range(2)]
            assert all(next(watch).complete for watch in watches)
            assert isinstance(refusal(consumer.WatchOperations(pb.WatchOperationsRequest())), TooManyRequests)
            others = alice.WatchOperations(pb.WatchOperationsRequest())
            assert next(others).complete
            operation = bob.start_prefetch(pb.PromptPages(tokens=prompt(2)))
            assert bob.terminate_prefetch(operation.operation_id).quiescent
            for watch in (*watches, others):
                watch.cancel()

    def test_a_watch_that_nobody_reads_keeps_nothing_and_holds_up_nobody(self, cache: CacheRank) -> None:
        """Its window of 64 KiB is full after the first operations; a MB is to be told in each round."""
        book = cache.manager.controller.book

        def tell_much() -> None:
            for _ in range(8):
                operation = book.add(Operation(Order(kind=OperationKind.PREFETCH, hashes=("0" * 64,) * 8_192)))
                operation.outcomes = [PageOutcome.FAILED] * 8_192
                book.end(operation, OperationState.DECLINED)

        with Connection(cache.address) as slow, grpc.insecure_channel(cache.address) as channel:
            tokens = [(b"authorization", bearer("a", cache.address).encode())]
            stream = slow.begin("/kvgrpc.v1.PrefetchService/WatchOperations", tokens)
            slow.message(stream, b"")
            wait_until(lambda: slow.of(DATA, stream))
            reader = stub_of(channel, cache, "c").WatchOperations(pb.WatchOperationsRequest())
            assert next(reader).complete
            before = 0
            for number in range(50):
                if number == 20:  # from here on the book forgets as much as it learns
                    before = _resident()
                tell_much()
                told = 0
                while told < 8:
                    told += len(next(reader).operations)
            assert _resident() - before < 4 << 20, "an unread watch keeps one message, not all of them"
            assert sum(map(len, slow.of(DATA, stream))) <= 1 << 16
            reader.cancel()

    def test_when_every_watch_is_taken_an_operation_can_still_be_ended(
        self, cache: CacheRank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(servicer_module, "MAX_WATCHES", 0)
        with client_of(cache, "b") as bob:
            operation = bob.start_prefetch(pb.PromptPages(tokens=prompt(2)))
            assert bob.terminate_prefetch(operation.operation_id).quiescent

    def test_lookups_of_one_caller_that_hang_in_storage_do_not_hold_up_the_others(
        self, cache: CacheRank, storage: FaultyBackend
    ) -> None:
        release, asked = threading.Event(), threading.Semaphore(0)
        count = storage.count_leading

        def count_leading(keys: Any, timeout: float) -> int:
            if len(keys) == 3:
                asked.release()
                release.wait(20)
            return count(keys, timeout)

        storage.count_leading = count_leading  # type: ignore[method-assign]
        with (
            grpc.insecure_channel(cache.address) as channel,
            client_of(cache, "b") as other,
            ThreadPoolExecutor(32) as threads,
        ):
            # A stub's own calls: a Client comes again after the time that a refusal names.
            request = pb.LookupRequest(pages=pb.PromptPages(tokens=prompt(3)))
            hanging = [threads.submit(stub_of(channel, cache, "c").Lookup, request) for _ in range(24)]
            assert asked.acquire(timeout=20) and asked.acquire(timeout=20)
            wait_until(lambda: sum(each.done() for each in hanging) == 8)
            assert other.lookup(pb.PromptPages(tokens=prompt(2))).asked_pages == 2
            release.set()
            outcomes = [each.exception(20) for each in hanging]
        errors = [error_from(cast(Any, each)) for each in outcomes if each is not None]
        assert [type(each) for each in errors] == [TooManyRequests] * 8


class TestAgreement:
    def hello(self, cache: CacheRank, **changes: Any) -> pb.JoinAgreementRequest:
        request = pb.JoinAgreementRequest()
        speaker = request.hello.member
        speaker.rank.engine, speaker.rank.tp, speaker.epoch = "E", 1, changes.get("epoch", 7)
        layout = request.hello.layout
        layout.dp = layout.pp = layout.cp = 1
        layout.tp = 2
        return request

    def test_a_rank_speaks_for_itself_only(self, cache: CacheRank) -> None:
        with grpc.insecure_channel(cache.address) as channel:
            error = refusal(stub_of(channel, cache, "other").JoinAgreement(iter([self.hello(cache)])))
            assert isinstance(error, IdentityMismatch) and "other-*" in error.metadata["scope"]
            ahead = self.hello(cache, epoch=2**53 - 1)
            error = refusal(stub_of(channel, cache, "own").JoinAgreement(iter([ahead])))
            assert isinstance(error, InvalidRequest) and error.metadata["field"] == "hello.member.epoch"
            welcome = stub_of(channel, cache, "own").JoinAgreement(iter([self.hello(cache)]))
            assert next(welcome).epoch

    @pytest.mark.parametrize(
        ("name", "place", "refused"),
        [
            ("own", {"tp": 0}, WrongRank),  # the leader's own
            ("own", {"tp": 2}, WrongRank),
            ("own", {"tp": 1, "pp": 1}, WrongRank),
            ("own", {"tp": 1, "dp": 1}, WrongRank),
            ("other", {"tp": 1, "engine": "other-7"}, WrongRank),
            ("other", {"tp": 1}, IdentityMismatch),
            ("wrong-side", {"tp": 1}, IdentityMismatch),
            ("c", {"tp": 1}, PermissionDenied),
            ("a", {"tp": 1}, PermissionDenied),
        ],
    )
    def test_a_forged_member_joins_nothing_and_has_no_vote(
        self, cache: CacheRank, name: str, place: dict[str, Any], refused: type[KvGrpcError]
    ) -> None:
        forged = self.hello(cache)
        forged.hello.member.rank.MergeFrom(common_pb2.RankId(**place))
        if not place["tp"]:
            forged.hello.member.rank.tp = 0
        leader = cast(LeaderAgreement, cache.manager.leader)
        before = leader.live
        vote = pb.AgreementVote(operation_id="x", stage=pb.AGREEMENT_STAGE_HITS)
        with grpc.insecure_channel(cache.address) as channel:
            requests = iter([forged, pb.JoinAgreementRequest(votes=[vote])])
            error = refusal(stub_of(channel, cache, name).JoinAgreement(requests))
        assert isinstance(error, refused)
        assert leader.live == before and not leader._core.open_ballots

    def test_votes_with_names_of_megabytes_end_that_stream(self, cache: CacheRank) -> None:
        vote = pb.AgreementVote(operation_id="x" * (1 << 20), stage=pb.AGREEMENT_STAGE_HITS)
        with grpc.insecure_channel(cache.address) as channel:
            requests = iter([self.hello(cache), pb.JoinAgreementRequest(votes=[vote])])
            error = refusal(stub_of(channel, cache, "own").JoinAgreement(requests))
            assert isinstance(error, InvalidRequest) and error.metadata["field"] == "votes.operation_id"

    def test_a_flood_of_votes_keeps_one_alarm_and_so_many_ballots(self, cache: CacheRank) -> None:
        leader = cast(LeaderAgreement, cache.manager.leader)
        go_on = threading.Event()

        def requests() -> Iterator[pb.JoinAgreementRequest]:
            yield self.hello(cache)
            for message in range(10):
                votes = [
                    pb.AgreementVote(operation_id=f"{message}-{number}", stage=pb.AGREEMENT_STAGE_HITS, pages=2**31)
                    for number in range(4_096)
                ]
                yield pb.JoinAgreementRequest(votes=votes)
            go_on.wait(20)

        with grpc.insecure_channel(cache.address) as channel:
            stream = stub_of(channel, cache, "own").JoinAgreement(requests())
            last = ("9-4095", Stage.HITS)
            wait_until(lambda: last in leader._core._ballots)
            assert leader._core.open_ballots <= 4_096
            assert len(leader._alarms._heap) <= 12
            go_on.set()
            stream.cancel()
        wait_until(lambda: leader.live == {RankId("E")})
        with client_of(cache, "b") as client:
            assert client.health("kvgrpc.v1.PrefetchService") == "SERVING"


@pytest.fixture(scope="module")
def index() -> Iterator[IndexServer]:
    server = IndexServer(["127.0.0.1:0"], sources=["127.0.0.1:1"]).open()
    yield server
    server.close()


class TestTheIndex:
    def test_while_a_million_tokens_are_hashed_others_are_served(
        self, index: IndexServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on, hashes = threading.Event(), threading.Event(), index_servicer._all_hashes

        def hashes_in_the_end(asked: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return hashes(asked)

        monkeypatch.setattr(index_servicer, "_all_hashes", hashes_in_the_end)
        long = index_pb.VllmPrompt(token_ids=range(1 << 20), page_tokens=16, algorithm="sha256_cbor")
        with grpc.insecure_channel(index.address) as channel, grpc.insecure_channel(index.address) as other:
            long_one = IndexServiceStub(channel).Score.future(question(vllm=long), timeout=60)
            assert begun.wait(20)
            for _ in range(5):
                IndexServiceStub(other).ListSources(index_pb.ListSourcesRequest(), timeout=20)
            assert not long_one.done()
            go_on.set()
            assert long_one.result().prompts[0].blocks == 65_536

    def test_many_at_once_of_one_caller_are_refused_with_a_time_to_come_again(self, index: IndexServer) -> None:
        long = question(sglang=index_pb.SglangPrompt(token_ids=range(1 << 19), page_tokens=16))
        with grpc.insecure_channel(index.address) as channel:
            calls = [IndexServiceStub(channel).Score.future(long, timeout=60) for _ in range(30)]
            errors = [error_from(cast(Any, each)) for each in calls if each.exception() is not None]
        assert errors and all(isinstance(error, TooManyRequests) and error.retry_after for error in errors)
        assert len(errors) <= 22

    def test_more_names_of_engines_than_there_are_engines(self, index: IndexServer) -> None:
        request = question(hashes=[1], engines=[str(number) for number in range(100_000)])
        with grpc.insecure_channel(index.address) as channel, pytest.raises(grpc.RpcError) as refused:
            IndexServiceStub(channel).Score(request, timeout=20)
        error = error_from(refused.value)
        assert isinstance(error, InvalidRequest) and error.metadata["field"] == "engines"


def test_every_method_survives_random_bytes(cache: CacheRank, index: IndexServer) -> None:
    source = np.random.default_rng(5)
    for address, service in ((cache.address, "PrefetchService"), (index.address, "IndexService")):
        with grpc.insecure_channel(address) as channel:
            for path in (path for path in ALLOWED if f".{service}/" in path):
                call: Any = channel.stream_stream(path)
                for size in (0, 1, 5, 50, 5_000, 100_000):
                    headers = (("authorization", bearer("own" if "Join" in path else "a", address)),)
                    if "Watch" in path and not size:
                        continue  # a legal one, without end
                    try:
                        for _ in call(iter([source.bytes(size)]), timeout=20, metadata=headers):
                            continue
                    except grpc.RpcError as error:
                        assert (
                            cast(Any, error).code()
                            not in (
                                grpc.StatusCode.DEADLINE_EXCEEDED,
                                grpc.StatusCode.INTERNAL,
                            )
                            or "Join" in path
                        ), (path, size, error)
    assert cache.manager.healthy


def test_who_began_an_operation_ends_it_and_people_and_no_other_rank(cache: CacheRank, storage: FaultyBackend) -> None:
    with client_of(cache, "own") as own, client_of(cache, "other") as other, client_of(cache, "a") as alice:
        for ends in (own, alice):
            operation = own.start_prefetch(pb.PromptPages(tokens=prompt(2)), request_id=f"of-{id(ends)}")
            with pytest.raises(PermissionDenied) as refused:
                other.terminate_prefetch(operation.operation_id)
            assert refused.value.metadata["allowed"] == "operator, its own caller"
            # Who repeats the request does not own it thereby.
            other.start_prefetch(pb.PromptPages(tokens=prompt(2)), request_id=f"of-{id(ends)}")
            with pytest.raises(PermissionDenied):
                other.terminate_prefetch(operation.operation_id)
            assert ends.terminate_prefetch(operation.operation_id).quiescent


def test_pages_that_another_speaks_of_are_pages_of_the_cache(cache: CacheRank) -> None:
    """Tenants are what callers say: they share the queue, and hide nothing from each other (docs/bounds.md)."""
    with client_of(cache, "a") as alice, client_of(cache, "b") as bob:
        operation = alice.start_prefetch(pb.PromptPages(tokens=prompt(2)), tenant="alice")
        assert [each.tenant for each in bob.list_operations()] == ["alice"]
        assert bob.terminate_prefetch(operation.operation_id).quiescent
