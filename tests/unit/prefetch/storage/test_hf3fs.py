"""Pages in slots of one file: who gets which slot, what a crash leaves, and 3FS's client by a stand-in for it."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import OK, PageStatus, StorageDown
from kvgrpc.prefetch.storage.hf3fs.backend import Hf3fsBackend, Hf3fsConfig
from kvgrpc.prefetch.storage.hf3fs.client import LocalClient
from kvgrpc.prefetch.storage.hf3fs.slots import Slot, Slots
from tests.support import old_pages
from tests.support.storage_openers import hf3fs
from tests.support.storage_pages import Arena
from tests.support.waiting import wait_until

SECONDS = 20.0
NBYTES = 5000
SLOT = 4096 + 8192


def keys(*numbers: int) -> list[str]:
    return [f"page-{number}" for number in numbers]


def opened(folder: Path, slots: int = 4, **settings: object) -> Any:
    return hf3fs(folder, page_bytes=NBYTES, max_bytes=slots * SLOT, **settings)


def arena(count: int = 16) -> Arena:
    return Arena(count, NBYTES, 1)


def test_pages_are_there_again_when_the_file_is_opened_again(tmp_path: Path) -> None:
    backend, memory = opened(tmp_path), arena()
    noise = memory.fill_all()
    assert backend.write(keys(0, 1, 2), memory.pages(0, 1, 2), SECONDS) == [OK] * 3
    assert backend.delete(keys(1), SECONDS) == 1
    assert backend.close(SECONDS)
    again = opened(tmp_path)
    assert again.contains(keys(0, 1, 2), SECONDS) == [True, False, True]
    assert (again.stats().pages, again.stats().nbytes, again.stats().capacity) == (2, 2 * NBYTES, 4 * NBYTES)
    assert again.read(keys(2, 0), memory.pages(8, 9), SECONDS) == [OK] * 2
    assert [memory.bytes(8), memory.bytes(9)] == [noise[2], noise[0]]
    assert again.close(SECONDS)


def test_a_file_from_before_headers_named_their_checksum_is_opened_and_its_pages_are_read(tmp_path: Path) -> None:
    slot = 4096 + 12_288
    first = (old_pages.CHECKED + old_pages.PAGE).ljust(slot, b"\0")
    (tmp_path / "kvgrpc.bin").write_bytes((old_pages.HF3FS + first).ljust(4096 + 4 * slot, b"\0"))
    backend, memory = hf3fs(tmp_path, page_bytes=len(old_pages.PAGE), max_bytes=4 * slot), Arena(1, 5000)
    assert backend.read([old_pages.KEY], memory.pages(), SECONDS) == [OK]
    assert memory.bytes(0) == old_pages.PAGE
    assert backend.close(SECONDS)


def test_the_least_recently_used_make_room_and_it_is_told(tmp_path: Path) -> None:
    backend, memory = opened(tmp_path), arena()
    noise = memory.fill_all()
    gone: list[str] = []
    backend.on_removed(gone.extend)
    backend.write(keys(0, 1, 2, 3), memory.pages(0, 1, 2, 3), SECONDS)
    first, *_ = (key for key in keys(0, 1, 2, 3))
    backend.read([first], memory.pages(8), SECONDS)
    for number in (4, 5):
        assert backend.write(keys(number), memory.pages(number), SECONDS) == [OK]
    assert len(gone) == 2 and first not in gone and backend.stats().evicted == 2
    assert backend.read([first], memory.pages(9), SECONDS) == [OK] and memory.bytes(9) == noise[0]
    assert backend.close(SECONDS)


def test_a_slot_that_is_read_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, memory = opened(tmp_path, slots=2), arena()
    noise = memory.fill_all()
    backend.write(keys(0, 1), memory.pages(0, 1), SECONDS)
    begun, gate, read = threading.Event(), threading.Event(), LocalClient.read

    def held(client: LocalClient, offset: int, pieces: Sequence[memoryview]) -> int:
        begun.set()
        assert gate.wait(SECONDS)
        return read(client, offset, pieces)

    monkeypatch.setattr(LocalClient, "read", held)
    results: list[Any] = []
    reading = threading.Thread(target=lambda: results.extend(backend.read(keys(0), memory.pages(8), SECONDS)))
    reading.start()
    assert begun.wait(SECONDS)
    assert backend.write(keys(2), memory.pages(2), SECONDS) == [OK]
    assert backend.write(keys(3), memory.pages(3), SECONDS) == [OK], "the page that nobody reads goes again"
    assert backend.delete(keys(0), SECONDS) == 1 and backend.contains(keys(0), SECONDS) == [False]
    gate.set()
    reading.join(SECONDS)
    (result,) = results
    # Its header was wiped meanwhile: it is gone, or it was read before that. Another page's bytes it never is.
    assert result.status is PageStatus.MISSING or memory.bytes(8) == noise[0]
    assert backend.write(keys(4, 3), memory.pages(4, 3), SECONDS) == [OK] * 2
    assert backend.close(SECONDS)


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Writes wait for the second event; the first says that one has begun."""
    begun, gate, write = threading.Event(), threading.Event(), LocalClient.write

    def held(client: LocalClient, offset: int, pieces: Sequence[memoryview]) -> None:
        begun.set()
        assert gate.wait(SECONDS)
        write(client, offset, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(LocalClient, "write", held)
        yield begun, gate


def test_a_page_that_is_being_written_counts_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, memory = opened(tmp_path), arena()
    memory.fill_all()
    assert backend.write(keys(0), memory.pages(0), SECONDS) == [OK]
    with held_writes(monkeypatch) as (begun, gate):
        results: list[Any] = []
        writing = threading.Thread(target=lambda: results.extend(backend.write(keys(1), memory.pages(1), SECONDS)))
        writing.start()
        assert begun.wait(SECONDS)
        assert backend.contains(keys(0, 1), SECONDS) == [True, False]
        assert (backend.count("page-", SECONDS), backend.stats().pages, backend.stats().nbytes) == (1, 1, NBYTES)
        gate.set()
        writing.join(SECONDS)
    assert results == [OK]
    assert (backend.count("page-", SECONDS), backend.stats().pages, backend.stats().nbytes) == (2, 2, 2 * NBYTES)
    assert backend.clear("page-", SECONDS) == 2
    assert backend.close(SECONDS)


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 4100, 4096 + NBYTES - 1, 4096 + NBYTES, 2 * 4096 + NBYTES - 1])
def test_a_writer_that_is_killed_at_any_byte_leaves_the_page_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    backend, memory = opened(tmp_path / "ours", slots=2), arena()
    noise = memory.fill_all()
    backend.write(keys(0, 1), memory.pages(0, 1), SECONDS)
    left, write = [cut], LocalClient.write

    def cut_short(client: LocalClient, offset: int, pieces: Sequence[memoryview]) -> None:
        data = b"".join(pieces)[: left[0]]
        left[0] -= len(data)
        if data:
            write(client, offset, [memoryview(data)])
        if not left[0]:
            shutil.copytree(tmp_path / "ours", tmp_path / "crashed", dirs_exist_ok=True)
            raise OSError("killed")

    monkeypatch.setattr(LocalClient, "write", cut_short)
    assert backend.write(keys(2), memory.pages(2), SECONDS)[0].status is PageStatus.FAILED
    monkeypatch.undo()
    after = opened(tmp_path / "crashed", slots=2)
    results = after.read(keys(0, 1, 2), memory.pages(8, 9, 10), SECONDS)
    for number, result in enumerate(results):
        assert result.status in (PageStatus.OK, PageStatus.MISSING)
        assert result.status is PageStatus.MISSING or memory.bytes(8 + number) == noise[number]
    assert sum(result.ok for result in results) >= 1, "the page that was not in its way"
    assert after.write(keys(2), memory.pages(2), SECONDS) == [OK]
    assert after.close(SECONDS) and backend.close(SECONDS)


