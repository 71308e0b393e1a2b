"""PrefetchService against a real rank with real files: pages leave, come back with the same bytes, and everything is
told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import Payloads, SyncClient
from kvgrpc.errors import (
    FeatureDisabled,
    InvalidRequest,
    OperationNotFound,
    PeerUnreachable,
    RequestIdReused,
    ServerDraining,
    StorageFailed,
    TooManyRequests,
)
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import common_pb2, event_service_pb2
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from tests.support.cache_serving import LIMITS, SHAPE, CacheRank, bytes_of, hashes_of, open_cache_rank, prompt
from tests.support.etcd import free_port
from tests.support.faults.storage import DOWN, Fault, FaultyBackend, memory_backend
from tests.support.waiting import wait_until


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheRank]:
    opened = open_cache_rank(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def client(cache: CacheRank) -> Iterator[SyncClient]:
    with SyncClient(cache.address) as opened:
        yield opened


def test_a_rank_with_several_registries_finds_the_leader_of_its_replica(tmp_path: Path) -> None:
    """The first is not there: the one that has the rank's row is asked."""
    registry = RegistryServer(["127.0.0.1:0"]).open()
    cache = open_cache_rank(tmp_path, registry=f"127.0.0.1:{free_port()},{registry.address}")
    rank: Any = cache.rank
    assert rank._loop.run(rank._find_cache_leader(), 20.0) == cache.address
    cache.close()
    registry.close()


def ended(client: SyncClient, operation: pb.CacheOperation) -> pb.CacheOperation:
    """The operation in its last state."""
    for message in client.watch_operations([operation.operation_id]):
        for each in message.operations:
            operation = each
    assert operation.quiescent
    return operation


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
            with SyncClient(cache.address) as client:
                pages = pb.PromptPages(tokens=prompt(6))
                first = client.start_prefetch(pages, request_id="r")
                assert client.start_prefetch(pages, request_id="r").operation_id == first.operation_id
                with pytest.raises(TooManyRequests):
                    client.start_prefetch(pages, request_id="s")
                client.drain(0.1)
                assert client.start_prefetch(pages, request_id="r").operation_id == first.operation_id
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


