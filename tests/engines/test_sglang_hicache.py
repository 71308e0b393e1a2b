"""The storage class over SGLang's own parts: its factory, host pools and backend ``file``. No engine is started."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvgrpc.engines.sglang.cache.common import common_of
from kvgrpc.engines.sglang.cache.orders import CacheOrder, OrderKind, OrderQueue, Told
from kvgrpc.engines.sglang.cache.served import SglangCache
from kvgrpc.engines.sglang.cache.tree import TreeOrders
from kvgrpc.engines.sglang.clearing import Clearing
from kvgrpc.engines.sglang.hicache import _pages
from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.model import Layout, RankRef, Role
from kvgrpc.prefetch.model import Namespace, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.storage.base import StorageDown
from kvgrpc.prefetch.storage.keys import KeyMode
from kvgrpc.prefetch.storage.mooncake.local import LocalStore
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.server import CacheServer, RankConfig, RegistryServer, open_cache
from tests.support.faults.storage import FAILED, HANG, FaultyBackend, memory_backend
from tests.support.waiting import wait_until

PAGE = 16
PAGES = 12
HASHES = [f"{number:064x}" for number in range(PAGES)]
LAYOUTS = ["page_first", "page_first_direct", "layer_first"]
# Ranks of a holder and of a taker.
SIZES = [(2, 2), (2, 1), (1, 2)]
# Of a page, as SGLang's pools have it: K and V, layers, tokens, heads, elements.
PAGES_OF = {
    "layer_first": lambda pool, page: pool.kv_buffer[:, :, page * PAGE : (page + 1) * PAGE],
    "page_first": lambda pool, page: pool.kv_buffer[:, page * PAGE : (page + 1) * PAGE].transpose(1, 2),
    "page_first_direct": lambda pool, page: pool.kv_buffer[:, page],
    "page_head": lambda pool, page: pool.kv_buffer[:, page].transpose(1, 3),
}


def host_pool(layout: str = "page_first", heads: int = 2) -> Any:
    device = MHATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * PAGE,
        start_layer=0,
        end_layer=3,
    )
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def flat(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE, flat=True).clone()


def config(rank: int = 0, **extra: object) -> HiCacheStorageConfig:
    loader = {
        "backend_name": "kvgrpc",
        "module_path": "kvgrpc.engines.sglang.hicache",
        "class_name": "KvGrpcStorage",
        "interface_v1": 1,
    }
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="tiny/Llama",
        extra_config={**loader, **extra},
    )


def created(pool: Any, **extra: Any) -> Any:
    """As SGLang attaches it."""
    storage = StorageBackendFactory.create_backend("dynamic", config(**extra), pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.on_host_pools_registered()
    return storage


@pytest.mark.parametrize("mode", list(KeyMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("layout", list(PAGES_OF))
def test_a_page_of_any_layout_is_known_to_engines_of_another_kind(layout: str, mode: KeyMode) -> None:
    pool = host_pool(layout)
    found = common_of(pool, mode, "a/model")
    assert found is not None and found.model == "a/model"
    (pieces,) = _pages(pool, indices(3), 1, mode)
    own = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in pieces)
    source, common = ctypes.create_string_buffer(own, len(own)), ctypes.create_string_buffer(len(own))
    found.axes.to_common(ctypes.addressof(source), ctypes.addressof(common))
    assert common.raw == PAGES_OF[layout](pool, 3).contiguous().view(torch.uint8).numpy().tobytes()


def test_pages_with_more_than_keys_and_values_are_not_known_to_engines_of_another_kind() -> None:
    pool = host_pool()
    for field, value in (("layer_num", 4), ("v_head_dim", 16), ("layout", "page_unified"), ("dtype", torch.uint8)):
        known = getattr(pool, field)
        setattr(pool, field, value)
        assert common_of(pool, KeyMode.KVGRPC) is None, field
        setattr(pool, field, known)
    assert common_of(pool, KeyMode.KVGRPC) is not None


@pytest.fixture(scope="module")
def mooncake_store() -> Iterator[LocalStore]:
    with LocalStore() as store:
        yield store


@pytest.fixture(params=["file", "mooncake"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    if request.param == "file":
        return {"storage": "file", "storage_config": {"path": str(tmp_path / "kv")}}
    store = request.getfixturevalue("mooncake_store")
    return {"storage": "mooncake", "storage_config": {"master": store.address, "namespace": "sglang"}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_leave_the_host_pool_and_come_back(settings: dict[str, object], layout: str) -> None:
    pool = host_pool(layout)
    storage = created(pool, **settings)
    before = [flat(pool, page) for page in range(4)]
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_set_v1(HASHES[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert storage.batch_exists(HASHES) == 4
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(HASHES[:5], indices(7, 5, 6, 4, 8)) == [True] * 4 + [False]
    assert all(torch.equal(flat(pool, page), data) for page, data in zip((7, 5, 6, 4), before, strict=True))
    assert not flat(pool, 0).any(), "no other page is touched"
    assert storage.clear()
    assert storage.batch_exists(HASHES) == 0
    storage.close()


def test_without_interface_v1_flat_tensors_work_too(settings: dict[str, object]) -> None:
    pool = host_pool()
    storage = created(pool, **settings)
    data = [flat(pool, page) for page in range(3)]
    assert storage.batch_set(HASHES[:3], data)
    blank = [torch.zeros_like(pool.get_dummy_flat_data_page()) for _ in range(4)]
    came = storage.batch_get(HASHES[:4], blank)
    assert came[3] is None and all(torch.equal(one, other) for one, other in zip(came[:3], data, strict=True))
    assert storage.exists(HASHES[0]) and not storage.exists(HASHES[5])
    assert storage.get(HASHES[5], blank[0]) is None and storage.set(HASHES[5], data[0])
    storage.clear()
    storage.close()


def transfer(name: str, pages: list[int], policy: Any = PoolHitPolicy.ALL_PAGES, keys: list[str] | None = None) -> Any:
    hashes = [HASHES[page] for page in pages] if keys is None else keys
    return PoolTransfer(name=name, host_indices=indices(*pages), keys=hashes, hit_policy=policy)


def test_pools_beside_the_kv_cache_shorten_the_hit(settings: dict[str, object]) -> None:
    kv, indexer = host_pool(), host_pool()
    storage = created(kv, **settings)
    storage.register_mem_host_pool_v2(indexer, "indexer")
    done = storage.batch_set_v2([transfer("kv", [0, 1, 2, 3, 4, 5]), transfer("indexer", [0, 1, 3, 4])])
    assert done == {"kv": [True] * 6, "indexer": [True] * 4}
    every = storage.batch_exists_v2(HASHES, [transfer("indexer", [0, 1, 2, 3, 4, 5])])
    assert (every.kv_hit_pages, every.extra_pool_hit_pages) == (2, {"kv": 6, "indexer": 2})
    assert every.restorable_prefix_pages == [1, 2]
    tail = storage.batch_exists_v2(HASHES, [transfer("indexer", [0, 1], PoolHitPolicy.TRAILING_PAGES)])
    assert (tail.kv_hit_pages, tail.restorable_prefix_pages) == (5, [1, 2, 5]), "a prefix of 3 or 4 lacks page 2"
    before = [flat(indexer, page) for page in range(2)]
    indexer.kv_buffer.zero_()
    assert storage.batch_get_v2([transfer("indexer", [6, 7], keys=HASHES[:2])]) == {"indexer": [True, True]}
    assert all(torch.equal(flat(indexer, 6 + place), data) for place, data in enumerate(before))
    assert storage.batch_get_v2([PoolTransfer(name="kv", host_indices=None, keys=HASHES[:2])]) == {"kv": [False] * 2}
    storage.clear()
    storage.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_sglangs_own_file_backend_reads_what_we_wrote_and_we_what_it_wrote(
    tmp_path: Path, layout: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    pool = host_pool(layout)
    own = HiCacheFile(config(rank))
    own.register_mem_pool_host(pool)
    own.register_mem_host_pool_v2(pool, PoolName.KV)
    extra = {"storage": "file", "storage_config": {"path": str(tmp_path), "format": "sglang"}, "key_mode": "sglang"}
    ours = created(pool, rank=rank, **extra)
    before = [flat(pool, page) for page in range(8)]

    assert ours.batch_set_v1(HASHES[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert own.batch_set_v2([transfer("kv", [4, 5, 6, 7])]) == {"kv": [True] * 4}
    assert len(list(tmp_path.glob("*.bin"))) == 8
    pool.kv_buffer.zero_()
    assert own.batch_exists(HASHES) == ours.batch_exists(HASHES) == 8
    assert own.batch_get_v2([transfer("kv", [0, 1, 2, 3])]) == {"kv": [True] * 4}
    assert ours.batch_get_v1(HASHES[4:8], indices(4, 5, 6, 7)) == [True] * 4
    assert all(torch.equal(flat(pool, page), data) for page, data in enumerate(before))
    assert ours.batch_set_v1(HASHES[4:8], indices(4, 5, 6, 7)) == [True] * 4, "there already"
    assert len(list(tmp_path.glob("*.bin"))) == 8
    ours.close()


def test_ranks_and_dtypes_do_not_meet_in_one_folder(tmp_path: Path) -> None:
    extra = {"storage": "file", "storage_config": {"path": str(tmp_path)}}
    pool = host_pool()
    first, second = created(pool, rank=0, **extra), created(pool, rank=1, **extra)
    assert first.batch_set_v1(HASHES[:2], indices(0, 1)) == [True] * 2
    assert (first.batch_exists(HASHES), second.batch_exists(HASHES)) == (2, 0)
    pool.dtype = torch.float8_e4m3fn
    assert created(pool, rank=0, **extra).batch_exists(HASHES) == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "storage"),
        ({"storage": "flie"}, "one of file, mooncake"),
        ({"storage": "file", "storage_config": {}}, "path"),
        ({"storage": "file", "storage_config": {"path": "/tmp"}, "key_mode": "x"}, "key_mode"),
        ({"storage": "file", "storag_config": {}}, "storag_config"),
        ({"storage": "file", "storage_config": {"path": "/tmp"}, "timeout": 60}, "timeout"),
    ],
)
def test_a_wrong_config_refuses_to_attach(extra: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        created(host_pool(), **json.loads(json.dumps(extra)))


def served(name: str, storage: Any, registry: str, **place: Any) -> CacheServer:
    """As the scheduler's hook does, with nobody who takes orders. ``place``: of a rank beside the leading one."""

    def cache_of(rank: RankRef) -> SglangCache:
        return SglangCache(
            rank,
            Namespace("tiny/Llama", "bfloat16", "page_first_direct", PAGE),
            PrefetchLimits(),
            OrderQueue(),
            concurrent.futures.Future,
            lambda: None,
            page_bytes=1,
            write_policy="write_through",
        )

    rank = RankConfig(
        engine=name,
        role=Role.UNIFIED,
        pools=(),
        data_plane="shm",
        listen="127.0.0.1:0",
        registry=registry,
        pull=storage.pull,
        **place,
    )
    return open_cache(rank, None if rank.tp else cache_of, storage.pulls("", HEADS))


