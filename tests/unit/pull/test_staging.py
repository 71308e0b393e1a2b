"""Staging memory: its pages come back whatever happens, and nothing of it is touched once it is closed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import ServerDraining
from kvgrpc.model import RankId, RankRef
from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.pull.book import Entry, PullBook
from kvgrpc.pull.lending.lender import UNOPENED_SECONDS, Lender, Loan
from kvgrpc.pull.model import PullDirection
from kvgrpc.pull.staging import Staging, StagingPages
from tests.support.waiting import wait_until

PAGE_BYTES = 64


class _Plane:
    def __init__(self) -> None:
        self.memory: Any = None

    def allocate(self, nbytes: int) -> int:
        self.memory = ctypes.create_string_buffer(nbytes)
        return ctypes.addressof(self.memory)

    def register(self, ranges: Sequence[Any]) -> None:
        pass


class _Cache:
    """A page whose buffers cannot be told, while it is ``broken``."""

    def __init__(self) -> None:
        self.broken = True
        self.held = 0
        self.page = ctypes.create_string_buffer(PAGE_BYTES)

    def count(self, hashes: Sequence[str]) -> int:
        return len(hashes)

    @contextmanager
    def reading(self, hashes: Sequence[str], first: int = 0) -> Iterator[Sequence[int]]:
        self.held = len(hashes) - first
        yield range(len(hashes) - first)

    def buffers(self, page: int) -> PageBuffers:
        if self.broken:
            raise RuntimeError("a bug")
        return ((ctypes.addressof(self.page), PAGE_BYTES),)


@pytest.fixture
def staging() -> Iterator[Staging]:
    plane = _Plane()  # whose memory it is
    yield Staging(plane, 8, PAGE_BYTES, 4, "x")  # type: ignore[arg-type]
    assert plane.memory


def test_close_waits_for_a_copy_and_none_begins_after_it(staging: Staging) -> None:
    page = ctypes.create_string_buffer(PAGE_BYTES)
    go, began = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[int, int]]:
        began.set()
        assert go.wait(10.0)
        yield ctypes.addressof(page), PAGE_BYTES

    copying = threading.Thread(target=lambda: staging.copy_out([5], [slowly()]))  # type: ignore[list-item]
    copying.start()
    assert began.wait(10.0)
    assert not staging.close(0.05)
    go.set()
    assert staging.close(10.0)
    copying.join(10.0)
    assert not staging.copy_out([5], [((0, PAGE_BYTES),)]) and not staging.copy_in([0], [((0, PAGE_BYTES),)])


def test_whoever_waits_for_a_page_hears_of_the_close(staging: Staging) -> None:
    assert len(staging.landing.take(4)) == 4
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(staging.landing.take(1, 60.0)))
    waiting.start()
    wait_until(waiting.is_alive)
    began = time.monotonic()
    staging.close(1.0)
    waiting.join(10.0)
    assert got == [[]] and time.monotonic() - began < 10.0
    assert staging.lending.take(1, 60.0) == []


def test_pages_of_a_loan_that_could_not_be_copied_are_free_again(staging: Staging) -> None:
    cache, taker = _Cache(), RankRef(RankId("taker"), 1)
    lender = Lender(cache, staging, object(), PullBook(PAGE_BYTES))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        lender.lend(["a", "b"], 0, 1, taker)
    assert staging.lending.taken == 0 and not lender._lent_to
    cache.broken = False
    with staging._idle:
        staging._closed = True
    with pytest.raises(ServerDraining):
        lender.lend(["a", "b"], 0, 1, taker)
    assert staging.lending.taken == 0 and not lender._lent_to


def test_a_cache_is_held_for_no_more_pages_than_can_be_lent(staging: Staging) -> None:
    """An engine pins what is read: a prompt of 60,000 pages, of which a loan has room for a few."""
    cache, taker = _Cache(), RankRef(RankId("taker"), 1)
    lender = Lender(cache, staging, object(), PullBook(PAGE_BYTES))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        lender.lend([f"{number}" for number in range(60_000)], 5, 1, taker)
    assert cache.held == staging.lending.size // 2


def test_pages_are_given_out_in_order_however_they_came_back(staging: Staging) -> None:
    """Pages that follow each other are one write, and one copy."""
    landing = staging.landing
    assert landing.take(3) == [4, 5, 6]
    landing.give_back([6, 4])
    assert landing.take(4, leaving_half=True) == [4, 6]
    landing.retire([6, 5], lambda: True)
    landing.give_back([4])
    assert landing.take(9) == [4, 5, 6, 7] and landing.take(1) == [] and landing.taken == 4


class _Sender:
    """Its taker opens the room, which this process reads in its second look; in the first it ``stops``."""

    decode_prefix_pages: int | None = None
    pages_done, failure, release_safe, ended = 0, None, True, False

    def __init__(self) -> None:
        self.now = 100.0
        self.aborted: list[str] = []

    async def wait_async(self, seconds: float) -> None:
        if self.now == 100.0:
            self.now += seconds + 2 * UNOPENED_SECONDS
        else:
            self.now += seconds
            self.decode_prefix_pages, self.ended = 0, True

    def abort(self, why: str) -> None:
        self.aborted.append(why)
        self.ended = True

    def close(self) -> None: ...


async def test_a_process_that_stood_still_takes_no_room_for_unopened(staging: Staging) -> None:
    sender, taker, book = _Sender(), RankRef(RankId("taker"), 1), PullBook(PAGE_BYTES)
    lender = Lender(_Cache(), staging, object(), book, lambda: sender.now)  # type: ignore[arg-type]
    entry = Entry(1, PullDirection.LENT, taker, "", 1, 1)
    book.begin(entry)
    await lender.settle(Loan(sender, staging.lending.take(1), entry, sender.now))  # type: ignore[arg-type]
    assert not sender.aborted and not staging.lending.taken


def test_a_few_of_many_pages_come_and_go_without_a_look_at_the_others() -> None:
    """The event loop waits for the same lock."""
    pages = StagingPages(range(1 << 50))
    assert pages.take(8) == [*range(8)]
    pages.give_back([6, 0, 4])
    pages.give_back([3, 5])
    assert pages.take(4) == [0, 3, 4, 5] and pages.taken == 7
    pages.give_back([*range(6), 7])
    assert pages.take(1 << 10) == [*range(1 << 10)] and pages.taken == 1 << 10


def test_pages_in_several_parts_are_copied_in_and_out(staging: Staging) -> None:
    there = np.random.default_rng(0).integers(0, 255, (3, PAGE_BYTES), dtype=np.uint8)
    back = np.zeros_like(there)

    def parts(memory: Any, page: int) -> PageBuffers:
        address = int(memory.ctypes.data) + page * PAGE_BYTES
        return ((address + 40, 24), (address, 8), (address + 8, 32))

    assert staging.copy_in([2, 0, 3], [parts(there, page) for page in range(3)])
    assert staging.copy_out([2, 0, 3], [parts(back, page) for page in range(3)])
    assert (back == there).all()
    assert staging.copy_in([], []) and staging.copy_out([], [])
