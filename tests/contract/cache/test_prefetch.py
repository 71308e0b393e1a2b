"""PrefetchService: what is ordered is done once and told to its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import (
    InvalidRequest,
    OperationNotFound,
    RequestIdReused,
    TooManyRequests,
)
from kvgrpc.prefetch.model import OperationKind
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.status import error_from
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from tests.support.cache_serving import LIMITS, SHAPE, CacheRank, ended, hashes_of, open_cache_rank, prompt
from tests.support.faults.storage import Fault, FaultyBackend
from tests.support.ports import free_port
from tests.support.waiting import wait_until


def test_a_rank_with_several_registries_finds_the_leader_of_its_replica(tmp_path: Path) -> None:
    """The first is not there: the one that has the rank's row is asked."""
    registry = RegistryServer(["127.0.0.1:0"]).open()
    cache = open_cache_rank(tmp_path, registry=f"127.0.0.1:{free_port()},{registry.address}")
    rank: Any = cache.rank
    assert rank._loop.run(rank._find_cache_leader(), 20.0) == cache.address
    cache.close()
    registry.close()


class TestPrefetch:
    def test_pages_that_were_backed_up_and_evicted_come_back_with_the_same_bytes(
        self, cache: CacheRank, client: SyncClient
    ) -> None:
        tokens = prompt(20)
        hashes = hashes_of(tokens)
        cache.fill(hashes)
        pages = pb.PromptPages(tokens=tokens)
        backup = ended(client, client.start_backup(pages))
        assert backup.state == pb.OPERATION_STATE_DONE and backup.completed_pages == 20
        assert cache.evict() == 20
        assert client.lookup(pages).host_pages == 0 and client.lookup(pages).storage_pages == 20
        prefetch = ended(client, client.start_prefetch(pages))
        assert prefetch.state == pb.OPERATION_STATE_DONE
        assert list(prefetch.page_outcomes) == [pb.PAGE_OUTCOME_OK] * 20
        assert client.lookup(pages).host_pages == 20
        cache.assert_bytes(hashes)

    def test_a_repeat_with_one_request_id_is_one_operation(self, cache: CacheRank, client: SyncClient) -> None:
        cache.store(hashes_of(prompt(6)))
        pages = pb.PromptPages(tokens=prompt(6))
        first = client.start_prefetch(pages, request_id="r")
        assert client.start_prefetch(pages, request_id="r").operation_id == first.operation_id
        with pytest.raises(RequestIdReused):
            client.start_prefetch(pb.PromptPages(tokens=prompt(7)), request_id="r")

    @pytest.mark.parametrize("other", [{"priority": 1}, {"tenant": "t"}, {"timeout": 7.0}, {"extra_key": "lora"}])
    def test_a_request_id_with_another_order_is_refused(self, client: SyncClient, other: dict[str, Any]) -> None:
        hashes = [bytes.fromhex(each) for each in hashes_of(prompt(6))]
        client.start_prefetch(pb.PromptPages(page_hashes=hashes), request_id="r")
        pages = pb.PromptPages(page_hashes=hashes, extra_key=other.pop("extra_key", None))
        with pytest.raises(RequestIdReused) as refused:
            client.start_prefetch(pages, request_id="r", **other)
        assert refused.value.metadata["requestId"] == "r"

    def test_a_repeat_is_answered_where_nothing_new_is_begun(self, tmp_path: Path) -> None:
        storage = FaultyBackend(open_backend("file", {"path": str(tmp_path)}))
        cache = open_cache_rank(tmp_path, storage, limits=replace(LIMITS, operations=4))  # one of a caller
        cache.store(hashes_of(prompt(6)))
        gate = threading.Event()
        storage.fault = lambda call, key: Fault() if not gate.wait(30.0) else None
        try:
            with SyncClient(cache.address) as client, ThreadPoolExecutor(1) as beside:
                pages = pb.PromptPages(tokens=prompt(6))
                first = client.start_prefetch(pages, request_id="r")
                assert client.start_prefetch(pages, request_id="r").operation_id == first.operation_id
                # Asked once: the client would ask until its time is over.
                with grpc.insecure_channel(cache.address) as channel, pytest.raises(grpc.RpcError) as refused:
                    another = pb.StartPrefetchRequest(pages=pages, request_id="s")
                    PrefetchServiceStub(channel).StartPrefetch(another, timeout=30)
                assert isinstance(error_from(refused.value), TooManyRequests)
                draining = beside.submit(client.drain, 30.0)
                wait_until(lambda: client.health() != "SERVING")
                assert client.start_prefetch(pages, request_id="r").operation_id == first.operation_id
                gate.set()
                draining.result(30.0)
        finally:
            gate.set()
            cache.close()
            assert storage.close(20.0)

    def test_hashes_name_the_same_pages_as_their_tokens(self, cache: CacheRank, client: SyncClient) -> None:
        tokens = prompt(6)
        cache.store(hashes_of(tokens))
        pages = pb.PromptPages(page_hashes=[bytes.fromhex(each) for each in hashes_of(tokens)])
        assert ended(client, client.start_prefetch(pages)).completed_pages == 6
        assert client.lookup(pb.PromptPages(tokens=tokens)).host_pages == 6

    def test_pages_of_another_extra_key_or_salt_are_other_pages(self, cache: CacheRank, client: SyncClient) -> None:
        tokens = prompt(6)
        cache.store(hashes_of(tokens, "lora"), "lora")
        for pages, found in (
            (pb.PromptPages(tokens=tokens), 0),
            (pb.PromptPages(tokens=tokens, extra_key="lora"), 6),
            (pb.PromptPages(tokens=tokens, cache_salt="lora"), 0),
            (pb.PromptPages(tokens=tokens, bigram=True), 0),
        ):
            assert client.lookup(pages).storage_pages == found

    def test_what_is_there_already_is_declined_as_covered(self, cache: CacheRank, client: SyncClient) -> None:
        cache.fill(hashes_of(prompt(6)))
        operation = ended(client, client.start_prefetch(pb.PromptPages(tokens=prompt(6))))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_COVERED)
        assert operation.covered_pages == 6

    def test_only_what_is_missing_behind_the_covered_pages_is_read(self, cache: CacheRank, client: SyncClient) -> None:
        hashes = hashes_of(prompt(10))
        cache.store(hashes)
        cache.fill(hashes[:4])
        operation = ended(client, client.start_prefetch(pb.PromptPages(tokens=prompt(10))))
        assert (operation.covered_pages, operation.hit_pages, operation.completed_pages) == (4, 6, 10)
        assert operation.bytes == 6 * SHAPE.page_bytes and len(operation.page_outcomes) == 6
        cache.assert_bytes(hashes)

    def test_nothing_in_storage_is_declined_with_the_reason(self, client: SyncClient) -> None:
        operation = ended(client, client.start_prefetch(pb.PromptPages(tokens=prompt(10))))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_BELOW_THRESHOLD)

    def test_a_part_of_a_page_at_the_end_is_not_asked_for(self, cache: CacheRank, client: SyncClient) -> None:
        cache.store(hashes_of(prompt(3)))
        operation = ended(client, client.start_prefetch(pb.PromptPages(tokens=[*prompt(3), 7, 7])))
        assert (operation.asked_pages, operation.completed_pages) == (3, 3)
        cache.assert_bytes(hashes_of(prompt(3)))

    def test_the_host_has_nothing_to_back_up(self, client: SyncClient) -> None:
        operation = ended(client, client.start_backup(pb.PromptPages(tokens=prompt(10))))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_NOT_PRESENT)

    @pytest.mark.parametrize(
        ("field", "pages", "order"),
        [
            ("pages", pb.PromptPages(), {}),
            ("pages", pb.PromptPages(tokens=[1] * 8, page_hashes=[b"x" * 32]), {}),
            ("pages.page_hashes[1]", pb.PromptPages(page_hashes=[b"x" * 32, b"y" * 31]), {}),
            ("pages.tokens", pb.PromptPages(tokens=[1, 2, 3]), {}),
            ("priority", pb.PromptPages(tokens=[1] * 8), {"priority": 2000}),
            ("timeout", pb.PromptPages(tokens=[1] * 8), {"timeout": 4000.0}),
            ("request_id", pb.PromptPages(tokens=[1] * 8), {"request_id": "r" * 129}),
            ("tenant", pb.PromptPages(tokens=[1] * 8), {"tenant": "t" * 129}),
            ("tokens[0]", pb.PromptPages(tokens=[2**64 - 1] * 8), {}),
        ],
    )
    def test_what_cannot_be_right_is_named(
        self, client: SyncClient, field: str, pages: pb.PromptPages, order: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequest) as refused:
            client.start_prefetch(pages, **order)
        assert refused.value.metadata["field"] == field


