"""What a folder's pages leave behind when they go: it is told many at a time, and no bad page keeps the others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from inspect import GEN_SUSPENDED, getgeneratorstate
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from kvgrpc.prefetch.storage import paged
from kvgrpc.prefetch.storage.base import OK, StorageDown
from kvgrpc.prefetch.storage.file import folder as folder_module
from kvgrpc.prefetch.storage.file.backend import FileBackend, FileConfig
from kvgrpc.prefetch.storage.file.folder import Names
from kvgrpc.prefetch.storage.file.visiting import THREADS
from kvgrpc.prefetch.storage.paged import Listeners
from tests.support.storage_pages import Arena

SECONDS = 20.0
BLOCK = 4096
COUNT = 10
PAGE, LARGE = 2 * BLOCK, 9 * BLOCK  # of disk, with the header


class Rig:
    """A folder of ``COUNT`` pages, which is full, and what is told of it."""

    def __init__(self, folder: Path) -> None:
        self.backend = FileBackend(FileConfig(path=str(folder), max_bytes=COUNT * PAGE))
        self.keys = [f"model/{number}" for number in range(COUNT)]
        small = Arena(COUNT, BLOCK, 1)
        assert self.backend.write(self.keys, small.pages(), SECONDS) == [OK] * COUNT
        self.told: list[list[str]] = []
        self.backend.on_removed(self._tell)

    def _tell(self, keys: Sequence[str]) -> None:
        self.told.append(list(keys))

    def gone(self) -> list[str]:
        there = self.backend.contains(self.keys, SECONDS)
        return [key for key, found in zip(self.keys, there, strict=True) if not found]

    def told_keys(self) -> list[str]:
        return sorted(key for keys in self.told for key in keys)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(paged, "TOLD_WITHIN_SECONDS", 600.0)
    return Rig(tmp_path)


def test_what_a_clear_drops_is_told_many_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "TOLD_AT_ONCE", 4)
    assert rig.backend.clear("model/") == COUNT
    assert [len(keys) for keys in rig.told] == [4, 4, 2]
    assert rig.told_keys() == rig.gone() == rig.keys
    assert rig.backend.close(SECONDS)


def test_what_a_clear_dropped_before_it_failed_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, left = rig.backend._folder.remove, [None] * 3

    def breaks(name: str) -> bool:
        if not left:
            raise OSError(errno.EIO, "injected")
        left.pop()
        return remove(name)

    monkeypatch.setattr(rig.backend._folder, "remove", breaks)
    with pytest.raises(StorageDown):
        rig.backend.clear("model/")
    assert len(rig.gone()) == 3 and rig.told_keys() == rig.gone() and len(rig.told) == 1
    assert rig.backend.close(SECONDS)


def test_a_key_waits_for_others_a_bounded_time_also_where_none_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], list[str]()
    monkeypatch.setattr(paged, "time", SimpleNamespace(monotonic=lambda: now[0]))
    heard = Listeners()
    heard.add(told.extend)
    with heard.telling() as tell:
        for key in ("a", "b", None):
            tell(key)
            assert told == []
        now[0] += 2 * paged.TOLD_WITHIN_SECONDS
        tell(None)
        assert told == ["a", "b"]
        tell("c")
        assert told == ["a", "b"], "its time begins with itself"
    assert told == ["a", "b", "c"]


def test_a_page_that_a_clear_dropped_is_told_before_the_clear_has_looked_at_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "TOLD_WITHIN_SECONDS", 0.0)
    assert rig.backend.clear("model/") == COUNT
    assert [len(keys) for keys in rig.told] == [1] * COUNT
    assert rig.backend.close(SECONDS)


class TestAFolderThatOneCallDoesNotComeThrough:
    """Most of its pages are of others; a call has no time at all, and comes on by one file at least."""

    FOREIGN, OWN = 300, 5

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[FileBackend]:
        backend, arena = FileBackend(FileConfig(path=str(tmp_path))), Arena(1, BLOCK, 1)
        for key in self.foreign() + self.own():
            assert backend.write([key], arena.pages(), SECONDS) == [OK]
        yield backend
        assert backend.close(SECONDS)

    def foreign(self) -> list[str]:
        return [f"foreign/{number}" for number in range(self.FOREIGN)]

    def own(self) -> list[str]:
        return [f"own/{number}" for number in range(self.OWN)]

    def repeated(self, backend: FileBackend, prefix: str = "own/") -> int:
        """Calls until one comes to the end."""
        for calls in range(1, self.FOREIGN + self.OWN + 10):
            try:
                backend.clear(prefix, 0.0)
                return calls
            except StorageDown as error:
                assert "a repeat goes on" in error.message
        raise AssertionError("it never ends")

    def test_repeats_end_and_drop_all_of_it_and_nothing_else(self, backend: FileBackend) -> None:
        assert 1 < self.repeated(backend) <= self.FOREIGN + self.OWN + 1
        assert backend.contains(self.own(), SECONDS) == [False] * self.OWN
        assert backend.contains(self.foreign(), SECONDS) == [True] * self.FOREIGN

    def test_two_that_are_cleared_by_turns_both_end(self, backend: FileBackend) -> None:
        left = {"own/": self.OWN, "foreign/1": 111}
        for _ in range(self.FOREIGN + self.OWN + 1):
            for prefix in left:
                with contextlib.suppress(StorageDown):
                    backend.clear(prefix, 0.0)
        assert {prefix: backend.count(prefix, SECONDS) for prefix in left} == {"own/": 0, "foreign/1": 0}

    def test_with_time_one_call_is_enough_before_and_after(self, backend: FileBackend) -> None:
        assert backend.clear("own/", SECONDS) == self.OWN
        assert backend.clear("own/", SECONDS) == 0
        assert backend.write([self.own()[0]], Arena(1, BLOCK, 1).pages(), SECONDS) == [OK]
        assert backend.clear("own/", SECONDS) == 1, "a clear that came to its end leaves nothing behind"

    def test_one_that_nobody_went_on_with_begins_anew(
        self, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(StorageDown):
            backend.clear("foreign/", 0.0)
        monkeypatch.setattr(folder_module, "REMEMBERED_SECONDS", 0.0)
        gone = next(key for key in self.foreign() if not backend.contains([key], SECONDS)[0])
        lost = self.FOREIGN - backend.count("foreign/", SECONDS)
        assert backend.write([gone], Arena(1, BLOCK, 1).pages(), SECONDS) == [OK]
        assert backend.clear("foreign/", SECONDS) == self.FOREIGN - lost + 1

    def test_few_are_remembered_and_none_after_its_close(self, backend: FileBackend) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        rounds = []
        for number in range(20):
            for _ in range(3):
                with pytest.raises(StorageDown):
                    backend.clear(f"nobody/{number}", 0.0)
            rounds.append(backend._rounds._stopped[f"nobody/{number}"][1])
            assert 0 < self.open_folders(rounds[-1]) <= THREADS
        assert [self.open_folders(each) > 0 for each in rounds] == [False] * 12 + [True] * 8
        assert len(os.listdir("/proc/self/fd")) - descriptors <= 8 * THREADS
        assert backend.close(SECONDS), "which closes the folders that they have open"
        assert not any(self.open_folders(each) for each in rounds)

    def open_folders(self, folders: Iterable[Names]) -> int:
        return sum(getgeneratorstate(names) == GEN_SUSPENDED for names in folders)

    @pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
    def test_a_process_without_descriptors_passes_over_no_page(
        self, backend: FileBackend, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def none_left(path: str, flags: int) -> int:
            raise OSError(code, "injected")

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", none_left)
            with pytest.raises(StorageDown, match="injected"):
                backend.clear("own/", SECONDS)
        assert backend.clear("own/", SECONDS) == self.OWN


@pytest.mark.parametrize("form", ["kvgrpc", "sglang"])
def test_a_root_that_is_gone_is_an_error_and_no_empty_store(tmp_path: Path, form: Literal["kvgrpc", "sglang"]) -> None:
    backend = FileBackend(FileConfig(path=str(tmp_path / "root"), format=form))
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(StorageDown, match="No such file"):
        backend.clear("", SECONDS)
    with pytest.raises(StorageDown, match="No such file"):
        backend.count("", SECONDS)
    assert backend.close(SECONDS)


@pytest.mark.parametrize("thing", ["folder", "pipe", "link"])
def test_what_is_no_plain_file_is_no_page_and_keeps_none_from_being_cleared(rig: Rig, thing: str) -> None:
    path = Path(rig.backend._folder.path("00/nothing.kv"))
    path.parent.mkdir(exist_ok=True)
    if thing == "folder":
        path.mkdir()
    elif thing == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/etc/passwd")
    assert rig.backend.count("", SECONDS) == COUNT
    assert rig.backend.clear("model/", SECONDS) == COUNT
    assert rig.backend.clear("", SECONDS) == 0 and os.path.lexists(path)
    assert rig.backend.close(SECONDS)


def test_all_pages_that_make_room_for_one_are_told_at_once(rig: Rig) -> None:
    large = Arena(1, LARGE - BLOCK, 1)
    assert rig.backend.write(["large"], large.pages(), SECONDS) == [OK]
    assert len(rig.gone()) == 5 and rig.told_keys() == rig.gone() and len(rig.told) == 1
    assert rig.backend.close(SECONDS)


class TestAPageWhoseHeaderTheDiskDoesNotRead:
    @pytest.fixture(autouse=True)
    def broken(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> str:
        name, pread = rig.backend._form.path(rig.keys[0]), os.pread
        assert name is not None
        path = rig.backend._folder.path(name)

        def breaks(descriptor: int, count: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                raise OSError(errno.EIO, "injected")
            return pread(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", breaks)
        return path

    def test_it_keeps_no_other_from_being_cleared(self, rig: Rig, broken: str) -> None:
        assert rig.backend.clear("model/", SECONDS) == COUNT - 1
        assert rig.told_keys() == rig.keys[1:] and os.path.exists(broken), "whose it is, nobody knows"
        assert rig.backend.clear("", SECONDS) == 1 and not os.path.exists(broken)
        assert rig.backend.close(SECONDS)

    def test_it_makes_room_as_any_other(self, rig: Rig, broken: str) -> None:
        large = Arena(1, COUNT * PAGE - BLOCK, 1)
        assert rig.backend.write(["large"], large.pages(), SECONDS) == [OK]
        assert rig.told_keys() == rig.keys[1:] and not os.path.exists(broken)
        assert rig.backend.close(SECONDS)