HEADS = 4
# A busy machine's ranks may say nothing for seconds.
PATIENT = {"exported_pages": 8, "staging_pages": 16, "answer_timeout": 8.0, "stall_timeout": 8.0}


class Ranks:
    """An engine of several ranks without SGLang's scheduler: each has a host pool, and a storage class over it."""

    def __init__(self, name: str, size: int, layout: str, registry: str, replicated: bool = False, **extra: Any):
        self.layout, self.size, self.replicated = layout, size, replicated
        self.pools = [host_pool(layout, HEADS if replicated else HEADS // size) for _ in range(size)]
        self.storages = []
        self._closing = contextlib.ExitStack()
        for tp, pool in enumerate(self.pools):
            mine = dataclasses.replace(config(tp, **extra), tp_size=size, is_mla_model=replicated)
            storage = StorageBackendFactory.create_backend("dynamic", mine, pool)
            storage.register_mem_pool_host(pool)
            self.storages.append(storage)
            self._closing.callback(served(name, storage, registry, layout=Layout(tp=size), tp=tp).close)

    def page(self, tp: int, page: int) -> torch.Tensor:
        """K and V, layers, tokens, heads, elements."""
        found: torch.Tensor = PAGES_OF[self.layout](self.pools[tp], page)
        return found

    def part(self, model: torch.Tensor, tp: int) -> torch.Tensor:
        """What a rank has of a page of the model."""
        own = HEADS // self.size
        return model if self.replicated else model[..., tp * own : (tp + 1) * own, :]

    def writes(self, pages: dict[int, torch.Tensor]) -> None:
        """They are computed, and written through where SGLang does that."""
        for tp, storage in enumerate(self.storages):
            for page, model in pages.items():
                self.page(tp, page).copy_(self.part(model, tp))
            if storage._sglang.is_storage_writer:
                assert storage.batch_set_v1(HASHES[: len(pages)], indices(*pages)) == [True] * len(pages)

    def takes(self, count: int, at: Sequence[int]) -> None:
        """All ranks find so many pages at others, and have them then. From threads, as SGLang does."""

        def take(storage: Any) -> list[bool]:
            wait_until(lambda: storage.batch_exists(HASHES) == count, 30.0)
            came: list[bool] = storage.batch_get_v1(HASHES[:count], indices(*at))
            return came

        with concurrent.futures.ThreadPoolExecutor(self.size) as threads:
            assert list(threads.map(take, self.storages)) == [[True] * count] * self.size

    def close(self) -> None:
        self._closing.close()
        for storage in self.storages:
            storage.close()


def model_pages(count: int) -> dict[int, torch.Tensor]:
    return {page: torch.randn(2, 3, PAGE, HEADS, 8).to(torch.bfloat16) for page in range(count)}


class TestPulls:
    """Without engines: what is kept for others, and what is refused. test_sglang_pull.py has the whole way."""

    @pytest.fixture(autouse=True)
    def address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVGRPC_CACHE_LISTEN", "127.0.0.1:0")

    @pytest.fixture
    def registry(self) -> Iterator[str]:
        server = RegistryServer(["127.0.0.1:0"]).open()
        yield server.address
        server.close()

    def storage(self, pool: Any, **extra: Any) -> Any:
        alone = dataclasses.replace(config(**extra), tp_size=1)
        storage = StorageBackendFactory.create_backend("dynamic", alone, pool)
        storage.register_mem_pool_host(pool)
        return storage

    @pytest.mark.parametrize(
        ("holders", "takers", "layouts", "modes"),
        [
            *((*sizes, (layout, layout), ("kvgrpc", "kvgrpc")) for sizes in SIZES for layout in PAGES_OF),
            *((*sizes, ("page_head", "page_first"), ("kvgrpc", "kvgrpc")) for sizes in SIZES),
            (1, 1, ("layer_first", "layer_first"), ("sglang", "kvgrpc")),
            (2, 1, ("layer_first", "layer_first"), ("kvgrpc", "sglang")),
        ],
    )
    def test_every_rank_takes_the_heads_that_are_its_own(
        self, registry: str, holders: int, takers: int, layouts: tuple[str, str], modes: tuple[str, str]
    ) -> None:
        """Of engines of any size, layout and mode of keys; each brings the bytes into an order of its own."""
        holder, taker = (
            Ranks(name, size, layout, registry, pull=PATIENT, key_mode=mode)
            for name, size, layout, mode in zip("ht", (holders, takers), layouts, modes, strict=True)
        )
        with contextlib.closing(holder), contextlib.closing(taker):
            pages = model_pages(4)
            holder.writes(pages)
            taker.takes(4, at=(7, 6, 5, 4))
            for tp in range(takers):
                for place, model in zip((7, 6, 5, 4), pages.values(), strict=True):
                    assert torch.equal(taker.page(tp, place), taker.part(model, tp))

    @pytest.mark.parametrize(("holders", "takers"), SIZES)
    def test_where_all_ranks_have_the_same_bytes_the_one_that_writes_lends_them(
        self, registry: str, holders: int, takers: int
    ) -> None:
        """SGLang has one rank of a latent cache write; the others have nothing to lend."""
        holder, taker = (
            Ranks(name, size, "page_first", registry, replicated=True, pull=PATIENT)
            for name, size in zip("ht", (holders, takers), strict=True)
        )
        with contextlib.closing(holder), contextlib.closing(taker):
            pages = model_pages(3)
            holder.writes(pages)
            taker.takes(3, at=(7, 6, 5))
            for tp in range(takers):
                for place, model in zip((7, 6, 5), pages.values(), strict=True):
                    assert torch.equal(taker.page(tp, place), model)

    def test_a_lookup_counts_what_peers_have_for_the_rank_that_is_asked(self, registry: str) -> None:
        holder, taker = (Ranks(name, 2, "page_first", registry, pull=PATIENT) for name in "ht")
        with contextlib.closing(holder), contextlib.closing(taker):
            holder.writes(model_pages(3))
            stored = taker.storages[0].stored
            wait_until(lambda: stored.leading_at_all_ranks(HASHES, 8.0) == 3, 30.0)

    def test_what_was_written_through_is_kept_when_sglang_uses_its_page_again(self) -> None:
        pool = host_pool("page_first_direct")
        storage = self.storage(pool, pull={"exported_pages": 3})
        before = flat(pool, 1).view(torch.uint8).numpy().tobytes()
        assert storage.batch_set_v1(HASHES[:2], indices(0, 1)) == [True] * 2
        pool.kv_buffer.zero_()
        lends, _ = storage.pulls()
        with lends.cache.reading(HASHES) as pages:
            ((address, nbytes),) = lends.cache.buffers(pages[1])
            assert len(pages) == 2 and ctypes.string_at(address, nbytes) == before
        assert storage.batch_set_v1(HASHES[2:4], indices(2, 3)) == [True] * 2
        assert lends.cache.count(HASHES[1:]) == 3, "the oldest made room"
        assert storage.clear() and lends.cache.count(HASHES[1:]) == 0
        storage.close()

    def test_after_a_detach_nothing_is_lent_any_more(self) -> None:
        """The engine may get other weights before a storage is attached again."""
        storage = self.storage(host_pool(), pull={"exported_pages": 3})
        assert storage.batch_set_v1(HASHES[:2], indices(0, 1)) == [True] * 2
        lends, _ = storage.pulls()
        assert lends.cache.count(HASHES) == 2
        storage.close()
        assert lends.cache.count(HASHES) == 0

    def test_with_storage_behind_a_store_that_is_down_is_a_miss_on_the_schedulers_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An error there would end SGLang's scheduler."""
        storage = self.storage(host_pool(), pull={}, storage="file", storage_config={"path": str(tmp_path)})

        def down(*_: object) -> int:
            raise StorageDown("the disk is gone", "/pages")

        monkeypatch.setattr(PeersBackend, "count_stored", down)
        assert storage.batch_exists(HASHES) == 0
        storage.close()

    def test_with_storage_behind_pages_go_there_as_well(self, tmp_path: Path) -> None:
        storage = self.storage(host_pool(), pull={}, storage="file", storage_config={"path": str(tmp_path)})
        assert storage.batch_set_v1(HASHES[:2], indices(0, 1)) == [True] * 2
        assert storage.batch_exists(HASHES) == 2, "on the scheduler's thread storage alone is asked"
        storage.close()

    def test_pages_of_another_engine_are_read_as_from_storage(self) -> None:
        """From a thread, as SGLang does."""
        pools = [host_pool("page_first_direct"), host_pool("page_first_direct")]
        storages = [self.storage(pool, pull={"exported_pages": 8, "staging_pages": 16}) for pool in pools]
        with contextlib.ExitStack() as stack:
            registry = RegistryServer(["127.0.0.1:0"])
            registry.open()
            stack.callback(registry.close)
            for name, storage in zip("ab", storages, strict=True):
                stack.callback(served(name, storage, registry.address).close)
            assert storages[0].batch_set_v1(HASHES[:4], indices(0, 1, 2, 3)) == [True] * 4
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                wait_until(lambda: thread.submit(storages[1].batch_exists, HASHES).result() == 4)
                came = thread.submit(storages[1].batch_get_v1, HASHES[:5], indices(7, 6, 5, 4, 8)).result()
            assert came == [True] * 4 + [False]
            for source, target in zip((0, 1, 2, 3), (7, 6, 5, 4), strict=True):
                assert torch.equal(flat(pools[1], target), flat(pools[0], source))

    @pytest.mark.parametrize(
        ("extra", "error", "words"),
        [
            ({"pull": {"exported_page": 1}}, InvalidRequest, "exported_page"),
            ({"pull": {"exported_pages": 0}}, InvalidRequest, "exported_pages"),
            ({"pull": {"staging_pages": 1}}, InvalidRequest, "staging_pages"),
            ({}, InvalidRequest, "storage"),
        ],
    )
    def test_a_wrong_config_refuses_to_attach(self, extra: dict[str, Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            self.storage(host_pool(), **extra)

    @pytest.mark.parametrize("axis", ["pp", "attn_cp"])
    def test_several_stages_or_context_ranks_are_refused(self, axis: str) -> None:
        several = dataclasses.replace(config(pull={}), **{f"{axis}_size": 2})
        with pytest.raises(FeatureDisabled, match="several stages or context ranks"):
            StorageBackendFactory.create_backend("dynamic", several, host_pool())

    def test_without_an_address_it_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVGRPC_CACHE_LISTEN")
        with pytest.raises(FeatureDisabled, match="KVGRPC_CACHE_LISTEN"):
            self.storage(host_pool(), pull={})


class Tree:
    """SGLang's prefix tree, as far as one prefetch of an order looks at it. ``fails``: of looks for a prompt."""

    page_size = PAGE
    enable_storage, hicache_storage_pass_prefix_keys, prefetch_threshold = True, False, 1
    tree_core = SimpleNamespace(is_eagle=False)

    def __init__(self) -> None:
        self.fails = 0
        self.ongoing_prefetch: dict[Any, Any] = {}
        self.ongoing_backup: dict[int, Any] = {}
        self.prefetch_loaded_tokens_by_reqid: dict[Any, int] = {}

    def match_prefix(self, params: Any) -> Any:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no such node")
        return SimpleNamespace(device_prefix_len=0, host_hit_length=0, last_host_node=None)

    def is_root(self, node: Any) -> bool:
        return True

    def get_last_hash_value(self, node: Any) -> None:
        return None

    def prefetch_from_storage(self, handle: Any, *arguments: Any, **more: Any) -> None:
        operation = SimpleNamespace(completed_tokens=0, storage_hit_count=PAGE)
        self.ongoing_prefetch[handle] = SimpleNamespace(operation=operation, host_indices=None)

    def release_aborted_request(self, handle: Any) -> None:
        pass


def ordered(kind: OrderKind, number: str, **more: Any) -> CacheOrder:
    return CacheOrder(kind, number, array("q", range(2 * PAGE)).tobytes(), **more)


class TestOrdersOnATree:
    def test_one_that_ends_with_an_error_is_told_and_the_others_of_the_step_too(self) -> None:
        tree, told = Tree(), list[Told]()
        orders = TreeOrders(tree, told.append)
        for number in ("a", "b"):
            orders.do(ordered(OrderKind.PREFETCH, number))
        told.clear()
        tree.ongoing_prefetch.clear()
        tree.fails = 1
        orders.look_after()
        assert [(each.number, each.state) for each in told] == [
            ("a", OperationState.FAILED),
            ("b", OperationState.DECLINED),
        ]

    def test_a_cut_of_one_that_the_tree_does_not_know_ends_it(self) -> None:
        told = list[Told]()
        TreeOrders(Tree(), told.append).do(CacheOrder(OrderKind.CUT, "gone", stop=Stop.DEADLINE))
        assert told == [Told("gone", OperationState.CANCELLED, Stop.DEADLINE)]


def with_backend(storage: Any, backend: Any) -> Any:
    storage._backend.close(10)
    storage._backend = backend
    backend.register([])
    return storage


def test_a_store_that_fails_is_a_miss_and_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyBackend(memory_backend(), lambda call, key: FAILED if key.endswith(HASHES[2]) else None)
    storage = created(host_pool(), storage="file", storage_config={"path": str(tmp_path)})
    with_backend(storage, faulty)
    assert storage.batch_set_v1(HASHES[:4], indices(0, 1, 2, 3)) == [True, True, False, True]
    assert storage.batch_exists(HASHES[:4]) == 2
    assert storage.batch_get_v1(HASHES[:4], indices(0, 1, 2, 3)) == [True, True, False, True]
    assert sum("injected" in record.message for record in caplog.records) == 1, "not a line a page"


def test_a_page_that_timed_out_is_not_given_back_before_it_is_quiet(tmp_path: Path) -> None:
    """SGLang uses the page again as soon as the call returns."""
    faulty = FaultyBackend(memory_backend(), lambda call, key: HANG if key.endswith(HASHES[0]) else None)
    storage = created(host_pool(), storage="file", storage_config={"path": str(tmp_path)}, timeout=0.05)
    with_backend(storage, faulty)
    answers: list[list[bool]] = []
    asking = threading.Thread(target=lambda: answers.append(storage.batch_get_v1(HASHES[:1], indices(0))))
    asking.start()
    while not faulty._hanging:
        time.sleep(0.01)
    time.sleep(0.1)  # in which it must not answer
    assert not answers
    faulty.release()
    asking.join(30)
    assert answers == [[False]]


def test_a_store_that_is_still_being_cleared_counts_as_empty(tmp_path: Path) -> None:
    storage = created(host_pool(), storage="file", storage_config={"path": str(tmp_path)})
    assert storage.batch_set_v1(HASHES[:4], indices(0, 1, 2, 3)) == [True] * 4
    # More than a call without time comes through: each of its threads looks at one.
    for first in range(PAGES, PAGES + 64, 4):
        others = [f"{number:064x}" for number in range(first, first + 4)]
        assert storage.batch_set_v1(others, indices(0, 1, 2, 3)) == [True] * 4
    storage._clearing = Clearing(seconds=0.0, pause=1.0)
    assert not storage.clear()
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_get_v1(HASHES[:4], indices(0, 1, 2, 3)) == [False] * 4
    assert storage.batch_set_v1(HASHES[:4], indices(0, 1, 2, 3)) == [False] * 4
    storage.close()


def test_it_is_detached_while_its_threads_are_busy(settings: dict[str, object]) -> None:
    pool = host_pool()
    storage = created(pool, **settings)
    stop, wrong = threading.Event(), []
    rounds = dict.fromkeys((0, 4, 8), 0)

    def work(first: int) -> None:
        while not stop.is_set():
            try:
                storage.batch_set_v1(HASHES[first : first + 4], indices(*range(first, first + 4)))
                storage.batch_get_v1(HASHES[first : first + 4], indices(*range(first, first + 4)))
                storage.batch_exists(HASHES)
                rounds[first] += 1
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(first,)) for first in rounds]
    for thread in threads:
        thread.start()
    for _ in range(3):
        storage.clear()
    began = time.monotonic()
    storage.close()
    assert time.monotonic() - began < 10
    closed = dict(rounds)
    end = time.monotonic() + 30
    while not wrong and any(rounds[first] < closed[first] + 2 for first in rounds):
        assert time.monotonic() < end, f"the threads do not go on: {rounds}, {closed} when it was closed"
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert storage.batch_exists(HASHES) == 0 and storage.batch_get_v1(HASHES[:1], indices(0)) == [False]
