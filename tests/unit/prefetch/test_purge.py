"""What a purge drops is told, also where storage does not answer in time; and nobody works for what nobody hears."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvgrpc.hashing import page_hashes, storage_seed
from kvgrpc.model import RankId, RankRef, Tier
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.storage.base import Removed, StorageDown
from kvgrpc.prefetch.storage.flat import FlatBackend
from kvgrpc.prefetch.tree.cache import TieredCache
from tests.support.faults.storage import DOWN, FaultyBackend, MemoryStore, memory_backend

SHAPE = PageShape.mha(1, 4, 1, 8, "float16")
SECONDS = 20.0
Told = list[tuple[Tier, str, list[str]]]


def hashes(count: int, extra_key: str = "") -> list[str]:
    return [each.hex() for each in page_hashes(range(4 * count), 4, after=storage_seed(extra_key or None))]


class Rig:
    """A cache of host and storage whose changes are told."""

    def __init__(self, storage: FaultyBackend | None = None, **options: Any) -> None:
        self.told: Told = []
        self.storage = storage or FaultyBackend(memory_backend())
        options = {"listener": self._tell, **options}
        config = PrefetchConfig(model="m", shape=SHAPE, host_pages=16, storage=self.storage, **options)
        self.manager = PrefetchManager(config, RankRef(RankId("e"), 1))

    def _tell(self, tier: Tier, what: str, pages: Sequence[str], before: str) -> None:
        self.told.append((tier, what, list(pages)))

    def fill(self, names: Sequence[str], extra_key: str = "") -> None:
        pages = self.manager.host.table.take(len(names))
        assert not isinstance(pages, NotEnoughPages)
        self.manager.host.table.commit(pages)
        self.manager.known_cache().keep(names, 0, pages, extra_key)

    def store(self, names: Sequence[str], extra_key: str) -> None:
        backend = self.storage.inner
        assert isinstance(backend, FlatBackend)
        for name in names:
            backend._store.put(self.manager.keys.of(name, extra_key=extra_key), b"page")

    def removed_from_storage(self) -> list[str]:
        return [each for tier, what, pages in self.told if (tier, what) == (Tier.STORAGE, "removed") for each in pages]


def test_pages_that_may_be_gone_are_told_where_storage_does_not_answer() -> None:
    rig = Rig(key_mode="sglang")
    rig.fill(hashes(3, "lora"), "lora")
    rig.storage.fault = lambda call, key: DOWN if call == "delete" else None
    with pytest.raises(StorageDown):
        rig.manager.purger.purge([Tier.HOST, Tier.STORAGE], "lora", dry_run=False, timeout=SECONDS)
    assert sorted(rig.removed_from_storage()) == sorted(hashes(3, "lora"))
    assert rig.manager.close(SECONDS) and rig.storage.close(SECONDS)


def test_what_storage_dropped_after_the_time_of_a_clear_is_told_once() -> None:
    gate, begun, dropped = threading.Event(), threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def clear(self, prefix: str) -> list[str]:
            gone = super().clear(prefix)
            begun.set()
            assert gate.wait(SECONDS)
            return gone

    store = Slow()
    told: list[str] = []
    store.pages.update({"a": b"1", "b": b"2"})
    backend = FlatBackend("slow", store)

    def tell(keys: Sequence[str]) -> None:
        told.extend(keys)
        dropped.set()

    backend.on_removed(tell)
    while not begun.is_set():
        with pytest.raises(StorageDown):
            backend.clear(timeout=0.2)
    gate.set()
    assert dropped.wait(SECONDS) and backend.close(SECONDS)
    assert sorted(told) == ["a", "b"]


def test_storage_works_for_no_listener_where_nobody_hears_of_its_pages() -> None:
    for listener in (None, lambda tier, what, pages, before: None):
        rig = Rig(listener=listener)
        assert isinstance(rig.storage.inner, FlatBackend)
        assert bool(rig.storage.inner._removed) is (listener is not None)
        assert rig.manager.close(SECONDS) and rig.storage.close(SECONDS)
        assert not rig.storage.inner._removed


@pytest.mark.parametrize(
    ("tiers", "extra_key", "dry_run", "key_mode", "looks"),
    [
        ([Tier.HOST], None, False, "kvgrpc", False),
        ([Tier.HOST, Tier.STORAGE], None, True, "kvgrpc", False),
        ([Tier.HOST, Tier.STORAGE], "lora", True, "kvgrpc", False),
        ([Tier.HOST, Tier.STORAGE], None, False, "kvgrpc", False),
        ([Tier.STORAGE], "lora", False, "kvgrpc", True),
        ([Tier.HOST], "lora", False, "sglang", False),
        ([Tier.STORAGE], "lora", True, "sglang", True),
        ([Tier.STORAGE], "lora", False, "sglang", True),
    ],
)
def test_names_of_pages_are_gathered_for_storage_that_has_no_others_or_where_they_go_first(
    monkeypatch: pytest.MonkeyPatch,
    tiers: list[Tier],
    extra_key: str | None,
    dry_run: bool,
    key_mode: str,
    looks: bool,
) -> None:
    rig = Rig(key_mode=key_mode)
    rig.fill(hashes(3, "lora"), "lora")
    asked, look = [], TieredCache.hashes

    def noted(cache: TieredCache, tier: Tier, extra_key: str | None = None) -> list[str]:
        asked.append(tier)
        return look(cache, tier, extra_key)

    monkeypatch.setattr(TieredCache, "hashes", noted)
    rig.manager.purger.purge(tiers, extra_key, dry_run=dry_run, timeout=SECONDS)
    assert bool(asked) is looks
    assert rig.manager.close(SECONDS) and rig.storage.close(SECONDS)


class SaysNothing(FaultyBackend):
    """As a Mooncake Store, which does not tell what it drops."""

    def on_removed(self, removed: Removed) -> None:
        return None


def test_a_rank_tells_itself_what_it_purges_from_storage_that_says_nothing() -> None:
    rig = Rig(SaysNothing(memory_backend()))
    rig.fill(hashes(3))
    rig.manager.purger.purge([Tier.STORAGE], None, dry_run=False, timeout=SECONDS)
    assert sorted(rig.removed_from_storage()) == sorted(hashes(3))
    assert rig.manager.close(SECONDS) and rig.storage.close(SECONDS)


class TestPagesOfAnExtraKeyThatAreKnown:
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        rig = Rig()
        rig.fill(hashes(3, "lora"), "lora")
        rig.store(hashes(3, "lora"), "lora")
        yield rig
        assert rig.manager.close(SECONDS) and rig.storage.close(SECONDS)

    def test_they_are_gone_and_told_where_storage_has_too_many_others_to_come_to_all(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def too_many(prefix: str = "", timeout: float = 60.0) -> int:
            raise StorageDown("others are there", "memory")

        monkeypatch.setattr(rig.storage, "clear", too_many)
        with pytest.raises(StorageDown):
            rig.manager.purger.purge([Tier.STORAGE], "lora", dry_run=False, timeout=SECONDS)
        assert rig.manager.controller.count_in_storage(hashes(3, "lora"), SECONDS, "lora") == 0
        assert sorted(rig.removed_from_storage()) == sorted(hashes(3, "lora"))

    def test_they_are_counted_once(self, rig: Rig) -> None:
        rig.store(hashes(2, "other"), "lora")  # nobody knows them any more
        purged = rig.manager.purger.purge([Tier.STORAGE], "lora", dry_run=False, timeout=SECONDS)
        assert purged.storage == 5
        assert sorted(rig.removed_from_storage()) == sorted(hashes(3, "lora") + hashes(2, "other"))

    def test_storage_that_cannot_drop_them_one_by_one_is_cleared_all_the_same(self, rig: Rig) -> None:
        rig.storage.fault = lambda call, key: DOWN if call == "delete" else None
        assert rig.manager.purger.purge([Tier.STORAGE], "lora", dry_run=False, timeout=SECONDS).storage == 3
