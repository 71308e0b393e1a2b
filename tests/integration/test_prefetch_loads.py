"""Requests that load the same prefix at the same time: each uses pages with its own bytes until it is over, and no page
has two owners."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest, PageStateInvalid
from kvgrpc.prefetch.copies.copy_operation import Direction
from kvgrpc.prefetch.model import NotEnoughPages, WritePolicy
from kvgrpc.prefetch.pools.pages import Pages, PageState, as_pages
from kvgrpc.prefetch.tree.cache import PinnedPrefix
from tests.support.tiered_engine import SECONDS, SHAPE, Engine
from tests.support.waiting import wait_until

PROMPT = ["a", "a b", "a b c", "a b c d"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The host has the prompt, the device has none of it."""
    made = Engine(WritePolicy.WRITE_THROUGH)
    made.request(PROMPT)
    assert made.cache.evict_device(24) == 4
    yield made
    made.close()


def loaded(engine: Engine, held: PinnedPrefix) -> Pages:
    """The pages of the host part, in place; their ack may still be on its way."""
    pages = engine.cache.load(held)
    assert not isinstance(pages, NotEnoughPages)
    signal = engine.cache.start_loading()
    if signal is not None:
        signal.wait(SHAPE.layers - 1, SECONDS)
    return pages


def check(engine: Engine, pages: Pages, hashes: list[str]) -> None:
    for page, page_hash in zip(pages, hashes, strict=True):
        assert engine.copies.device.table.state(int(page)) is not PageState.FREE
        engine.check(int(page), page_hash)


def test_two_requests_that_load_the_same_have_their_pages_until_each_is_over(engine: Engine) -> None:
    first, second = engine.cache.match(PROMPT), engine.cache.match(PROMPT)
    ours, theirs = engine.cache.load(first), engine.cache.load(second)
    assert not isinstance(ours, NotEnoughPages) and not isinstance(theirs, NotEnoughPages)
    engine.cache.start_loading()
    assert engine.copies.wait_idle(SECONDS)
    assert not set(ours) & set(theirs)
    others = engine.cache.take_device(16)
    assert not isinstance(others, NotEnoughPages)
    for page in others:
        engine.compute(int(page), "of another request")
    check(engine, ours, PROMPT)
    check(engine, theirs, PROMPT)
    engine.cache.insert(PROMPT, theirs.tolist())
    engine.copies.device.table.release(others)
    engine.cache.release(first)
    check(engine, theirs, PROMPT)
    engine.cache.release(second)
    assert engine.copies.device.table.counts()["present"] == 4


def test_a_request_that_is_over_before_its_second_copy_came_leaves_no_page(engine: Engine) -> None:
    first, second = engine.cache.match(PROMPT), engine.cache.match(PROMPT)
    for held in (first, second):
        assert not isinstance(engine.cache.load(held), NotEnoughPages)
    engine.cache.release(second)
    engine.cache.start_loading()
    assert engine.copies.wait_idle(SECONDS)
    engine.cache.release(first)
    assert engine.copies.device.table.counts()["present"] == 4


@pytest.mark.parametrize("count", [1, 3, 4])
def test_what_came_to_the_device_since_the_match_is_part_of_a_load(engine: Engine, count: int) -> None:
    held, shorter = engine.cache.match(PROMPT), engine.cache.match(PROMPT[:count])
    loaded(engine, shorter)
    assert engine.copies.wait_idle(SECONDS)
    pages = loaded(engine, held)
    assert len(pages) == len(held.host) == 4
    check(engine, pages, PROMPT)
    assert engine.copies.wait_idle(SECONDS)
    engine.cache.release(held)
    engine.cache.release(shorter)
    assert engine.copies.device.table.counts()["present"] == 4


