"""A prefetch brings pages behind a prefix that is cached: without it nobody finds them, so it stays, or the end says
so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvgrpc.prefetch.model import NotEnoughPages, OperationState, PageOutcome, PrefetchLimits, Stop
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.runtime.controller import CacheController
from kvgrpc.prefetch.tree.cache import TieredCache
from kvgrpc.prefetch.tree.keeper import CompletionQueue
from kvgrpc.prefetch.tree.prefix_tree import PrefixTree
from tests.support.faults.storage import FaultyBackend, memory_backend

SHAPE = PageShape.mha(1, 4, 1, 8, "float16")
LIMITS = PrefetchLimits(threshold_tokens=4, batch_pages=4, occupancy=1.0)
HOST = 8
SECONDS = 20.0


def hashes(count: int, name: str = "a") -> list[str]:
    return [f"{name}{number:04d}" for number in range(count)]


class Rig:
    """A cache of 8 host pages over storage that has 12 pages of the prompt "a"."""

    def __init__(self) -> None:
        self.host = HostPool(SHAPE, HOST)
        self.cache = TieredCache(self.host)
        self.storage = FaultyBackend(memory_backend())
        self.controller = CacheController(
            self.host, self.storage, lambda page_hash, extra_key: page_hash, keeper=self.cache, limits=LIMITS
        )
        self.cache.attach(self.controller)
        for first in (0, 4, 8):
            part = self._pages(4)
            assert self.controller.write_storage(hashes(12)[first : first + 4], part).wait(SECONDS)
            self.host.table.release(part)

    def on_host(self, names: Sequence[str]) -> None:
        assert self.cache.keep(names, 0, self._pages(len(names)), "") == len(names)

    def prefetch(self, names: Sequence[str]) -> Operation:
        operation = self.controller.prefetch(names)
        assert operation.wait(SECONDS)
        return operation

    def close(self) -> None:
        assert self.controller.close(SECONDS)
        self.cache.clear()
        assert self.host.table.counts() == {"free": HOST, "reserved": 0, "present": 0, "read": 0}

    def _pages(self, count: int) -> Pages:
        pages = self.host.table.take(count)
        assert not isinstance(pages, NotEnoughPages)
        self.host.table.commit(pages)
        return pages


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_room_comes_from_others_although_its_own_prefix_is_older(rig: Rig) -> None:
    rig.on_host(hashes(4))
    rig.on_host(hashes(4, "b"))
    operation = rig.prefetch(hashes(8))
    assert (operation.state, operation.completed) == (OperationState.DONE, 8)
    assert rig.cache.leading(hashes(8)) == 8
    assert rig.cache.leading(hashes(4, "b")) == 0


def test_the_end_of_its_own_prompts_run_that_it_does_not_stand_behind_may_go(rig: Rig) -> None:
    rig.on_host([*hashes(4), *hashes(4, "other end of a")])
    assert rig.prefetch(hashes(8)).state is OperationState.DONE
    assert rig.cache.leading(hashes(8)) == 8


def test_fewer_come_where_there_is_no_room_beside_its_prefix(rig: Rig) -> None:
    rig.on_host(hashes(6))
    rig.on_host(hashes(2, "b"))
    operation = rig.prefetch(hashes(12))
    assert (operation.state, operation.agreed, operation.completed) == (OperationState.DONE, 8, 8)
    assert rig.cache.leading(hashes(12)) == 8


def test_a_host_full_of_its_prefix_has_no_room(rig: Rig) -> None:
    rig.on_host(hashes(8))
    operation = rig.prefetch(hashes(12))
    assert (operation.state, operation.stop) == (OperationState.DECLINED, Stop.CAPACITY)
    assert rig.cache.leading(hashes(12)) == 8


@pytest.mark.parametrize("left", [0, 1, 3])
def test_pages_whose_prefix_goes_while_they_are_read_are_lost_and_never_done(rig: Rig, left: int) -> None:
    rig.on_host(hashes(4))

    def evicting(call: str, key: str) -> None:
        if call == "read":
            rig.cache.evict_host(rig.cache.leading(hashes(4)) - left)

    rig.storage.fault = evicting
    operation = rig.prefetch(hashes(8))
    assert (operation.state, operation.stop) == (OperationState.FAILED, Stop.PAGE_LOST)
    assert operation.completed == rig.cache.leading(hashes(8)) == left
    assert operation.outcomes == [PageOutcome.SKIPPED] * 4
    assert rig.host.table.counts()["present"] == left


def test_what_a_keeper_does_not_find_is_not_completed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = rig.cache.keep
    monkeypatch.setattr(rig.cache, "keep", lambda *arguments: keep(*arguments) - 2)
    operation = rig.prefetch(hashes(6))
    assert (operation.state, operation.stop, operation.completed) == (OperationState.PARTIAL, Stop.PAGE_LOST, 4)
    assert operation.outcomes == [PageOutcome.OK] * 4 + [PageOutcome.SKIPPED] * 2


def test_a_keeper_that_raises_leaves_nothing_completed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.on_host(hashes(2))

    def broken(*arguments: object) -> int:
        raise KeyError("a bug of the engine")

    monkeypatch.setattr(rig.cache, "keep", broken)
    operation = rig.prefetch(hashes(6))
    assert (operation.state, operation.completed) == (OperationState.FAILED, 2)
    assert operation.outcomes == [PageOutcome.SKIPPED] * 4


def test_a_keeper_that_does_not_say_what_it_found_leaves_nothing_completed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.on_host(hashes(2))
    keep = rig.cache.keep
    monkeypatch.setattr(rig.cache, "keep", lambda *arguments: keep(*arguments) and None)
    operation = rig.prefetch(hashes(6))
    assert (operation.state, operation.completed) == (OperationState.FAILED, 2)
    assert operation.outcomes == [PageOutcome.SKIPPED] * 4
    assert operation.failure is not None and "keep answered None" in operation.failure.message
    assert rig.host.table.counts()["present"] == 6, "it has them, whatever it answers"


def test_a_listener_that_fails_changes_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("a bug of whoever listens")

    rig.cache._listener = broken
    operation = rig.prefetch(hashes(8))
    assert (operation.state, operation.completed) == (OperationState.DONE, 8)
    assert rig.cache.evict_host(3) == 3 and rig.cache.leading(hashes(8)) == 5
    assert rig.host.table.counts()["present"] == 5
    assert caplog.text.count("a listener of the cache failed") == 2


def test_host_pages_behind_a_run_that_is_nowhere_any_more_are_not_kept() -> None:
    tree = PrefixTree()
    assert tree.insert_device(["a"], [0]) == []
    assert tree.insert_host(["a", "b"], 1, [1]) == []
    node = tree.match(["a"]).last
    assert node is not None and tree.drop_device(node) == [0]
    assert tree.insert_host(["a", "b", "c"], 2, [2]) == [2]
    assert tree.host_pages() == 1


class EmptyKeeper(CompletionQueue):
    """Of an engine that counts what it has."""

    def __len__(self) -> int:
        return 0


def test_a_keeper_that_is_empty_is_the_keeper_all_the_same() -> None:
    host = HostPool(SHAPE, 4)
    keeper = EmptyKeeper(host.table)
    controller = CacheController(host, None, lambda page_hash, extra_key: page_hash, keeper=keeper)
    assert controller.keeper is keeper
    assert controller.close(SECONDS)