class TestTheCache:
    def test_info_says_what_it_is_made_of_and_how_full_it_is(self, cache: CacheRank, client: SyncClient) -> None:
        cache.store(hashes_of(prompt(6)))
        cache.fill(hashes_of(prompt(4, 1)))
        info = client.get_cache_info()
        assert (info.cache_namespace.model, info.cache_namespace.dtype, info.cache_namespace.page_tokens) == (
            "test/model",
            "float16",
            4,
        )
        assert [(use.tier, use.used_pages) for use in info.tiers] == [
            (common_pb2.TIER_HOST, 4),
            (common_pb2.TIER_STORAGE, 6),
        ]
        assert info.storage_backend == "file" and info.storage_healthy and info.agreeing_ranks == 1

    def test_a_purge_needs_the_caches_own_namespace(self, client: SyncClient) -> None:
        namespace = client.get_cache_info().cache_namespace
        namespace.dtype = "bfloat16"
        with pytest.raises(InvalidRequest) as refused:
            client.purge_pages(pb.PurgePagesRequest(cache_namespace=namespace, tiers=[common_pb2.TIER_HOST]))
        assert refused.value.metadata["field"] == "cache_namespace"
        with pytest.raises(InvalidRequest):
            client.purge_pages(pb.PurgePagesRequest(cache_namespace=client.get_cache_info().cache_namespace))

    def test_a_purge_drops_one_extra_key_from_all_tiers_and_counts(self, cache: CacheRank, client: SyncClient) -> None:
        cache.fill(hashes_of(prompt(6), "lora"), "lora")
        cache.fill(hashes_of(prompt(5)))
        for pages in (pb.PromptPages(tokens=prompt(6), extra_key="lora"), pb.PromptPages(tokens=prompt(5))):
            ended(client, client.start_backup(pages))
        request = pb.PurgePagesRequest(
            cache_namespace=client.get_cache_info().cache_namespace,
            tiers=[common_pb2.TIER_HOST, common_pb2.TIER_STORAGE],
            extra_key="lora",
            dry_run=True,
        )
        counted = client.purge_pages(request)
        assert (counted.host_pages, counted.storage_pages) == (6, 6)
        request.dry_run = False
        gone = client.purge_pages(request)
        assert (gone.host_pages, gone.storage_pages, gone.storage_known_only) == (6, 6, False)
        assert client.lookup(pb.PromptPages(tokens=prompt(6), extra_key="lora")).storage_pages == 0
        assert client.lookup(pb.PromptPages(tokens=prompt(5))).host_pages == 5

    def test_of_two_extra_keys_in_one_store_the_others_pages_stay(self, cache: CacheRank, client: SyncClient) -> None:
        """Of the purged one also what device and host have evicted."""
        for extra_key in ("lora-a", "lora-b", ""):
            cache.store(hashes_of(prompt(6), extra_key), extra_key)
        cache.fill(hashes_of(prompt(2), "lora-a"), "lora-a")
        request = pb.PurgePagesRequest(
            cache_namespace=client.get_cache_info().cache_namespace, tiers=[common_pb2.TIER_STORAGE], dry_run=True
        )
        assert client.purge_pages(request).storage_pages == 18
        request.extra_key = "lora-a"
        assert client.purge_pages(request).storage_pages == 6
        request.dry_run = False
        assert client.purge_pages(request).storage_pages == 6
        found = [
            client.lookup(pb.PromptPages(tokens=prompt(6), extra_key=each)).storage_pages
            for each in ("lora-a", "lora-b", "")
        ]
        assert found == [2, 6, 6], "the host still has two"
        by_hash = [bytes.fromhex(each) for each in hashes_of(prompt(6), "lora-b")]
        assert client.lookup(pb.PromptPages(page_hashes=by_hash, extra_key="lora-b")).storage_pages == 6
        assert client.lookup(pb.PromptPages(page_hashes=by_hash)).storage_pages == 0, "not without its extra key"

    def test_a_backend_that_cannot_count_says_so(self, tmp_path: Path) -> None:
        storage = memory_backend()
        cache = open_cache_rank(tmp_path, storage)
        cache.store(hashes_of(prompt(6)))
        with SyncClient(cache.address) as client:
            tiers = [common_pb2.TIER_STORAGE]
            request = pb.PurgePagesRequest(
                cache_namespace=client.get_cache_info().cache_namespace, tiers=tiers, dry_run=True
            )
            assert not client.purge_pages(request).HasField("storage_pages")
            request.dry_run = False
            gone = client.purge_pages(request)
            assert gone.HasField("storage_pages") and gone.storage_pages == 6
        cache.close()
        assert storage.close(5.0)

    def test_of_two_models_that_share_storage_the_others_pages_stay(self, cache: CacheRank, tmp_path: Path) -> None:
        other = open_cache_rank(tmp_path, model="test/model-2")
        hashes = hashes_of(prompt(6))
        for rank in (cache, other):
            rank.store(hashes)
        with SyncClient(cache.address) as client:
            namespace = client.get_cache_info().cache_namespace
            request = pb.PurgePagesRequest(cache_namespace=namespace, tiers=[common_pb2.TIER_STORAGE])
            assert client.purge_pages(request).storage_pages == 6
        counts = [rank.manager.controller.count_in_storage(hashes, 5.0) for rank in (cache, other)]
        assert counts == [0, 6]
        other.close()

    def test_keys_that_do_not_tell_whose_they_are_are_not_purged(self, tmp_path: Path) -> None:
        cache = open_cache_rank(tmp_path, key_mode="sglang")
        cache.store(hashes_of(prompt(6)))
        cache.fill(hashes_of(prompt(6)))
        with SyncClient(cache.address) as client:
            tiers = [common_pb2.TIER_HOST, common_pb2.TIER_STORAGE]
            request = pb.PurgePagesRequest(cache_namespace=client.get_cache_info().cache_namespace, tiers=tiers)
            with pytest.raises(FeatureDisabled):
                client.purge_pages(request)
            assert client.lookup(pb.PromptPages(tokens=prompt(6))).host_pages == 6, "nothing went"
            request.extra_key = ""
            request.dry_run = True
            assert client.purge_pages(request).storage_pages == 6
            request.dry_run = False
            gone = client.purge_pages(request)
            assert gone.storage_pages == 6 and gone.storage_known_only
        cache.close()

    def test_pinned_pages_stay_until_their_time(self, cache: CacheRank, client: SyncClient) -> None:
        cache.fill(hashes_of(prompt(6)))
        cache.fill(hashes_of(prompt(4, 1)))
        assert client.pin_pages(pb.PromptPages(tokens=prompt(8)), 60.0).pinned_pages == 6
        assert cache.evict() == 4
        assert client.pin_pages(pb.PromptPages(tokens=prompt(8)), 0.0).pinned_pages == 6
        assert cache.evict() == 6
        with pytest.raises(InvalidRequest):
            client.pin_pages(pb.PromptPages(tokens=prompt(8)), 3601.0)

    def test_a_time_of_two_signs_is_none(self, cache: CacheRank) -> None:
        request = pb.PinPagesRequest(pages=pb.PromptPages(tokens=prompt(8)))
        request.duration.seconds, request.duration.nanos = 1, -5
        with grpc.insecure_channel(cache.address) as channel, pytest.raises(grpc.RpcError) as refused:
            PrefetchServiceStub(channel).PinPages(request, timeout=10)
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "duration" in error.details() and "1 s -5 ns" in error.details()

    def test_storage_that_does_not_answer_is_told_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        storage = FaultyBackend(open_backend("file", {"path": str(tmp_path)}))
        cache = open_cache_rank(tmp_path, storage)
        cache.fill(hashes_of(prompt(6)))
        storage.fault = lambda call, key: DOWN
        with SyncClient(cache.address, timeout=3.0) as client:
            pages = pb.PromptPages(tokens=prompt(8))
            with pytest.raises(PeerUnreachable):
                client.lookup(pages)
            assert client.lookup(pages, without_storage=True).host_pages == 6
            operation = ended(client, client.start_prefetch(pages))
            assert operation.stop == pb.OPERATION_STOP_BACKEND_DOWN
            storage.count_leading = broken_disk  # type: ignore[method-assign,assignment]
            with pytest.raises(StorageFailed):
                client.lookup(pages)
            assert client.health("kvgrpc.v1.PrefetchService") == "SERVING"
        cache.close()

    def test_a_rank_without_the_tier_or_tree_says_so(self, tmp_path: Path) -> None:
        cache = open_cache_rank(tmp_path, None, own_radix_cache=True)
        with SyncClient(cache.address) as client:
            pages = pb.PromptPages(tokens=prompt(8))
            with pytest.raises(FeatureDisabled):
                client.start_backup(pages)
            with pytest.raises(FeatureDisabled):
                client.pin_pages(pages, 5.0)
            assert client.start_prefetch(pages).stop == pb.OPERATION_STOP_BACKEND_DOWN
            assert client.get_cache_info().storage_backend == ""
        cache.close()

    def test_an_engines_own_radix_cache_is_asked_and_given(self, tmp_path: Path) -> None:
        keeper = EnginesTree()
        cache = open_cache_rank(tmp_path, own_radix_cache=True, keeper=keeper)
        keeper.host = host = cache.manager.host
        hashes = hashes_of(prompt(10))
        computed = host.table.take(10)
        assert not isinstance(computed, NotEnoughPages)
        for page, each in zip(computed, hashes, strict=True):
            host.set_flat(int(page), bytes_of(each))
        host.table.commit(computed)
        keeper.keep(hashes, 0, computed, "")
        with SyncClient(cache.address) as client:
            pages = pb.PromptPages(tokens=prompt(10))
            assert ended(client, client.start_backup(pages)).completed_pages == 10
            keeper.forget(hashes[4:])
            operation = ended(client, client.start_prefetch(pages))
            assert (operation.covered_pages, operation.hit_pages, operation.completed_pages) == (4, 6, 10)
            for each in hashes:
                assert (host.flat(keeper.pages[each]) == bytes_of(each)).all()
            namespace = client.get_cache_info().cache_namespace
            with pytest.raises(FeatureDisabled):
                client.purge_pages(pb.PurgePagesRequest(cache_namespace=namespace, tiers=[common_pb2.TIER_HOST]))
            purged = client.purge_pages(
                pb.PurgePagesRequest(cache_namespace=namespace, tiers=[common_pb2.TIER_STORAGE])
            )
            assert purged.storage_pages == 10
        keeper.forget(hashes)
        assert host.table.free_count == host.pages
        cache.close()

    def test_a_keeper_is_for_engines_with_a_radix_cache(self) -> None:
        with pytest.raises(InvalidRequest) as refused:
            PrefetchConfig(model="m", shape=SHAPE, host_pages=4, keeper=EnginesTree())
        assert refused.value.metadata["field"] == "prefetch.keeper"

    def test_a_draining_rank_begins_nothing_new(self, cache: CacheRank, client: SyncClient) -> None:
        assert client.drain(0.1).drained
        with SyncClient(cache.address, timeout=1.0) as impatient, pytest.raises(ServerDraining):
            impatient.start_prefetch(pb.PromptPages(tokens=prompt(8)))
        assert client.get_cache_info().storage_backend == "file"