@contextlib.contextmanager
def late_acks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No load is acknowledged before the event is set."""
    may_end = threading.Event()
    end_read = engine.copies.host.table.end_read

    def late(pages: Any) -> None:
        assert may_end.wait(SECONDS)
        end_read(pages)

    with monkeypatch.context() as patched:
        patched.setattr(engine.copies.host.table, "end_read", late)
        yield may_end


@pytest.mark.parametrize("count", [2, 4])
def test_pages_that_the_engine_inserts_before_the_ack_of_their_load_stay_the_caches(
    engine: Engine, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_acks(engine, monkeypatch) as may_end:
        held = engine.cache.match(PROMPT)
        pages = loaded(engine, held)
        engine.cache.insert(PROMPT[:count], pages.tolist()[:count])
        may_end.set()
        assert engine.copies.wait_idle(SECONDS)
    check(engine, pages, PROMPT)
    engine.cache.release(held)
    counts = engine.copies.device.table.counts()
    assert (counts["present"], counts["reserved"]) == (4, 0)
    again = engine.cache.match(PROMPT)
    assert again.device == tuple(pages.tolist())
    engine.cache.release(again)


def test_a_hold_is_released_once(engine: Engine) -> None:
    first, second = engine.cache.match(PROMPT), engine.cache.match(PROMPT)
    engine.cache.release(first)
    with pytest.raises(InvalidRequest):
        engine.cache.release(first)
    assert engine.cache.evict_host(40) == 0, "the second hold ended with the first"
    engine.cache.release(second)


def test_a_hold_from_before_a_clear_keeps_and_frees_nothing(engine: Engine) -> None:
    held = engine.cache.match(PROMPT)
    wait_until(lambda: not engine.controller.book.open())  # as who clears has to
    engine.cache.clear()
    engine.request(["b", "b c"])
    engine.cache.release(held)
    engine.request(["d"])
    assert engine.cache.leading_by_tier(["b", "b c"]) == (2, 2)
    engine.cache.evict_device(24)
    assert engine.cache.leading_by_tier(["b", "b c"]) == (0, 2)


def test_pages_for_fewer_hashes_are_refused_and_stay_the_engines(engine: Engine) -> None:
    pages = engine.cache.take_device(2)
    assert not isinstance(pages, NotEnoughPages)
    with pytest.raises(InvalidRequest):
        engine.cache.insert(["q"], pages.tolist())
    assert engine.copies.device.table.counts()["reserved"] == 2
    engine.copies.device.table.release(as_pages(pages))


def test_a_second_copy_that_is_inserted_before_its_ack_is_freed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_acks(engine, monkeypatch) as may_end:
        first, second = engine.cache.match(PROMPT), engine.cache.match(PROMPT)
        ours, theirs = engine.cache.load(first), engine.cache.load(second)
        assert not isinstance(ours, NotEnoughPages) and not isinstance(theirs, NotEnoughPages)
        signal = engine.cache.start_loading()
        assert signal is not None
        signal.wait(SHAPE.layers - 1, SECONDS)
        engine.cache.insert(PROMPT, theirs.tolist())
        engine.cache.insert(PROMPT, ours.tolist())
        check(engine, ours, PROMPT)
        may_end.set()
        assert engine.copies.wait_idle(SECONDS)
    engine.cache.release(first)
    check(engine, theirs, PROMPT)
    assert engine.copies.device.table.counts()["present"] == 4
    engine.cache.release(second)
    again = engine.cache.match(PROMPT)
    assert again.device == tuple(theirs.tolist())
    engine.cache.release(again)


def test_a_page_that_is_nobodys_is_not_inserted(engine: Engine) -> None:
    pages = engine.cache.take_device(1)
    assert not isinstance(pages, NotEnoughPages)
    engine.copies.device.table.release(pages)
    with pytest.raises(PageStateInvalid):
        engine.cache.insert(["q"], pages.tolist())
    assert engine.cache.leading_by_tier(["q"]) == (0, 0)


def test_second_copies_go_with_a_clear(engine: Engine) -> None:
    held = [engine.cache.match(PROMPT), engine.cache.match(PROMPT)]
    for each in held:
        assert not isinstance(engine.cache.load(each), NotEnoughPages)
    engine.cache.start_loading()
    assert engine.copies.wait_idle(SECONDS)
    wait_until(lambda: not engine.controller.book.open())
    engine.cache.clear()
    assert engine.copies.device.table.free_count == 24
    for each in held:
        engine.cache.release(each)
    assert engine.copies.device.table.free_count == 24


def test_a_load_that_fails_leaves_no_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the copy failed")

    held = engine.cache.match(PROMPT)
    with monkeypatch.context() as patched:
        for path in engine.copies._path.values():
            patched.setattr(path, "up", broken)
        assert not isinstance(engine.cache.load(held), NotEnoughPages)
        assert engine.cache.start_loading() is not None
        assert engine.copies.wait_idle(SECONDS)
    assert engine.copies.device.table.free_count == 24
    pages = loaded(engine, held)
    check(engine, pages, PROMPT)
    assert engine.copies.wait_idle(SECONDS)
    engine.cache.release(held)
    assert engine.copies.device.table.counts()["present"] == 4


def test_a_load_that_failed_and_came_second_when_tried_again_leaves_no_page(engine: Engine) -> None:
    first, second = engine.cache.match(PROMPT), engine.cache.match(PROMPT)
    failed = engine.cache.load(first)
    assert engine.copies.wait_idle(SECONDS)  # which cancels it
    ours, theirs = engine.cache.load(first), engine.cache.load(second, priority=-1)
    assert (
        not isinstance(failed, NotEnoughPages)
        and not isinstance(ours, NotEnoughPages)
        and not isinstance(theirs, NotEnoughPages)
    )
    assert set(ours) == set(failed)
    engine.cache.start_loading()
    assert engine.copies.wait_idle(SECONDS)
    engine.cache.release(first)
    engine.cache.release(second)
    counts = engine.copies.device.table.counts()
    assert (counts["present"], counts["reserved"]) == (4, 0)


@pytest.mark.parametrize("begun", [True, False])
def test_pages_whose_load_has_not_brought_them_are_not_inserted(
    engine: Engine, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail = threading.Event()

    def late(*arguments: Any) -> None:
        assert may_fail.wait(SECONDS)
        raise RuntimeError("the copy failed")

    held = engine.cache.match(PROMPT)
    with monkeypatch.context() as patched:
        for path in engine.copies._path.values():
            patched.setattr(path, "up", late)
        pages = engine.cache.load(held)
        assert not isinstance(pages, NotEnoughPages)
        if begun:
            engine.cache.start_loading()
        with pytest.raises(InvalidRequest):
            engine.cache.insert(PROMPT[:1], pages.tolist()[:1])
        may_fail.set()
        assert engine.copies.wait_idle(SECONDS)
    assert engine.cache.leading_by_tier(PROMPT) == (0, 4)
    engine.cache.release(held)
    assert engine.copies.device.table.free_count == 24


@pytest.mark.parametrize("second", [True, False])
def test_a_load_that_fails_after_its_last_layer_was_queued_leaves_no_page(
    engine: Engine, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it was inserted before: as the prefix, or as a second copy of it."""
    may_end = threading.Event()

    class Failing:
        def wait_on_stream(self) -> None:
            pass

        def wait_here(self) -> None:
            if not may_end.is_set():
                assert may_end.wait(SECONDS)
                raise RuntimeError("the copy failed")

    held, other = engine.cache.match(PROMPT), engine.cache.match(PROMPT)
    before = engine.cache.take_device(4) if second else as_pages([])
    assert not isinstance(before, NotEnoughPages)
    if second:
        for page, page_hash in zip(before, PROMPT, strict=True):
            engine.compute(int(page), page_hash)
    lane = engine.copies._lane[Direction.UP]
    with monkeypatch.context() as patched:
        patched.setattr(lane, "mark", Failing)
        pages = loaded(engine, held)
        if second:
            engine.cache.insert(PROMPT, before.tolist())
        engine.cache.insert(PROMPT[:2], pages.tolist()[:2])
        may_end.set()
        assert engine.copies.wait_idle(SECONDS)
    engine.cache.release(held)
    engine.cache.release(other)
    counts = engine.copies.device.table.counts()
    assert (counts["present"], counts["reserved"]) == (4 if second else 2, 0)