def test_a_watch_hears_of_an_end_that_is_forgotten_by_then(tmp_path: Path) -> None:
    """So many others ended since its last look. Whoever waits for that one would wait for ever."""
    storage, gate, held = (
        FaultyBackend(open_backend("file", {"path": str(tmp_path)})),
        threading.Event(),
        threading.Event(),
    )
    cache = open_cache_rank(tmp_path, storage, limits=replace(LIMITS, remembered=1))
    slow = hashes_of(prompt(6))
    storage.fault = lambda call, key: Fault() if slow[0] in key and not gate.wait(30.0) else None
    with SyncClient(cache.address) as client, ThreadPoolExecutor(1) as beside:
        try:
            begun = client.start_prefetch(pb.PromptPages(tokens=prompt(6)))
            messages = client.watch_operations([begun.operation_id])
            while not next(messages).complete:
                pass
            LoopThread.shared().loop.call_soon_threadsafe(held.wait, 30.0)
            gate.set()
            assert cache.manager.book.get(begun.operation_id).wait(20.0)
            for first in (100, 200):
                assert cache.start(OperationKind.PREFETCH, hashes_of(prompt(6, first))).wait(20.0)
            held.set()
            told = [each for message in beside.submit(list, messages).result(20.0) for each in message.operations]
            assert [(each.operation_id, each.quiescent) for each in told] == [(begun.operation_id, True)]
        finally:
            gate.set()
            held.set()
            cache.close()
            assert storage.close(20.0)