def test_bytes_that_changed_on_the_disk_are_missing_and_written_again(tmp_path: Path) -> None:
    backend, memory = opened(tmp_path), arena()
    noise = memory.fill_all()
    backend.write(keys(0), memory.pages(0), SECONDS)
    with (tmp_path / "kvgrpc.bin").open("r+b") as file:
        file.seek(4096 + 4096 + 100)
        file.write(b"\xff\x00\xff")
    assert backend.read(keys(0), memory.pages(8), SECONDS)[0].status is PageStatus.MISSING
    assert backend.contains(keys(0), SECONDS) == [False]
    assert backend.write(keys(0), memory.pages(0), SECONDS) == [OK]
    assert backend.read(keys(0), memory.pages(8), SECONDS) == [OK] and memory.bytes(8) == noise[0]
    assert backend.close(SECONDS)


class TestWhatIsRefused:
    def test_a_file_that_is_open_elsewhere_or_has_other_sizes_is_named(self, tmp_path: Path) -> None:
        backend = opened(tmp_path)
        with pytest.raises(InvalidRequest, match="a name of its own for each rank"):
            opened(tmp_path)
        other = opened(tmp_path, name="rank-1")
        assert backend.close(SECONDS) and other.close(SECONDS)
        with pytest.raises(InvalidRequest, match="4 slots of 12288 bytes"):
            opened(tmp_path, slots=5)
        (tmp_path / "foreign.bin").write_bytes(b"x" * 9000)
        with pytest.raises(InvalidRequest, match="no file of kvgrpc"):
            opened(tmp_path, name="foreign")
        assert (tmp_path / "foreign.bin").read_bytes() == b"x" * 9000

    def test_a_page_that_is_larger_than_a_slot_says_what_to_set(self, tmp_path: Path) -> None:
        backend = opened(tmp_path)
        large = Arena(1, 9000, 1)
        (result,) = backend.write(keys(0), large.pages(), SECONDS)
        assert result.status is PageStatus.FAILED and "page_bytes is 5000" in result.detail and not result.retryable
        assert backend.close(SECONDS)

    def test_a_file_smaller_than_a_page_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest) as refused:
            hf3fs(tmp_path, max_bytes=SLOT - 1, page_bytes=NBYTES)
        assert refused.value.metadata["field"] == "max_bytes"

    @pytest.mark.skipif(importlib.util.find_spec("hf3fs_fuse") is not None, reason="3FS's client is installed")
    def test_without_its_client_it_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(FeatureDisabled) as refused:
            open_backend("hf3fs", {"path": str(tmp_path), "max_bytes": "1MB", "page_bytes": "64KB"})
        assert refused.value.metadata["feature"] == "storage.hf3fs" and "'local'" in refused.value.message


