"""Pulls of the storage class over SGLang's own host pools. No engine is started; test_sglang_pull.py starts two."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvgrpc.engines.sglang.cache.orders import OrderQueue
from kvgrpc.engines.sglang.cache.served import SglangCache
from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.model import Layout, RankRef, Role
from kvgrpc.prefetch.model import Namespace, PrefetchLimits
from kvgrpc.prefetch.storage.base import StorageDown
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.server import CacheServer, RankConfig, RegistryServer, open_cache
from tests.engines.host_pools import HASHES, PAGE, PAGES_OF, config, flat, host_pool, indices
from tests.support.waiting import wait_until

# Ranks of a holder and of a taker.
SIZES = [(2, 2), (2, 1), (1, 2)]
HEADS = 4
# A busy machine's ranks may say nothing for seconds.
PATIENT = {"exported_pages": 8, "staging_pages": 16, "answer_timeout": 8.0, "stall_timeout": 8.0}


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