@pytest.mark.parametrize("policy", WritePolicy)
def test_requests_at_the_same_time_have_their_own_bytes_from_match_to_release(policy: WritePolicy) -> None:
    engine = Engine(policy, device_pages=48, host_pages=32)
    begins = threading.Lock()  # a load is begun by whoever queued it, as one scheduler does
    done: list[int] = []

    def requests(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            text = chance.choice("ab")
            hashes = [f"{text}{'x' * number}" for number in range(chance.randint(1, 10))]
            if chance.random() < 0.2:
                engine.controller.prefetch(hashes)
            if chance.random() < 0.3:
                engine.cache.evict_device(chance.randint(1, 24))
            held = engine.cache.match(hashes)
            with begins:
                host = engine.cache.load(held)
                signal = None if isinstance(host, NotEnoughPages) else engine.cache.start_loading()
            if signal is not None:
                signal.wait(SHAPE.layers - 1, SECONDS)
            pages = [*held.device, *([] if isinstance(host, NotEnoughPages) else host.tolist())]
            check(engine, as_pages(pages), hashes[: len(pages)])
            fresh = engine.cache.take_device(len(hashes) - len(pages))
            if not isinstance(fresh, NotEnoughPages):
                for page, page_hash in zip(fresh, hashes[len(pages) :], strict=True):
                    engine.compute(int(page), page_hash)
                engine.cache.insert(hashes, [*pages, *fresh.tolist()])
            check(engine, as_pages(pages), hashes[: len(pages)])
            engine.cache.release(held)
        done.append(seed)

    threads = [threading.Thread(target=requests, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, 1, 2]
    assert engine.copies.wait_idle(SECONDS)
    wait_until(lambda: not engine.controller.book.open())
    engine.close()