def test_what_a_clear_drops_is_told_once_also_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, memory = opened(tmp_path, slots=8), arena()
    memory.fill_all()
    names = keys(*range(8))
    assert backend.write(names, memory.pages(*range(8)), SECONDS) == [OK] * 8
    told: list[str] = []
    backend.on_removed(told.extend)
    with held_writes(monkeypatch) as (begun, gate):
        while not begun.is_set():
            with pytest.raises(StorageDown):
                backend.clear(timeout=0.2)
        assert sorted(told) == sorted(names), "before any of them is wiped"
        gate.set()
        assert backend.close(SECONDS)  # its threads have ended: nothing is told any more
    assert sorted(told) == sorted(names)


def test_a_slot_never_has_two_pages() -> None:
    rng = random.Random(7)
    for _ in range(200):
        slots = Slots(3)
        using: list[Slot] = []
        for _ in range(60):
            key = f"k{rng.randrange(6)}"
            choice = rng.randrange(4)
            if choice == 0 and not any(slot.key == key and not slot.complete for slot in using):
                slot, _ = slots.claim(key, 10, 0.0)
                using.extend([slot] if slot is not None else [])
            elif choice == 1 and (read := slots.read(key)) is not None:
                using.append(read)
            elif choice == 2 and (dropped := slots.drop(key)) is not None:
                using.append(dropped)
            elif using:
                slots.end(using.pop(rng.randrange(len(using))), complete=rng.random() < 0.8)
            numbers = {id(slot): slot.number for slot in (*using, *slots._pages.values())}
            assert len(set(numbers.values())) == len(numbers), "two pages in one slot"
            assert not set(numbers.values()) & set(slots._free)
            assert len(numbers) + len(slots._free) == 3
            assert len(slots) == sum(slot.complete for slot in slots._pages.values())
        while using:
            slots.end(using.pop(), complete=True)
        assert len(slots) + len(slots._free) == 3 and slots.nbytes == 10 * len(slots)


def test_the_same_page_is_written_once_by_those_who_come_together() -> None:
    slots = Slots(2)
    first, _ = slots.claim("k", 10, time.monotonic() + SECONDS)
    assert first is not None and not first.complete
    found: list[Slot | None] = []
    other = threading.Thread(target=lambda: found.append(slots.claim("k", 10, time.monotonic() + SECONDS)[0]))
    other.start()
    slots.end(first, complete=True)
    other.join(SECONDS)
    assert found == [first] and first.complete


