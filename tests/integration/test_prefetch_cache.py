"""Conversations through small tiers in any order, under every write policy: each page that is used has its own
bytes."""

from __future__ import annotations

import random
import sys

import pytest

from kvgrpc.prefetch.model import NotEnoughPages, PrefetchLimits, WritePolicy
from tests.support.faults.storage import FAILED, Fault
from tests.support.tiered_engine import SECONDS, SHAPE, Engine
from tests.support.waiting import wait_until


def conversation(chance: random.Random) -> list[str]:
    """Hashes that cover what lies before them; many conversations begin alike."""
    text = chance.choice(("system ", "tools ")) + str(chance.randint(0, 4)) + "-"
    words = [text + str(turn) for turn in range(chance.randint(1, 12))]
    return ["|".join(words[: end + 1]) for end in range(len(words))]


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("seed", range(2))
def test_every_page_that_a_request_uses_has_its_own_bytes(policy: WritePolicy, seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine(policy)
    engine.storage.fault = lambda call, key: FAILED if call == "read" and chance.random() < 0.02 else None
    for _ in range(100):
        hashes = conversation(chance)
        if chance.random() < 0.4:
            engine.controller.prefetch(hashes)
        if chance.random() < 0.1:
            engine.cache.evict_device(chance.randint(1, 24))
        if chance.random() < 0.1:
            engine.cache.evict_host(chance.randint(1, 40))
        if chance.random() < 0.1:
            engine.cache.write_back(hashes)
        engine.request(hashes)
    assert engine.computed > 0
    # What is used twice only is seldom on the host when it has left the device.
    assert engine.loaded > 0 or policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    engine.close()


@pytest.mark.parametrize("seed", range(15, 21))
def test_a_write_back_to_a_host_that_is_smaller_than_the_device_keeps_every_prefix_whole(seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine(WritePolicy.WRITE_BACK, device_pages=16, host_pages=6)
    for _ in range(60):
        hashes = conversation(chance)
        if chance.random() < 0.3:
            engine.cache.write_back(hashes)
        if chance.random() < 0.3:
            engine.cache.evict_device(chance.randint(1, 8))
        engine.request(hashes)
        assert [engine.cache._tree.most_victims(0.0, device=device) for device in (True, False)] == [
            sum(len(pages) for pages in there if pages)
            for there in zip(*((node.device, node.host) for node in engine.cache._tree.nodes()), strict=True)
        ]
        for node in engine.cache._tree.nodes():
            before = node.parent
            assert node.device is None or before is engine.cache._tree.root or (before and before.device is not None)
    engine.close()


class TestWritePolicies:
    def test_room_for_a_write_back_that_cuts_a_prefix_costs_no_page_of_its_front(self) -> None:
        engine = Engine(WritePolicy.WRITE_BACK, device_pages=8, host_pages=3)
        hashes = ["d", "d e", "d e f"]
        engine.request(["c"])
        engine.request(hashes[:1])
        engine.request(hashes)
        assert engine.cache.write_back(hashes) == 3 and engine.copies.wait_idle(SECONDS)
        wait_until(lambda: not engine.controller.book.open())  # a backup's pages cannot go
        # "c" goes first, and takes the host page of "d e f".
        assert engine.cache.take_device(8) == NotEnoughPages(3)
        assert engine.copies.wait_idle(SECONDS)
        assert engine.cache.leading_by_tier(hashes) == (2, 2)
        engine.request(hashes[:2])
        engine.close()

    def test_write_through_copies_at_once_and_backs_up(self) -> None:
        engine = Engine(WritePolicy.WRITE_THROUGH)
        engine.request(["a", "a b", "a b c"])
        assert engine.cache.leading_by_tier(["a", "a b", "a b c"]) == (3, 3)
        assert engine.cache.evict_device(24) == 3
        assert engine.cache.leading_by_tier(["a", "a b", "a b c"]) == (0, 3)
        wait_until(lambda: engine.controller.count_in_storage(["a", "a b", "a b c"], 1.0) == 3)
        engine.close()

    def test_selective_copies_what_is_used_again(self) -> None:
        engine = Engine(WritePolicy.WRITE_THROUGH_SELECTIVE)
        for _ in range(2):
            engine.request(["a", "a b"])
            assert engine.copies.host.table.counts()["present"] == 0
        engine.request(["a", "a b"])
        assert engine.copies.host.table.counts()["present"] == 2
        engine.close()

    def test_write_back_copies_what_would_go_and_says_to_ask_again(self) -> None:
        engine = Engine(WritePolicy.WRITE_BACK, device_pages=4)
        engine.request(["a", "a b", "a b c"])
        assert engine.copies.host.table.counts()["present"] == 0
        assert engine.cache.take_device(3) == NotEnoughPages(2)
        assert engine.copies.wait_idle(SECONDS)
        taken = engine.cache.take_device(3)
        assert not isinstance(taken, NotEnoughPages)
        assert engine.cache.leading_by_tier(["a", "a b", "a b c"]) == (1, 3)
        engine.copies.device.table.release(taken)
        engine.request(["a", "a b", "a b c"])
        assert engine.loaded == 2
        engine.close()

    def test_write_back_frees_no_page_before_it_is_copied_however_the_prefix_is_cut(self) -> None:
        engine = Engine(WritePolicy.WRITE_BACK, device_pages=4)
        engine.request(["a"])
        engine.request(["a", "a b"])
        assert engine.cache.take_device(4) == NotEnoughPages(2)
        assert engine.copies.wait_idle(SECONDS)
        assert engine.cache.leading_by_tier(["a", "a b"]) == (2, 2)
        taken = engine.cache.take_device(4)
        assert not isinstance(taken, NotEnoughPages)
        assert engine.cache.leading_by_tier(["a", "a b"]) == (0, 2)
        engine.copies.device.table.release(taken)
        engine.request(["a", "a b"])
        assert engine.loaded == 2
        engine.close()

    def test_a_write_never_costs_the_prefix_that_it_stands_behind(self) -> None:
        engine = Engine(WritePolicy.WRITE_THROUGH_SELECTIVE, host_pages=4)
        hashes = [f"{'x' * number}" for number in range(1, 7)]
        engine.request(hashes[:4])
        engine.request(hashes)
        for end in (4, 6):
            engine.cache.write_back(hashes[:end])
            assert engine.copies.wait_idle(SECONDS)
            wait_until(lambda: not engine.controller.book.open())  # a backup's pages cannot go
        engine.cache.evict_device(24)
        assert engine.cache.leading_by_tier(hashes) == (0, 4)
        engine.close()

    def test_nothing_is_written_behind_a_prefix_that_has_no_room(self) -> None:
        engine = Engine(WritePolicy.WRITE_BACK, host_pages=2)
        engine.request(["a", "a b", "a b c"])
        engine.request(["a", "a b", "a b c", "a b c d"])
        engine.cache.evict_device(1)
        assert engine.copies.wait_idle(SECONDS)
        assert engine.copies.host.table.free_count == 2
        engine.close()

    def test_a_prefix_of_very_many_runs_is_written_as_one_of_few(self) -> None:
        pages, most = 300, sys.getrecursionlimit()
        engine = Engine(WritePolicy.WRITE_BACK, device_pages=pages, host_pages=pages)
        taken = engine.cache.take_device(pages)
        assert not isinstance(taken, NotEnoughPages)
        hashes = [f"{number:04d}" for number in range(pages)]
        for end in range(1, pages + 1):
            engine.cache.insert(hashes[:end], taken[:end].tolist())
        sys.setrecursionlimit(pages)
        try:
            assert engine.cache.take_device(1) == NotEnoughPages(1)
        finally:
            sys.setrecursionlimit(most)
        assert engine.copies.wait_idle(SECONDS)
        assert engine.copies.host.table.counts()["present"] == pages
        wait_until(lambda: not engine.controller.book.open())
        engine.close()

    def test_a_copy_on_its_way_survives_that_its_run_is_split(self) -> None:
        engine = Engine(WritePolicy.WRITE_BACK)
        hashes = ["a", "a b", "a b c", "a b c d"]
        engine.request(hashes)
        assert engine.cache.write_back(hashes) == 4
        engine.cache.match(hashes[:2])
        assert engine.copies.wait_idle(SECONDS)
        held = engine.cache.match(hashes)
        engine.cache.release(held)
        pages = engine.cache.pages_of(hashes)
        assert len(pages) == 4
        for page, page_hash in zip(pages, hashes, strict=True):
            assert len(engine.copies.host.flat(int(page))) == SHAPE.page_bytes, page_hash
        engine.copies.host.table.end_read(pages)
        engine.close()


@pytest.mark.parametrize("policy", WritePolicy)
def test_room_that_cannot_be_had_costs_nothing(policy: WritePolicy) -> None:
    engine = Engine(policy, device_pages=8, host_pages=4)
    engine.request(["a", "a b"])
    engine.cache.write_back(["a", "a b"])
    assert engine.copies.wait_idle(SECONDS)
    wait_until(lambda: not engine.controller.book.open())
    held = engine.cache.match(["a"])
    assert engine.cache.take_device(9) == NotEnoughPages(2) and engine.cache.take_device(8) == NotEnoughPages(1)
    assert engine.cache.reserve(5, ()) == NotEnoughPages(2) and engine.cache.reserve(4, ()) == NotEnoughPages(1)
    assert engine.cache.leading_by_tier(["a", "a b"]) == (2, 2)
    engine.cache.release(held)
    assert engine.cache.reserve(4, ["a"]) == NotEnoughPages(1)
    engine.cache.evict_device(8)
    assert engine.cache.leading_by_tier(["a", "a b"]) == (0, 2)
    engine.close()


def test_a_write_that_has_no_room_costs_nothing() -> None:
    engine = Engine(WritePolicy.WRITE_THROUGH, host_pages=4)
    engine.request(["a", "a b"])
    wait_until(lambda: not engine.controller.book.open())
    engine.request(["b" * number for number in range(1, 6)])
    engine.cache.evict_device(24)
    assert engine.cache.leading_by_tier(["a", "a b"]) == (0, 2)
    engine.close()


def test_a_device_that_copies_nothing_costs_requests_no_page(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("the device is gone")

    engine = Engine(WritePolicy.WRITE_THROUGH)
    with monkeypatch.context() as patched:
        patched.setattr(engine.copies, "write", broken)
        for _ in range(2):
            engine.request(["a", "a b"])
    assert engine.copies.host.table.free_count == 40 and engine.cache.evict_device(24) == 2
    assert "a copy to the host could not be begun" in caplog.text
    engine.request(["a", "a b"])
    assert engine.cache.evict_device(24) == 2
    held = engine.cache.match(["a", "a b"])
    monkeypatch.setattr(engine.copies, "load", broken)
    with pytest.raises(RuntimeError):
        engine.cache.load(held)
    engine.cache.release(held)
    wait_until(lambda: not engine.controller.book.open())
    assert engine.copies.device.table.free_count == 24 and engine.cache.evict_host(40) == 2
    engine.close()


def test_what_fails_at_every_request_is_logged_a_few_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("not again")

    engine = Engine(WritePolicy.WRITE_THROUGH)
    engine.cache._listener = broken
    with monkeypatch.context() as patched:
        patched.setattr(engine.copies, "write", broken)
        for number in range(20):
            engine.request([str(number)])
    assert caplog.text.count("a copy to the host could not be begun") == 5
    assert caplog.text.count("a listener of the cache failed") == 5
    engine.close()


def test_pages_that_cannot_be_backed_up_stay_on_the_host_and_break_no_ack(caplog: pytest.LogCaptureFixture) -> None:
    limits = PrefetchLimits(threshold_tokens=4, operations=1)
    engine = Engine(WritePolicy.WRITE_THROUGH, limits=limits)
    engine.storage.fault = lambda call, key: Fault(delay=2.0) if call == "write" else None
    engine.request(["a"])
    engine.request(["b"])
    engine.storage.fault = lambda call, key: None
    assert engine.controller.close(SECONDS)
    engine.request(["c"])
    assert [engine.cache.leading([each]) for each in "abc"] == [1, 1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "are not backed up" in caplog.text
    engine.close()


def test_a_prefetch_beside_requests_that_compute_the_same_keeps_one_of_each_page() -> None:
    engine = Engine(WritePolicy.WRITE_THROUGH)
    hashes = [f"{'x' * number}" for number in range(1, 9)]
    engine.request(hashes)
    wait_until(lambda: engine.controller.count_in_storage(hashes, 1.0) == 8)
    engine.cache.evict_device(24)
    engine.cache.evict_host(40)
    engine.storage.fault = lambda call, key: Fault(delay=0.05) if call == "read" else None
    operation = engine.controller.prefetch(hashes)
    engine.request(hashes)
    assert operation.wait(SECONDS)
    assert engine.copies.wait_idle(SECONDS)
    assert engine.copies.host.table.counts()["present"] == 8
    engine.request(hashes)
    engine.close()
