"""What a cache says of itself and of its tiers, to who asks and in events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from kvgrpc.client import Payloads, SyncClient
from kvgrpc.errors import (
    FeatureDisabled,
    InvalidRequest,
    PeerUnreachable,
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
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import common_pb2, event_service_pb2
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from tests.support.cache_serving import SHAPE, CacheRank, bytes_of, ended, hashes_of, open_cache_rank, prompt
from tests.support.faults.storage import DOWN, FaultyBackend, memory_backend


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

    def test_a_caller_cannot_pin_all_of_a_cache(self, cache: CacheRank, client: SyncClient) -> None:
        """Of its 64 pages callers may pin 32 together, of which one leaves as many to others as it takes."""
        prompts = [prompt(6, number) for number in range(10)]
        for each in prompts:
            cache.fill(hashes_of(each))

        def pin(number: int, seconds: float = 60.0) -> int:
            return client.pin_pages(pb.PromptPages(tokens=prompts[number]), seconds).pinned_pages

        assert [pin(number) for number in range(3)] == [6, 6, 6]
        for _ in range(2):
            with pytest.raises(TooManyRequests, match="pinned pages are there already of one caller") as refused:
                pin(3)
            assert (refused.value.metadata["limit"], refused.value.metadata["value"]) == ("14", "24")
        assert pin(0) == 6, "a repeat moves the time"
        assert pin(1, 0.0) == 6 and pin(4) == 6
        assert cache.evict() == 60 - 18

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
        # Asked once: the client would ask until its time is over.
        with grpc.insecure_channel(cache.address) as channel, pytest.raises(grpc.RpcError) as refused:
            request = pb.StartPrefetchRequest(pages=pb.PromptPages(tokens=prompt(8)), request_id="r")
            PrefetchServiceStub(channel).StartPrefetch(request, timeout=30)
        assert isinstance(error_from(refused.value), ServerDraining)
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