class EnginesTree:
    """What an engine's own radix cache is to the controller: a Keeper."""

    host: HostPool

    def __init__(self) -> None:
        self.pages: dict[str, int] = {}

    def leading(self, hashes: Sequence[str]) -> int:
        return next((index for index, each in enumerate(hashes) if each not in self.pages), len(hashes))

    def reserve(self, count: int, behind: Sequence[str]) -> Pages | NotEnoughPages:
        return self.host.table.take(count)

    def keep(self, hashes: Sequence[str], covered: int, pages: Pages, extra_key: str) -> int:
        self.pages.update(zip(hashes[covered:], pages.tolist(), strict=True))
        return self.leading(hashes)

    def pages_of(self, hashes: Sequence[str]) -> Pages:
        pages = as_pages([self.pages[each] for each in hashes[: self.leading(hashes)]])
        self.host.table.read(pages)
        return pages

    def forget(self, hashes: Sequence[str]) -> None:
        self.host.table.release(as_pages([self.pages.pop(each) for each in hashes]))


class TestEvents:
    def test_the_host_and_storage_tiers_tell_what_they_store_and_drop(self, tmp_path: Path) -> None:
        cache = open_cache_rank(tmp_path, events=EVENTS)
        hashes = hashes_of(prompt(6))
        cache.store(hashes)
        with SyncClient(cache.address) as client:
            assert ended(client, client.start_prefetch(pb.PromptPages(tokens=prompt(6)))).completed_pages == 6
        names = names_of(hashes)
        assert told(cache) == [
            ("BlockStored", names, "CPU_PINNED"),
            ("BlockStored", names, "DISK"),
            ("BlockRemoved", names, "CPU_PINNED"),
            ("BlockStored", names, "CPU_PINNED"),
        ]
        cache.close()

    def test_storage_tells_what_a_purge_drops(self, tmp_path: Path) -> None:
        cache = open_cache_rank(tmp_path, events=EVENTS)
        hashes = hashes_of(prompt(6))
        cache.store(hashes)
        with SyncClient(cache.address) as client:
            namespace = client.get_cache_info().cache_namespace
            client.purge_pages(pb.PurgePagesRequest(cache_namespace=namespace, tiers=[common_pb2.TIER_STORAGE]))
        assert on_disk(cache) == set()
        cache.close()

    def test_storage_tells_what_it_drops_to_make_room(self, tmp_path: Path) -> None:
        blocks = -(-(4096 + SHAPE.page_bytes) // 4096)
        storage = open_backend("file", {"path": str(tmp_path), "max_bytes": 4 * blocks * 4096})
        cache = open_cache_rank(tmp_path, storage, events=EVENTS)
        hashes = hashes_of(prompt(6))
        cache.store(hashes)
        there = {name for each, name in zip(hashes, names_of(hashes), strict=True) if in_storage(cache, each)}
        assert len(there) == 4 and on_disk(cache) == there
        cache.close()
        assert storage.close(5.0)


def on_disk(cache: CacheRank) -> set[int]:
    """What somebody who follows the events believes to be in storage."""
    there: set[int] = set()
    for what, names, medium in told(cache):
        if medium == "DISK":
            there = there | set(names) if what == "BlockStored" else there - set(names)
    return there


EVENTS = {"publisher": "null", "enable_kv_cache_events": True}


def names_of(hashes: list[str]) -> list[int]:
    return [sglang_event_hash(bytes.fromhex(each)) for each in hashes]


def in_storage(cache: CacheRank, page_hash: str) -> bool:
    return cache.manager.controller.count_in_storage([page_hash], 5.0) == 1


def told(cache: CacheRank) -> list[tuple[str, list[int], str]]:
    """All events so far: type, blocks, medium."""
    with SyncClient(cache.address) as client:
        payloads = [
            payload
            for part in client.watch(mode=event_service_pb2.WATCH_MODE_REPLAY)
            if isinstance(part, Payloads)
            for payload in part.payloads
        ]
    events = [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]
    assert events.pop(0)["type"] == "AllBlocksCleared"  # what a new log begins with
    return [(event["type"], list(event["block_hashes"]), event["medium"]) for event in events]


def broken_disk(*arguments: Any) -> int:
    raise OSError("input/output error")


class TestCommands:
    def test_prefetch_start_brings_the_pages_and_says_so(
        self, cache: CacheRank, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokens = prompt(6)
        cache.store(hashes_of(tokens))
        with pytest.raises(SystemExit) as exit:
            main(["prefetch", "start", "-s", cache.address, "--tokens", ",".join(map(str, tokens)), "--json"])
        assert exit.value.code == 0 or exit.value.code is None
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (last["state"], last["completedPages"]) == ("OPERATION_STATE_DONE", 6)
        cache.assert_bytes(hashes_of(tokens))

    @pytest.mark.parametrize("how", ["start", "watch", "cancel"])
    def test_an_operation_that_takes_its_time_is_followed_to_its_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
    ) -> None:
        storage = FaultyBackend(memory_backend())
        cache = open_cache_rank(tmp_path, storage)
        tokens = prompt(6)
        cache.store(hashes_of(tokens))
        begun, may_end = threading.Event(), threading.Event()

        def slow(call: str, key: str) -> None:
            if call == "read":
                begun.set()
                assert may_end.wait(20)

        def end_it() -> None:
            """Once the command watches, or has cut the operation."""
            assert begun.wait(20)
            (operation,) = cache.manager.controller.book.open()
            wait_until(lambda: cache.manager.controller.book._listeners if how != "cancel" else operation.cut)
            may_end.set()

        storage.fault = slow
        with SyncClient(cache.address) as client:
            pages = pb.PromptPages(tokens=tokens)
            started = None if how == "start" else client.start_prefetch(pages).operation_id
            ender = threading.Thread(target=end_it)
            ender.start()
            assert how == "start" or begun.wait(20)  # one that is cut before it reads never reads
            with pytest.raises(SystemExit) as exit:
                order = ["--tokens", ",".join(map(str, tokens))] if started is None else [started]
                main(["prefetch", how, "-s", cache.address, *order])
            ender.join(20)
        words = " ".join(capsys.readouterr().out.split())
        assert not exit.value.code
        if how == "cancel":
            assert "state CANCELLED why CANCELLED" in words
        elif how == "watch":
            assert words.endswith("prefetch DONE 6/6 pages")
        else:
            assert "state DONE" in words and "completed 6" in words
        cache.close()
        assert storage.close(5.0)

    @pytest.mark.parametrize(("storage", "words"), [("file", "storage 6"), (None, "storage unknown")])
    def test_a_purge_that_only_counts_counts_storage_or_says_that_it_cannot(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], storage: str | None, words: str
    ) -> None:
        cannot = memory_backend()
        cache = open_cache_rank(tmp_path, storage or cannot)
        cache.store(hashes_of(prompt(6)))
        with pytest.raises(SystemExit) as exit:
            main(["cache", "purge", "-s", cache.address, "--tier", "storage", "--dry-run"])
        assert not exit.value.code
        assert words in " ".join(capsys.readouterr().out.split())
        cache.close()
        assert cannot.close(5.0)

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["prefetch", "lookup", "--tokens", "0 1 2 3 4 5 6 7"], 0, "device, host or storage"),
            (["prefetch", "list"], 0, "Cache operations"),
            (["prefetch", "start", "--tokens", "9,9,9,9,9"], 1, "BELOW_THRESHOLD"),
            (["prefetch", "start", "--tokens", "9,9,9,9,9", "--no-wait"], 0, "pages asked"),
            (["prefetch", "backup", "--tokens", "9,9,9,9,9"], 1, "NOT_PRESENT"),
            (["prefetch", "start"], 2, ""),
            (["prefetch", "start", "--tokens", "1,x"], 2, ""),
            (["prefetch", "lookup", "--hash", "12"], 2, ""),
            (["prefetch", "cancel", "nobody"], 64 + 5, ""),
            (["cache", "info"], 0, "test/model"),
            (["cache", "pin", "--tokens", "1 2 3 4", "--for", "5"], 0, "pages"),
            (["cache", "purge", "--tier", "host", "--dry-run"], 0, "Would go"),
            (["cache", "purge", "--tier", "host", "--tier", "storage", "--yes"], 0, "Went"),
        ],
    )
    def test_each_says_what_is_to_know_and_ends_with_its_code(
        self, cache: CacheRank, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
    ) -> None:
        with pytest.raises(SystemExit) as exit:
            main([*arguments, "-s", cache.address])
        assert (exit.value.code or 0) == code
        assert words in capsys.readouterr().out

    def test_an_operation_that_is_not_there_is_looked_for_in_the_list(
        self, cache: CacheRank, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(["prefetch", "watch", "nobody", "-s", cache.address])
        said = capsys.readouterr().err
        assert said.startswith("OPERATION_NOT_FOUND: ") and "kvgrpc prefetch list" in said
        assert "kvgrpc health" not in said

    def test_tokens_come_from_a_file_of_either_form(self, cache: CacheRank, tmp_path: Path) -> None:
        cache.fill(hashes_of(prompt(6)))
        for text in ("\n".join(map(str, prompt(6))), json.dumps(prompt(6)), json.dumps({"tokens": prompt(6)})):
            file = tmp_path / "tokens"
            file.write_text(text)
            with pytest.raises(SystemExit) as exit:
                main(["cache", "pin", "--tokens-file", str(file), "-s", cache.address])
            assert not exit.value.code