class TestWatching:
    def test_all_operations_are_told_as_they_stand_and_then_as_they_change(
        self, cache: CacheRank, client: SyncClient
    ) -> None:
        cache.store(hashes_of(prompt(6)))
        messages = client.watch_operations()
        before = next(messages).operations
        assert [each.kind for each in before] == [pb.OPERATION_KIND_BACKUP] and before[0].quiescent
        assert next(messages).complete
        started = client.start_prefetch(pb.PromptPages(tokens=prompt(6)))
        for message in messages:
            told = [each for each in message.operations if each.quiescent]
            if told:
                break
        assert told[0].operation_id == started.operation_id
        messages.close()  # type: ignore[attr-defined]  # it is a generator

    def test_an_operation_that_is_not_known_is_named(self, client: SyncClient) -> None:
        with pytest.raises(OperationNotFound):
            list(client.watch_operations(["nobody"]))
        with pytest.raises(OperationNotFound):
            client.terminate_prefetch("nobody")

    def test_lists_are_paged_in_the_order_of_their_begin(self, cache: CacheRank, client: SyncClient) -> None:
        names = [client.start_prefetch(pb.PromptPages(tokens=prompt(4, n))).operation_id for n in range(7)]
        with grpc.insecure_channel(cache.address) as channel:
            stub = PrefetchServiceStub(channel)
            found, token = [], ""
            while True:
                page = stub.ListOperations(pb.ListOperationsRequest(page_size=3, page_token=token), timeout=10)
                found += [each.operation_id for each in page.operations]
                token = page.next_page_token
                if not token:
                    break
            whole = stub.ListOperations(pb.ListOperationsRequest(page_size=1001), timeout=10)
        assert found == names == [each.operation_id for each in client.list_operations()]
        assert found == [each.operation_id for each in whole.operations], "above the bound it is the bound"

    def test_a_terminated_operation_is_quiescent_when_the_answer_comes(self, tmp_path: Path) -> None:
        storage = FaultyBackend(open_backend("file", {"path": str(tmp_path)}))
        cache = open_cache_rank(tmp_path, storage)
        cache.store(hashes_of(prompt(12)))
        storage.fault = lambda call, key: Fault(delay=0.2) if call == "read" else None
        with SyncClient(cache.address) as client:
            operation = client.start_prefetch(pb.PromptPages(tokens=prompt(12)))
            terminated = client.terminate_prefetch(operation.operation_id)
            assert terminated.quiescent and terminated.stop == pb.OPERATION_STOP_CANCELLED
            again = client.terminate_prefetch(operation.operation_id)
            assert again.revision == terminated.revision
        cache.close()
        assert storage.close(5.0)