def test_nobody_waits_for_a_write_of_the_same_page_longer_than_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That write may hang for good; the threads are needed for other pages."""
    backend, memory = opened(tmp_path, threads=2), arena()
    noise = memory.fill_all()
    with held_writes(monkeypatch) as (begun, gate):
        first: list[Any] = []
        writing = threading.Thread(target=lambda: first.extend(backend.write(keys(0), memory.pages(0), SECONDS)))
        writing.start()
        assert begun.wait(SECONDS)
        (second,) = backend.write(keys(0), memory.pages(1), 0.2)
        assert second.status is PageStatus.TIMEOUT and second.retryable
        wait_until(lambda: second.quiescent)
        (missing,) = backend.read(keys(1), memory.pages(8), SECONDS)
        assert missing.status is PageStatus.MISSING, "a thread is free"
        assert not first
        gate.set()
        writing.join(SECONDS)
    assert first == [OK]
    assert backend.write(keys(0), memory.pages(1), SECONDS) == [OK]
    assert backend.read(keys(0), memory.pages(9), SECONDS) == [OK] and memory.bytes(9) == noise[0]
    assert backend.close(SECONDS)


class TestUsrbio:
    """As 3FS's own interface is written; a real one was never at hand."""

    @pytest.fixture
    def stand_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
        module: Any = StandIn(tmp_path)
        monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", module)
        return module  # type: ignore[no-any-return]

    @pytest.fixture
    def backend(self, tmp_path: Path, stand_in: StandIn) -> Hf3fsBackend:
        config = Hf3fsConfig(path=str(tmp_path), max_bytes=8 * SLOT, page_bytes=NBYTES)
        return Hf3fsBackend(config)

    def test_pages_come_back_through_its_rings(self, backend: Hf3fsBackend, stand_in: StandIn) -> None:
        memory = Arena(16, NBYTES // 2, 2)
        noise = [memory.fill(number, number) for number in range(8)]
        assert backend.write(keys(*range(8)), memory.pages(*range(8)), SECONDS) == [OK] * 8
        assert backend.read(keys(*range(8)), memory.pages(*range(8, 16)), SECONDS) == [OK] * 8
        assert [memory.bytes(number) for number in range(8, 16)] == noise
        assert backend.close(SECONDS)
        assert stand_in.registered == set()

    def test_what_3fs_answers_with_an_error_is_failed(self, backend: Hf3fsBackend, stand_in: StandIn) -> None:
        memory = arena()
        memory.fill_all()
        assert backend.write(keys(0), memory.pages(0), SECONDS) == [OK]
        stand_in.error = -5
        (read,) = backend.read(keys(0), memory.pages(8), SECONDS)
        (written,) = backend.write(keys(1), memory.pages(1), SECONDS)
        assert [each.status for each in (read, written)] == [PageStatus.FAILED] * 2 and "Input/output" in read.detail
        stand_in.error = 0
        assert backend.read(keys(0), memory.pages(8), SECONDS) == [OK], "a page is not lost by a read that failed"
        assert backend.close(SECONDS)


class StandIn:
    """The five calls of ``hf3fs_fuse.io`` over a local file."""

    def __init__(self, mount: Path) -> None:
        self._mount = str(mount)
        self.registered: set[int] = set()
        self.error = 0

    def extract_mount_point(self, path: str) -> str:
        assert path.startswith(self._mount)
        return self._mount

    def register_fd(self, descriptor: int) -> None:
        self.registered.add(descriptor)

    def deregister_fd(self, descriptor: int) -> None:
        self.registered.remove(descriptor)

    def make_iovec(self, shared: Any, mount: str) -> memoryview:
        assert mount == self._mount
        return np.frombuffer(shared.buf, dtype=np.uint8).data

    def make_ioring(self, mount: str, entries: int, for_read: bool) -> Any:
        assert (mount, entries) == (self._mount, 1)
        prepared: list[tuple[memoryview, int, int]] = []

        def prepare(memory: memoryview, reads: bool, descriptor: int, offset: int) -> None:
            assert reads == for_read and descriptor in self.registered
            prepared.append((memory, descriptor, offset))

        def wait(min_results: int) -> list[Any]:
            memory, descriptor, offset = prepared.pop()
            move = os.preadv if for_read else os.pwritev
            return [SimpleNamespace(result=self.error or move(descriptor, [memory], offset))]

        return SimpleNamespace(prepare=prepare, submit=lambda: SimpleNamespace(wait=wait))
