"""The storage class over SGLang's own parts: its factory, host pools and backend ``file``. No engine is started."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvgrpc.engines.sglang import hicache
from kvgrpc.engines.sglang.cache.common import common_of
from kvgrpc.engines.sglang.clearing import Clearing
from kvgrpc.engines.sglang.hicache import _pages
from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.storage import base
from kvgrpc.prefetch.storage.keys import KeyMode
from kvgrpc.prefetch.storage.mooncake.local import LocalStore
from tests.engines.host_pools import HASHES, PAGES, PAGES_OF, config, flat, host_pool, indices
from tests.support.faults.storage import FAILED, HANG, FaultyBackend, MemoryStore, memory_backend

LAYOUTS = ["page_first", "page_first_direct", "layer_first"]


def created(pool: Any, **extra: Any) -> Any:
    """As SGLang attaches it."""
    storage = StorageBackendFactory.create_backend("dynamic", config(**extra), pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    if hasattr(storage, "on_host_pools_registered"):  # since 0.5.23
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
        known = getattr(pool, field, pool.head_dim)  # 0.5.21 has no v_head_dim here
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


class HangingStore(MemoryStore):
    """Does not say where pages are until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def size(self, key: str) -> int | None:
        assert self.let_go.wait(60.0)
        return super().size(key)


def test_a_store_that_hangs_holds_the_scheduler_of_a_decode_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks on its main thread, for each request: all that it decodes stood still for four seconds each time."""
    monkeypatch.setattr(hicache, "_SCHEDULER_SECONDS", 0.05)
    monkeypatch.setattr(hicache, "_AWAY_SECONDS", 60.0)
    store = HangingStore()
    storage = created(host_pool(), storage="file", storage_config={"path": str(tmp_path)})
    backend = FaultyBackend(memory_backend(store))
    with_backend(storage, backend)
    began = time.monotonic()
    assert [storage.batch_exists(HASHES) for _ in range(20)] == [0] * 20
    assert len(backend.calls) == 1 and time.monotonic() - began < 4.0, "the time of one batch"
    assert sum("does not answer" in record.getMessage() for record in caplog.records) == 1
    store.let_go.set()
    assert storage.batch_set_v1(HASHES[:2], indices(0, 1)) == [True, True]
    assert storage.batch_exists(HASHES) == 0, "it is not asked again yet"
    asked = threading.Thread(target=lambda: found.append(storage.batch_exists(HASHES)))
    found = list[int]()
    asked.start()
    asked.join(30)
    assert found == [2], "SGLang's other threads ask it as ever"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60.0)
    assert storage.batch_exists(HASHES) == 2
    monkeypatch.undo()
    storage.close()


def breaks(call: str, key: str) -> None:
    raise RuntimeError("a bug of the store")


def test_an_error_of_whatever_kind_ends_no_thread_of_sglangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its threads of prefetches (0.5.23), and of backups too (0.5.21), end with an error, and all that comes later
    waits for ever."""
    pool = host_pool()
    storage = created(pool, storage="file", storage_config={"path": str(tmp_path)})
    with_backend(storage, FaultyBackend(memory_backend(), breaks))
    flat_pages = [flat(pool, page) for page in range(2)]
    assert storage.batch_set_v1(HASHES[:2], indices(0, 1)) == storage.batch_get_v1(HASHES[:2], indices(0, 1))
    assert storage.batch_get_v1(HASHES[:2], indices(0, 1)) == [False, False]
    assert storage.batch_set_v2([transfer("kv", [0, 1])]) == storage.batch_get_v2([transfer("kv", [0, 1])])
    assert storage.batch_get_v2([transfer("kv", [0, 1]), transfer("unknown", [0])]) == {
        "kv": [False, False],
        "unknown": [False],
    }
    assert storage.batch_exists(HASHES) == 0 and not storage.exists(HASHES[0])
    assert storage.batch_exists_v2(HASHES, [transfer("kv", [0, 1])]).kv_hit_pages == 0
    assert storage.batch_get(HASHES[:2], flat_pages) == [None, None]
    assert storage.batch_get(HASHES[:1], [flat_pages[0].reshape(2, -1).T]) == [None], "not contiguous"
    assert not storage.batch_set(HASHES[:2], flat_pages) and not storage.set(HASHES[0], flat_pages[0])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "write: RuntimeError: a bug of the store" in lines[0]


def test_a_pool_of_which_a_key_mode_has_no_names_is_not_stored(tmp_path: Path) -> None:
    settings = {"storage": "file", "storage_config": {"path": str(tmp_path)}, "key_mode": "sglang-seed"}
    storage = created(host_pool(), **settings)
    storage.register_mem_host_pool_v2(host_pool(), "indexer")
    done = storage.batch_set_v2([transfer("kv", [0, 1]), transfer("indexer", [0, 1])])
    assert done == {"kv": [True, True], "indexer": [False, False]}
    assert storage.batch_exists_v2(HASHES, [transfer("indexer", [0, 1])]).kv_hit_pages == 0
    storage.close()


def test_a_prompt_of_more_pages_than_a_store_is_asked_for_at_once_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks for all pages of a prompt; with pages of one token 65,536 are no long one."""
    kv, indexer = host_pool(), host_pool()
    storage = created(kv, storage="file", storage_config={"path": str(tmp_path)})
    storage.register_mem_host_pool_v2(indexer, "indexer")
    assert storage.batch_set_v1(HASHES[:10], indices(*range(10))) == [True] * 10
    assert storage.batch_set_v2([transfer("indexer", [0, 1, 2, 3, 4, 5])]) == {"indexer": [True] * 6}
    for module in (base, hicache):
        monkeypatch.setattr(module, "MAX_BATCH_PAGES", 4)
    assert [storage.batch_exists(HASHES[:count]) for count in (3, 4, 5, 8, 12)] == [3, 4, 5, 8, 10]
    assert storage.batch_exists_v2(HASHES, [transfer("indexer", [0, 1])]).kv_hit_pages == 6
    storage.close()


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
