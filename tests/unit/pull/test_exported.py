"""The bounded memory of pages that an engine wrote through, from which peers are lent."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import pytest

from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.pull.lending.exported import ExportedPages

PAGE_BYTES = 64
HASHES = [f"{number:064x}" for number in range(8)]


class Engine:
    """Pages of an engine: two pieces each, with their number in every byte."""

    def __init__(self, pages: int = len(HASHES)) -> None:
        self._memory = ctypes.create_string_buffer(pages * PAGE_BYTES)
        for page in range(pages):
            self.write(page, page + 1)

    def write(self, page: int, value: int) -> None:
        ctypes.memset(ctypes.addressof(self._memory) + page * PAGE_BYTES, value, PAGE_BYTES)

    def pages(self, *numbers: int) -> list[PageBuffers]:
        half = PAGE_BYTES // 2
        at = [ctypes.addressof(self._memory) + number * PAGE_BYTES for number in numbers]
        return [((address, half), (address + half, half)) for address in at]


def bytes_of(exported: ExportedPages, hashes: Sequence[str]) -> list[bytes]:
    with exported.reading(hashes) as pages:
        return [b"".join(ctypes.string_at(*piece) for piece in exported.buffers(page)) for page in pages]


def filled(pages: int, *numbers: int) -> tuple[ExportedPages, Engine]:
    exported, engine = ExportedPages(pages, PAGE_BYTES), Engine()
    exported.offer([HASHES[number] for number in numbers], engine.pages(*numbers))
    return exported, engine


def test_what_was_offered_is_lent_though_the_engine_has_used_its_page_again() -> None:
    exported, engine = filled(4, 0, 1, 2)
    engine.write(1, 99)
    assert exported.count(HASHES) == 3
    assert bytes_of(exported, HASHES) == [bytes([value]) * PAGE_BYTES for value in (1, 2, 3)]


def test_only_leading_pages_count() -> None:
    exported, _ = filled(4, 0, 2)
    assert exported.count(HASHES) == 1
    assert exported.count(HASHES[2:]) == 1, "a suffix is found by itself: a hash covers what lies before it"


def test_what_was_used_longest_ago_goes_first() -> None:
    exported, engine = filled(3, 0, 1, 2)
    bytes_of(exported, HASHES[:1])
    exported.offer([HASHES[1]], engine.pages(1))
    exported.offer([HASHES[3]], engine.pages(3))
    assert [exported.count([name]) for name in HASHES[:4]] == [1, 1, 0, 1]
    assert len(exported) == 3


def test_a_page_that_is_read_stays() -> None:
    exported, engine = filled(2, 0, 1)
    with exported.reading(HASHES[:2]):
        exported.offer([HASHES[2]], engine.pages(2))
        assert exported.count(HASHES[:2]) == 2
        assert exported.count([HASHES[2]]) == 0, "there is no room for it at this moment"
    exported.offer([HASHES[2]], engine.pages(2))
    assert bytes_of(exported, [HASHES[2]]) == [bytes([3]) * PAGE_BYTES]


def test_pages_behind_those_that_are_here_no_more_are_read_by_their_own_hash() -> None:
    exported, engine = filled(2, 0, 1)
    exported.offer([HASHES[2]], engine.pages(2))  # in the place of the first
    with exported.reading(HASHES[:4], 1) as pages:
        assert len(pages) == 2
    with exported.reading(HASHES[:4]) as pages:
        assert not pages


def test_pages_of_another_size_are_left_out() -> None:
    exported, engine = filled(2)
    ((piece, _),) = engine.pages(0)
    exported.offer(HASHES[:1], [(piece,)])
    assert exported.count(HASHES) == 0


def test_a_clear_gives_all_room_back() -> None:
    exported, engine = filled(3, 0, 1, 2)
    exported.clear()
    assert exported.count(HASHES) == 0
    exported.offer(HASHES[3:6], engine.pages(3, 4, 5))
    assert exported.count(HASHES[3:]) == 3


def test_a_page_that_is_read_at_a_clear_is_nobodys_afterwards() -> None:
    exported, engine = filled(2, 0, 1)
    with exported.reading(HASHES[:2]) as pages:
        exported.clear()
        assert exported.count(HASHES) == 0, "whoever asks now would get the bytes of old weights"
        exported.offer([HASHES[2]], engine.pages(2))
        assert exported.count([HASHES[2]]) == 0, "its page would be written while it is read"
        first = exported.buffers(pages[0])
        assert b"".join(ctypes.string_at(*piece) for piece in first) == bytes([1]) * PAGE_BYTES
    exported.offer(HASHES[2:4], engine.pages(2, 3))
    assert exported.count(HASHES[2:]) == 2


def test_a_page_that_is_offered_during_a_clear_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, engine = filled(2)
    copy = ctypes.memmove

    def cleared(*arguments: int) -> None:
        copy(*arguments)
        exported.clear()

    monkeypatch.setattr(ctypes, "memmove", cleared)
    exported.offer(HASHES[:1], engine.pages(0))
    monkeypatch.undo()
    assert exported.count(HASHES) == 0
    exported.offer(HASHES[2:4], engine.pages(2, 3))
    assert exported.count(HASHES[2:]) == 2


def test_threads_that_offer_and_read_the_same_pages_never_see_the_bytes_of_others() -> None:
    exported, engine = filled(3)
    wrong: list[object] = []
    stop = threading.Event()

    def offer(first: int) -> None:
        while not stop.is_set():
            for number in range(first, len(HASHES)):
                exported.offer([HASHES[number]], engine.pages(number))

    def read() -> None:
        for _ in range(2000):
            for number, name in enumerate(HASHES):
                wrong.extend(found for found in bytes_of(exported, [name]) if found != bytes([number + 1]) * PAGE_BYTES)

    writers = [threading.Thread(target=offer, args=(first,)) for first in (0, 3)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert wrong == [] and len(exported) <= 3


def test_after_its_end_nothing_is_lent_or_taken() -> None:
    exported, engine = filled(4, 0, 1)
    exported.close()
    exported.offer(HASHES[2:4], engine.pages(2, 3))
    assert exported.count(HASHES) == 0 and exported.count(HASHES[2:]) == 0
